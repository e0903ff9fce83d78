"""`dfo releases`: list releases on the target, or remove old ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import TROUBLE, TargetArg, command
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.deploy.release import ReleaseList

PruneOpt = Annotated[
    int | None,
    typer.Option("--prune", metavar="N", min=1, help="Remove all but the newest N; current and used ones stay"),
]


@command("releases", panel=TROUBLE)
def releases(rt: Runtime, target: TargetArg = None, prune: PruneOpt = None) -> None:
    """List releases on the target"""
    from orchestrator.deploy import release

    listed = release.list_releases(rt.session) if prune is None else release.prune(rt.session, keep=prune)
    show_pruned(rt.console, listed)
    show_releases(rt.console, listed)
    rt.console.result(target=rt.target.name, **listed.model_dump(exclude={"time"}))


def show_pruned(console: Console, listed: ReleaseList) -> None:
    for name in [*listed.swept, *listed.removed]:
        console.say(f"removed {name}")
    for name, user in listed.kept.items():
        console.say(f"kept {name}: {user}")
    for warning in listed.warnings:
        console.warn(warning)


def show_releases(console: Console, listed: ReleaseList) -> None:
    from orchestrator.words import ago, size

    if not listed.releases:
        console.say("no releases yet; `dfo deploy` makes the first")
        return
    rows = []
    for entry in listed.releases:
        marks = [*(["current"] if entry.id == listed.current else []), *filter(None, [listed.in_use.get(entry.id)])]
        age = "unknown" if entry.created is None else f"{ago(listed.time - entry.created)} ago"
        rows.append((entry.id, age, entry.by or "unknown", str(entry.files), size(entry.bytes), ", ".join(marks)))
    console.table(("RELEASE", "MADE", "BY", "FILES", "SIZE", "STATE"), rows)
