"""How the archive gets into a container: pushed by Proxmox VE (`pct-push`), or through stdin of `pct exec` (`stream`).

A push needs room on the node and the container's config lock, and `pct push` says that it worked whatever happened, so
each is measured. A stream needs neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from orchestrator.errors import DeadlineError, PreflightError
from orchestrator.session import Session
from orchestrator.transport import container_of
from orchestrator.words import size

if TYPE_CHECKING:
    from orchestrator.transport.node import Node

Wanted = Literal["auto", "pct-push", "stream"]

#: What a deploy leaves free on the node: a full root file system there stops the cluster's own database (bytes).
NODE_RESERVE = 100_000_000
ASK_DEADLINE = 30.0
#: Prints what is free and who holds the lock. `flock --shared` does not keep pct from getting it: pct tries for 10 s.
_LOOK = """
df -Pk "$2" | awk 'NR == 2 { print "free", $4 }'
lock=/run/lock/lxc/pve-config-$1.lock
[ ! -r "$lock" ] || flock --nonblock --shared "$lock" true ||
    echo locked "$(lslocks --noheadings --raw --output COMMAND,PID,PATH | grep -F "$lock" | head -n 1)"
"""


@dataclass(frozen=True)
class Method:
    """`why`: what speaks for it, if somebody or something does. `only`: asked for by name, so nothing replaces it."""

    name: Literal["pct-push", "stream"]
    why: str = ""
    only: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" if self.why else self.name


def choose(session: Session, wanted: Wanted, *, archive: int, spare: int) -> Method | None:
    """The method for an archive of so many bytes; None where there is no choice, because there is no node.

    `spare`: bytes that the target has beyond what the release itself needs. Asks the node, changes nothing there.
    """
    transport = container_of(session.transport)
    if transport is None:
        return None
    if wanted != "auto":
        return Method(wanted, "asked for", only=True)
    if spare < archive:
        return Method("stream", f"container {transport.vmid} has no room for the archive beside the release")
    if obstacle := _obstacle(transport.node, transport.vmid, archive):
        return Method("stream", obstacle)
    return Method("pct-push")


def _obstacle(node: Node, vmid: int, archive: int) -> str | None:
    """What speaks against a push, on the node's side."""
    from orchestrator.transport.node import FOLDERS

    try:
        look = ("sh", "-c", _LOOK, "look", str(vmid), FOLDERS)
        said = node.run(look, deadline=ASK_DEADLINE).stdout.decode(errors="replace")
    except (DeadlineError, PreflightError) as error:  # a connection that broke is no reason for another method
        return f"`{node.label}` does not say how much room it has ({error.why})"
    free = re.search(r"^free ([0-9]+)$", said, re.MULTILINE)
    if free is None:
        return f"`{node.label}` does not say how much room it has"
    if int(free[1]) * 1024 < archive + NODE_RESERVE:
        return f"`{node.label}` has only {size(int(free[1]) * 1024)} free in {FOLDERS}"
    if locked := re.search(r"^locked ?(?:(\S+) ([0-9]+) )?", said, re.MULTILINE):
        holder = f"`{locked[1]}` (pid {locked[2]})" if locked[1] else "somebody"
        return f"{holder} holds the config lock of container {vmid}"
    return None
