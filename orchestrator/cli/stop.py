"""`dfo stop`"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import EVERYDAY, TargetOpt, command, duration
from orchestrator.cli.run_argument import RunWords, choose_run
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console

GraceOpt = Annotated[
    float | None,
    typer.Option(
        "--grace",
        metavar="TIME",
        parser=duration,
        help="How long the run may take to write a checkpoint [default: launch.stop.grace]",
        show_default=False,
    ),
]
NowOpt = Annotated[bool, typer.Option("--now", help="Kill at once; what was not checkpointed is lost")]


@command("stop", panel=EVERYDAY)
def stop(
    rt: Runtime, words: RunWords = None, target: TargetOpt = None, grace: GraceOpt = None, now: NowOpt = False
) -> None:
    """Stop a run: ask, wait, then kill the whole tree"""
    from orchestrator.runs.stop import stop_run

    run = choose_run(rt, words)
    console, name = rt.console, rt.target.name
    with console.step("stop") as step:
        stopped = stop_run(
            rt.session,
            run=run,
            grace=0.0 if now else grace,
            on_wait=lambda fields: _say_waiting(console, fields),
        )
        step.detail = stopped.summary
    console.say(stopped.status.sentence(name))
    for warning in stopped.warnings:
        console.warn(warning)
    console.result(target=name, **stopped.as_dict(name))


def _say_waiting(console: Console, fields: Mapping[str, object]) -> None:
    """A line after 5 s and then every 15 s: a checkpoint takes its time, silence looks like a hang."""
    waited = fields["waited"]
    if waited == 5 or (isinstance(waited, int) and waited and waited % 15 == 0):
        console.say(f"  {'waiting':<10}{waited} s so far for stage {fields['stage']} to end by itself")
