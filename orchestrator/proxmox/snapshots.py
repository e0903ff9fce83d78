"""Snapshots of a container that dfo takes before something risky, and of which it keeps the newest.

Going back is somebody's decision: `pct rollback` stops the container and takes back everything in it, runs included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.errors import DfoError
from orchestrator.proxmox import tasks
from orchestrator.proxmox.container import Container

#: ZFS and btrfs take a second; a container whose memory of writes is large, or Ceph, takes longer (seconds).
TAKE_DEADLINE = 300.0
#: Ours, and nobody's who merely likes the prefix.
OURS = re.compile(r"dfo-\d{8}-\d{6}")


@dataclass(frozen=True)
class Taken:
    """A new snapshot. `removed`: older ones of ours that went; `warnings`: what did not work about that."""

    name: str
    node: str
    seconds: float
    removed: tuple[str, ...]
    warnings: tuple[str, ...]
    back: str

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, "node": self.node, "removed": list(self.removed), "back": self.back}


def names_of_ours(container: Container) -> list[str]:
    """Our snapshots, oldest first: the name holds the time."""
    rows = container.api.rows(*container.path, "snapshot")
    return sorted(str(row.get("name")) for row in rows if OURS.fullmatch(str(row.get("name"))))


def take(container: Container, description: str, *, keep: int, now: datetime | None = None) -> Taken:
    """Take a snapshot, then remove all of ours but the newest `keep` (the new one among them).

    Raises PreflightError (`api_forbidden`; `api_failed` where the storage takes none), LockError, DeadlineError. What
    goes wrong with the removal is a warning: the snapshot is there.
    """
    name = f"dfo-{now or datetime.now(UTC):%Y%m%d-%H%M%S}"
    upid = container.api.post(*container.path, "snapshot", snapname=name, description=description)
    ended = tasks.wait(container.api, upid, container.label, deadline=TAKE_DEADLINE)
    removed, warnings = _prune(container, names_of_ours(container)[:-keep])
    if ended.warnings:
        warnings.insert(
            0, f"the snapshot `{name}` was taken with {ended.warnings} warnings: `pvenode task log '{upid}'`"
        )
    back = f"pct rollback {container.vmid} {name} --start 1"
    return Taken(name, container.node, ended.seconds, tuple(removed), tuple(warnings), back)


def _prune(container: Container, names: Sequence[str]) -> tuple[list[str], list[str]]:
    removed: list[str] = []
    for name in names:
        try:
            upid = container.api.delete(*container.path, "snapshot", name)
            tasks.wait(container.api, upid, container.label, deadline=TAKE_DEADLINE)
        except DfoError as error:
            return removed, [f"the old snapshot `{name}` is still there: {error.why}"]
        removed.append(name)
    return removed, []
