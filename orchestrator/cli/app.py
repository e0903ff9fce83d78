"""All commands, in the order of `dfo --help`. To add one: write its module and name it here."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from orchestrator import __version__
from orchestrator.cli.common import app

MODULES = (
    "deploy",
    "launch",
    "logs",
    "status",
    "stop",
    "pull",
    "report",
    "tensorboard",
    "init",
    "config",
    "doctor",
    "env_snapshot",
    "env_diff",
    "gpu",
    "cache",
    "rollback",
    "releases",
    "lock",
    "audit",
    "trust",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dfo {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit")
    ] = False,
) -> None:
    """Deploy, warm up, launch and watch DFlash training inside a container."""


for _module in MODULES:
    import_module(f"orchestrator.cli.{_module}")

__all__ = ["app"]
