"""`dfo status`"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.common import EVERYDAY, TargetOpt, command
from orchestrator.cli.run_argument import RunWords, choose_run
from orchestrator.cli.runtime import Runtime

LastOpt = Annotated[int, typer.Option("--last", metavar="N", min=1, help="How many of the newest runs to list")]


@command("status", panel=EVERYDAY)
def status(rt: Runtime, words: RunWords = None, target: TargetOpt = None, last: LastOpt = 5) -> None:
    """What is deployed, what is running, on which GPUs"""
    from orchestrator.runs.status import HEADER, details, fetch_status, row

    run = choose_run(rt, words)
    found = fetch_status(rt.session, run=run, last=last)
    console, name = rt.console, rt.target.name
    console.result(**found.as_dict(name))
    if run is not None:
        for line in details(found, found.runs[0], name):
            console.data(line)
        return
    if found.release is None:
        console.say(f"Nothing is deployed to `{name}`. Next: `dfo deploy {name}`")
    elif not found.runs:
        console.say(f"`{name}` has release {found.release} and no runs yet. Next: `dfo launch {name} --warmup-first`")
    if not found.runs:
        return
    console.table(HEADER, [row(found, status, name) for status in found.runs])
    for status in found.runs:
        if status.reason is not None and (status.leftovers or status.run == found.runs[-1].run):
            console.say(status.sentence(name))
