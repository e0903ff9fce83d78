"""`dfo report`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.common import EVERYDAY, TargetOpt, command
from orchestrator.cli.run_argument import RunWords, choose_run
from orchestrator.cli.runtime import Runtime

ToOpt = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", help="Where to write it [default: artefacts/TARGET/RUN/report]"),
]
SnapshotOpt = Annotated[
    Path | None, typer.Option("--snapshot", metavar="FILE", help="Environment to show, from `dfo env-snapshot`")
]
ClockOpt = Annotated[
    float | None,
    typer.Option("--clock-from", metavar="EPOCH", help="Count `seconds` from here, in unix seconds [default: the run]"),
]


@command("report", panel=EVERYDAY)
def report(
    rt: Runtime,
    words: RunWords = None,
    target: TargetOpt = None,
    to: ToOpt = None,
    snapshot: SnapshotOpt = None,
    clock_from: ClockOpt = None,
) -> None:
    """Write what a run achieved as report.json and one HTML page"""
    from orchestrator.environment.snapshot import load
    from orchestrator.report.build import build, missing, write
    from orchestrator.report.collect import collect
    from orchestrator.report.page import render, verdict

    run, console, name = choose_run(rt, words), rt.console, rt.target.name
    environment = load(snapshot) if snapshot else None
    with console.step("collect") as step:
        files = collect(rt.session, run)
        step.detail = f"run {files.status.run}, {len(files.events):,} events"
    found = build(files, target=name, now=time.time(), snapshot=environment, clock_from=clock_from)
    folder = to or rt.target.project / "artefacts" / name / str(files.status.run) / "report"
    json_path, page = write(found, render(found), folder)
    console.data(verdict(found)["text"])
    for absent in missing(found):
        console.warn(f"missing: {absent}")
    console.say(f"Wrote {page} and {json_path.name}")
    console.result(
        target=name, run=files.status.run, json=str(json_path), html=str(page), missing=missing(found), report=found
    )
