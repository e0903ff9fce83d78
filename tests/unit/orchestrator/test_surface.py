"""Freezes what other people's scripts rely on. A change here is a decision: UPDATE_SNAPSHOTS=1 writes it down."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer

from orchestrator.cli.app import app
from orchestrator.cli.entry import BROKEN_PIPE
from orchestrator.console import JSON_SCHEMA
from orchestrator.errors import KINDS
from orchestrator.inventory.docs import entries
from orchestrator.inventory.models import InventoryFile, Target

SNAPSHOT = Path(__file__).parents[2] / "data" / "surface.json"


def commands(node: Any, name: str = "dfo") -> dict[str, Any]:
    """Every command with its heading, arguments and options."""
    described = {
        name: {
            "panel": getattr(node, "rich_help_panel", None),
            "help": (node.help or "").strip().splitlines()[0],
            "arguments": [p.metavar or p.name for p in node.params if p.param_type_name == "argument"],
            "options": sorted(" ".join(p.opts) for p in node.params if p.param_type_name == "option"),
        }
    }
    for child_name, child in getattr(node, "commands", {}).items():
        described |= commands(child, f"{name} {child_name}")
    return described


def surface() -> dict[str, Any]:
    return {
        "commands": dict(sorted(commands(typer.main.get_command(app)).items())),
        "exit_codes": {
            "success": 0,
            **{cls.__name__: cls.exit_code for cls in sorted(set(KINDS.values()), key=lambda cls: cls.exit_code)},
            "broken_pipe": BROKEN_PIPE,
        },
        "error_kinds": {kind: cls.__name__ for kind, cls in sorted(KINDS.items())},
        "json": {
            "schema": JSON_SCHEMA,
            "success": ["schema", "command", "ok", "exit_code", "result"],
            "failure": ["schema", "command", "ok", "exit_code", "error"],
            "error": ["kind", "what", "why", "fix"],
        },
        "inventory": {e.key: e.kind for e in (*entries(InventoryFile), *entries(Target, "targets.NAME."))},
    }


def test_the_public_surface_is_as_decided() -> None:
    current = json.loads(json.dumps(surface()))
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        SNAPSHOT.write_text(json.dumps(current, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    frozen = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    for part in frozen.keys() | current.keys():
        assert current.get(part) == frozen.get(part), f"`{part}` changed; UPDATE_SNAPSHOTS=1 writes it down"
