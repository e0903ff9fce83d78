"""`dfo config`: what the inventory means."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.common import LOOK, TargetArg, command, group
from orchestrator.cli.runtime import Runtime

OriginOpt = Annotated[bool, typer.Option("--origin", help="Also show where each value comes from")]
SectionArg = Annotated[
    str | None,
    typer.Argument(metavar="SECTION", help="A part, such as deploy or launch.warmup", show_default=False),
]

group("config", "Show, explain and describe the inventory", panel=LOOK)


@command("config show")
def show(rt: Runtime, target: TargetArg = None, origin: OriginOpt = False) -> None:
    """Show every value of a target, and where it comes from"""
    from orchestrator.inventory.show import rows

    resolution = rt.resolution
    shown = rows(resolution)
    rt.console.table(
        ("KEY", "VALUE", "ORIGIN") if origin else ("KEY", "VALUE"),
        [(row.key, row.text, row.origin) if origin else (row.key, row.text) for row in shown],
    )
    rt.console.result(
        target=resolution.target.name,
        inventory=str(rt.inventory.found.path),
        project=str(resolution.target.project),
        root=resolution.target.root,
        python=resolution.target.python,
        values={row.key: {"value": row.value, "origin": row.origin} for row in shown},
    )


@command("config docs")
def docs(rt: Runtime, section: SectionArg = None) -> None:
    """Explain the keys of the inventory"""
    from orchestrator.inventory.docs import render

    text = render(section)
    rt.console.data(text)
    rt.console.result(text=text)


@command("config schema")
def schema(rt: Runtime) -> None:
    """Print the JSON schema of the inventory, for editors"""
    import json

    from orchestrator.inventory.models import InventoryFile

    described = InventoryFile.model_json_schema()
    rt.console.data(json.dumps(described, indent=2))
    rt.console.result(schema=described)
