"""`--ct-snapshot`: a snapshot of the container before something risky."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.proxmox.container import Container
    from orchestrator.proxmox.snapshots import Taken


def need_container(rt: Runtime) -> Container:
    """The target's container behind the API, with the rights that a snapshot needs.

    Raises UsageError where the inventory sets up no API, PreflightError `api_forbidden`, and what `Api` raises.
    """
    from orchestrator.errors import UsageError

    container = rt.container
    if container is None:
        what = f"`--ct-snapshot` cannot reach the container of `{rt.target.name}`"
        if rt.target.transport != "pct":
            why = f"its transport is `{rt.target.transport}`, and a snapshot is Proxmox VE's"
            raise UsageError("usage", what, why=why, fix="leave `--ct-snapshot` away")
        fix = "set `pct.api.token_id`, `token` and `fingerprint`; `dfo config docs pct.api` explains them"
        raise UsageError("usage", what, why="the inventory has no `pct.api.token_id` for it", fix=fix)
    from orchestrator.proxmox import rights

    container.need(rights.CONTAINER)
    return container


def take(rt: Runtime, container: Container, release: str) -> Taken:
    """Take it, as a step of the runbook, and say how to go back."""
    from orchestrator.owner import owner_for
    from orchestrator.proxmox import snapshots

    assert rt.target.pct is not None
    who = owner_for(rt.session, rt.console.command)
    description = f"dfo: before {release} for {who['user']}@{who['host']}"
    with rt.console.step("snapshot") as step:
        taken = snapshots.take(container, description, keep=rt.target.pct.api.keep_snapshots)
        step.detail = taken.name
    for warning in taken.warnings:
        rt.console.warn(warning)
    rt.console.say(f"  {'back':<10}`{taken.back}` on `{taken.node}` takes back all of the container, runs included")
    return taken
