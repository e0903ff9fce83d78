"""The HTTP API of Proxmox VE, as one token."""

from __future__ import annotations

from orchestrator.doctor.facts import Api, Trouble
from orchestrator.doctor.verdict import Checks, Verdict, failed, ok, skipped, warning
from orchestrator.proxmox.rights import grant


def token(api: Api) -> Verdict:
    if isinstance(api.version, Trouble):
        return failed(api.version.text, api.version.fix)
    return ok(f"`{api.label}` takes `{api.token_id}`; it is Proxmox VE {api.version}")


def rights(api: Api) -> Verdict:
    path = f"/vms/{api.vmid}"
    return _asked(api.lacking) or (
        failed(
            f"the token has no {', '.join(api.lacking)} on {path}; an empty list is not no container",
            _grant(api, path),
        )
        if isinstance(api.lacking, tuple) and api.lacking
        else ok(f"the token has what dfo needs on {path}")
    )


def container(api: Api) -> Verdict:
    return _asked(api.node) or ok(f"container {api.vmid} is on node {api.node}")


def node_rights(api: Api) -> Verdict:
    if isinstance(api.lacking_on_node, tuple) and api.lacking_on_node:
        path = f"/nodes/{api.node}"
        why = f"the token has no {', '.join(api.lacking_on_node)} on {path}: versions and load of the node stay unknown"
        return warning(why, _grant(api, path))
    return _asked(api.lacking_on_node) or ok(f"the token may look at node {api.node}")


def _asked(fact: object) -> Verdict | None:
    """None where the API has answered."""
    if isinstance(fact, Trouble):
        return failed(fact.text, fact.fix)
    return skipped("the check before it failed") if fact is None else None


def _grant(api: Api, path: str) -> str:
    return "on a node, as root: " + "; ".join(f"`{line}`" for line in grant(api.token_id, path))


CHECKS: Checks[Api] = (
    ("token", token),
    ("rights", rights),
    ("sees container", container),
    ("node rights", node_rights),
)
