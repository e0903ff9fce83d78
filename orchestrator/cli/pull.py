"""`dfo pull`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.common import EVERYDAY, TargetOpt, command
from orchestrator.cli.run_argument import RunWords, choose_run
from orchestrator.cli.runtime import Runtime

WhatOpt = Annotated[str, typer.Option("--what", metavar="WHAT", help="checkpoints, report, export, logs or all")]
ToOpt = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", help="Folder for all of it [default: `artefacts` of the inventory]"),
]


@command("pull", panel=EVERYDAY)
def pull(
    rt: Runtime, words: RunWords = None, target: TargetOpt = None, what: WhatOpt = "all", to: ToOpt = None
) -> None:
    """Copy checkpoints, reports and logs to this machine, verified"""
    from orchestrator.runs.pull import HEADER, Puller
    from orchestrator.runs.selection import Layout, Selection

    run, console, chosen = choose_run(rt, words), rt.console, rt.target
    puller = Puller(
        session=rt.session,
        selection=Selection.of(run, what, chosen.artefacts),
        layout=Layout(target=chosen.name, project=chosen.project, artefacts=chosen.artefacts, to=to),
        on_drop=lambda error, delay: console.say(f"  connection lost ({error.why}), again in {delay:g} s"),
    )
    with console.step("copy") as step:
        puller.on_progress = step.report
        pulled = puller.pull()
        step.detail = pulled.summary
    console.table(HEADER, pulled.table())
    for path, why in pulled.skipped:
        console.warn(f"`{path}` was left out: {why}")
    console.say(f"Run {pulled.run} is in {pulled.folder}")
    console.result(target=chosen.name, **pulled.as_dict())
