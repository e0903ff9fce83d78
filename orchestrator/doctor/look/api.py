"""The HTTP API: whether the token is taken, and what it may do. Lists prove nothing: they leave out the forbidden."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.doctor.facts import Api, Missing, Trouble, or_trouble
from orchestrator.inventory.models import ResolvedTarget

if TYPE_CHECKING:
    from orchestrator.proxmox.client import Api as Client


def look(target: ResolvedTarget) -> Api | Missing:
    """Everything that can go wrong is in the facts. Limits are those of `pct.api.timeout`."""
    if target.pct is None or target.pct.container is None:
        return Missing(f"the transport is `{target.transport}`")
    config = target.pct.api
    if config.token_id is None:
        return Missing("`pct.api` is not set up")
    from orchestrator.proxmox.client import open_api
    from orchestrator.proxmox.container import version

    seen = Api(label=f"{config.host}:{config.port}", token_id=config.token_id, vmid=target.pct.container, version="")
    opened = or_trouble(lambda: open_api(config, target.project))
    if isinstance(opened, Trouble):
        return replace(seen, version=opened)
    try:
        seen = replace(seen, label=opened.label, version=or_trouble(lambda: version(opened)))
        return seen if isinstance(seen.version, Trouble) else _rights(seen, opened)
    finally:
        opened.close()


def _rights(seen: Api, api: Client) -> Api:
    from orchestrator.proxmox.container import Container
    from orchestrator.proxmox.rights import NODE, missing

    lacking = or_trouble(lambda: tuple(missing(api, f"/vms/{seen.vmid}")))
    node = or_trouble(lambda: Container(api, seen.vmid).node)
    on_node = None
    if isinstance(node, str):
        on_node = or_trouble(lambda: tuple(missing(api, f"/nodes/{node}", NODE)))
    return replace(seen, lacking=lacking, node=node, lacking_on_node=on_node)
