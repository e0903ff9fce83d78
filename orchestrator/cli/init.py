"""`dfo init`: a first inventory."""

from __future__ import annotations

from orchestrator.cli.common import LOOK, command
from orchestrator.cli.runtime import Runtime


@command("init", panel=LOOK)
def init(rt: Runtime) -> None:
    """Write a commented inventory"""
    from pathlib import Path

    from orchestrator.inventory.starter import write_starter

    written = write_starter(Path.cwd())
    for path in written:
        rt.console.data(f"Wrote {path}")
    rt.console.say("Next: set the paths in run.yaml, then `dfo deploy --dry-run`")
    rt.console.result(written=[str(path) for path in written])
