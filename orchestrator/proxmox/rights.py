"""Privileges of a token: which are missing, and how to grant them.

A missing privilege mostly looks like emptiness: lists leave out what a token may not see. So before anything is
called missing, the token's own permissions are asked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator.errors import PreflightError

if TYPE_CHECKING:
    from orchestrator.proxmox.client import Api

#: What dfo does with a container: look, start it, take snapshots and remove its own.
CONTAINER = ("VM.Audit", "VM.PowerMgmt", "VM.Snapshot")
#: What it asks about a node: versions, memory, load.
NODE = ("Sys.Audit",)
REFUSAL = re.compile(r"Permission check failed \((?P<path>/[^,()]*), (?P<privileges>[A-Za-z.|, ]+)\)")


def missing(api: Api, path: str, privileges: Iterable[str] = CONTAINER) -> list[str]:
    """Those of `privileges` that the token lacks on an ACL path such as `/vms/101`."""
    answer = api.mapping("access", "permissions", path=path)
    held = {name for granted in answer.values() if isinstance(granted, dict) for name in granted}
    return [name for name in privileges if name not in held]


def forbidden(label: str, token_id: str, path: str, privileges: Sequence[str], *, why: str) -> PreflightError:
    """The error for a token that lacks `privileges` on `path`."""
    commands = grant(token_id, path, privileges)
    return PreflightError(
        "api_forbidden",
        f"the API token `{token_id}` may not do that on `{label}`",
        why=why,
        fix="on a node, as root: " + "; ".join(f"`{command}`" for command in commands),
        path=path,
        privileges=list(privileges),
        commands=commands,
    )


def grant(token_id: str, path: str, privileges: Sequence[str] = ()) -> list[str]:
    """The commands that give a token what dfo needs on `path`, for Proxmox VE 8 and 9 alike.

    A token has what its user *and* itself are granted, so both are. An entry on a path hides those inherited from
    above, so the role holds everything that dfo needs there, not only what is missing.
    """
    role, usual = ("Dfo", CONTAINER) if path.startswith("/vms") else ("DfoNode", NODE)
    everything = shlex.quote(" ".join(dict.fromkeys([*usual, *privileges])))
    return [
        f"pveum role add {role} --privs {everything} || pveum role modify {role} --privs {everything}",
        f"pveum acl modify {path} --users {token_id.partition('!')[0]} --roles {role}",
        f"pveum acl modify {path} --tokens {shlex.quote(token_id)} --roles {role}",
    ]
