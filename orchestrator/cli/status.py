"""`dfo status`"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.common import EVERYDAY, AllOpt, GroupOpt, TargetOpt, command
from orchestrator.cli.run_argument import RunWords, choose_run
from orchestrator.cli.runtime import Runtime

LastOpt = Annotated[int, typer.Option("--last", metavar="N", min=1, help="How many of the newest runs to list")]
WatchOpt = Annotated[bool, typer.Option("--watch", "-w", help="Draw it anew every second, until Ctrl-C")]


@command("status", panel=EVERYDAY)
def status(
    rt: Runtime,
    words: RunWords = None,
    target: TargetOpt = None,
    last: LastOpt = 5,
    all_: AllOpt = False,
    group: GroupOpt = None,
    watch: WatchOpt = False,
) -> None:
    """What is deployed, what is running, on which GPUs"""
    run = choose_run(rt, words)
    if all_ or group is not None or watch:
        _several(rt, run, all_=all_, group=group, watch=watch)
    else:
        _one(rt, run, last)


def _several(rt: Runtime, run: int | None, *, all_: bool, group: str | None, watch: bool) -> None:
    from orchestrator.cli.overview import keep_showing, show_once
    from orchestrator.cli.several import chosen
    from orchestrator.errors import UsageError

    if run is not None or sum((rt.target_option is not None, all_, group is not None)) > 1:
        why = "a RUN has one line only, and TARGET, `--all` and `--group` exclude each other"
        raise UsageError("usage", "status of what?", why=why, fix="leave all but one of them away")
    names = chosen(rt, group=group) if all_ or group is not None else [rt.target.name]
    (keep_showing if watch else show_once)(rt, names)


def _one(rt: Runtime, run: int | None, last: int) -> None:
    from orchestrator.runs.status import HEADER, details, fetch_status, row

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
