"""`dfo audit`: who did what, when."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.common import TROUBLE, TargetArg, command
from orchestrator.cli.runtime import Runtime

LinesOpt = Annotated[int, typer.Option("--lines", "-n", metavar="N", min=1, help="How many of the newest entries")]


@command("audit", panel=TROUBLE)
def audit(rt: Runtime, target: TargetArg = None, lines: LinesOpt = 50) -> None:
    """Who did what, when"""
    from orchestrator.deploy import audit as audit_file

    entries = audit_file.read(rt.session, lines=lines)
    if entries:
        rt.console.table(("WHEN", "WHO", "WHAT", "DETAILS"), [entry.row() for entry in entries])
    else:
        rt.console.say("nothing yet")
    rt.console.result(
        target=rt.target.name,
        entries=[{"t": e.time, "event": e.event, "by": e.by, **e.details} for e in entries],
    )
