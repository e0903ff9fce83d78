"""`dfo gpu plan`: how the node's GPUs get into the container; nothing is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import LOOK, TargetArg, command, group
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.proxmox.gpu import GpuPlan
    from orchestrator.transport.pct import PctTransport

GpuOpt = Annotated[
    list[int] | None, typer.Option("--gpu", metavar="N", min=0, help="Only this GPU of the node; repeatable")
]
GidOpt = Annotated[
    int | None,
    typer.Option("--gid", metavar="GID", min=0, help="Only for this group of the container [default: for everybody]"),
]

group("gpu", "GPUs of the node in the container", panel=LOOK)


@command("gpu plan")
def gpu_plan(rt: Runtime, target: TargetArg = None, gpu: GpuOpt = None, gid: GidOpt = None) -> None:
    """Show the `pct set` lines that pass the node's GPUs to the container; run nothing"""
    from orchestrator.proxmox.gpu import look, plan, read_config

    container = need_container(rt)
    node, vmid = container.node, container.vmid
    with rt.console.step("look") as step:
        state = node.status(vmid)
        config, offered = read_config(node, vmid), look(node)
        step.detail = f"{node.label}, container {vmid}"
    made = plan(vmid, offered, config, running=state == "running", wanted=gpu or (), gid=gid)
    kind = "unprivileged" if config.keys.get("unprivileged") == "1" else "privileged"
    rt.console.data(f"node `{node.label}`: driver {offered.driver or 'not loaded'}, kernel {offered.kernel}")
    rt.console.data(f"container {vmid}: {kind}, {state}")
    _show(rt.console, made, f"/etc/pve/lxc/{vmid}.conf")
    rt.console.result(
        target=rt.target.name,
        node=node.label,
        container=vmid,
        state=state,
        unprivileged=kind == "unprivileged",
        kernel=offered.kernel,
        driver=offered.driver,
        gpus=offered.gpus,
        devices=sorted(offered.devices),
        keep=dict(made.keep),
        commands=list(made.commands),
        obsolete=list(made.obsolete),
        notes=list(made.notes),
        done=made.done,
    )


def _show(console: Console, plan: GpuPlan, file: str) -> None:
    for key, value in plan.keep.items():
        console.data(f"  {'keep':<10}{key}: {value}")
    if plan.commands:
        console.data("Run on the node, as root:")
    for line in plan.commands:
        console.data(f"    {line}")
    if plan.obsolete:
        console.data(f"Take out of {file} on the node, above its first [snapshot], before the start:")
    for line in plan.obsolete:
        console.data(f"    {line}")
    if plan.done:
        console.data("Nothing to do: every device is passed.")
    for note in plan.notes:
        console.data(f"  {'note':<10}{note}")


def need_container(rt: Runtime) -> PctTransport:
    """The way through the node. Raises UsageError for a target that is reached otherwise."""
    from orchestrator.errors import UsageError
    from orchestrator.transport import container_of

    container = container_of(rt.session.transport)
    if container is None:
        why = f"its transport is `{rt.target.transport}`"
        what = f"`{rt.target.name}` has no node to ask"
        raise UsageError("usage", what, why=why, fix="name a target with `transport: pct`")
    return container
