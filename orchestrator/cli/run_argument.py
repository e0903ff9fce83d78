"""`[RUN] [TARGET]`: the arguments of commands that look at a run."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.common import complete_target
from orchestrator.cli.runtime import Runtime

RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] [TARGET]",
        help="A word of digits is a run [default: the newest], any other a target",
        autocompletion=complete_target,
        show_default=False,
    ),
]


def choose_run(rt: Runtime, words: list[str] | None) -> int | None:
    """The run that was named, None for the newest; a target among the words is chosen too."""
    from orchestrator.runs.choice import parse_run

    choice = parse_run(words or (), target=rt.target_option)
    rt.target_option = choice.target
    return choice.run
