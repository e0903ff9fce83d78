"""One container as the API knows it: where it is, how it is, its power."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from orchestrator.errors import PreflightError
from orchestrator.proxmox import rights, tasks
from orchestrator.proxmox.client import Api

#: A node that boots many containers takes long to start one more (seconds).
START_DEADLINE = 120.0
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")


@dataclass(frozen=True)
class Status:
    """`state`: `running` or `stopped`; `lock`: what holds it (`backup`, …), if anything. Sizes in bytes."""

    node: str
    name: str
    state: str
    lock: str | None
    uptime_s: int
    memory: int
    max_memory: int


@dataclass(frozen=True)
class NodeFacts:
    """A node's versions and load. Sizes in bytes."""

    node: str
    proxmox: str
    kernel: str
    cpu: str
    cores: int
    memory: int
    used_memory: int
    uptime_s: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Container:
    """Container `vmid` of the cluster behind `api`, on whichever node it is."""

    def __init__(self, api: Api, vmid: int) -> None:
        self.api = api
        self.vmid = vmid

    @property
    def label(self) -> str:
        return f"container {self.vmid}"

    @property
    def path(self) -> tuple[str | int, ...]:
        return "nodes", self.node, "lxc", self.vmid

    @cached_property
    def node(self) -> str:
        """The node that has it now. Raises PreflightError `api_forbidden` or `container_missing`."""
        for guest in self.api.rows("cluster", "resources", type="vm"):
            node = guest.get("node")
            if guest.get("vmid") != self.vmid or not isinstance(node, str) or not _NODE.fullmatch(node):
                continue
            if guest.get("type") != "lxc":
                raise self._missing(f"{self.vmid} is a virtual machine")
            return node
        self.need(("VM.Audit",))
        raise self._missing("the token may see it, and no node has it")

    def need(self, privileges: Sequence[str]) -> None:
        """Raises PreflightError `api_forbidden`, with the commands that help, if the token lacks one of them here."""
        acl = f"/vms/{self.vmid}"
        if lacking := rights.missing(self.api, acl, privileges):
            why = f"it has no {', '.join(lacking)} on {acl}; what a token may not see is left out of every list"
            raise rights.forbidden(self.api.label, self.api.asked.token_id, acl, lacking, why=why)

    def status(self) -> Status:
        seen = self.api.mapping(*self.path, "status", "current")
        return Status(
            node=self.node,
            name=str(seen.get("name", "")),
            state=str(seen.get("status", "unknown")),
            lock=str(seen["lock"]) if seen.get("lock") else None,
            uptime_s=_whole(seen.get("uptime")),
            memory=_whole(seen.get("mem")),
            max_memory=_whole(seen.get("maxmem")),
        )

    def config(self) -> dict[str, str]:
        """Its configuration by key; the raw `lxc.…` lines are in the key `lxc`, one a line."""
        seen = self.api.mapping(*self.path, "config")
        raw = seen.get("lxc")
        pairs = [pair for pair in raw if isinstance(pair, list)] if isinstance(raw, list) else []
        lines = "\n".join(": ".join(map(str, pair)) for pair in pairs)
        return {key: str(value) for key, value in seen.items() if key != "lxc"} | ({"lxc": lines} if lines else {})

    def start(self, *, deadline: float = START_DEADLINE) -> tasks.Ended | None:
        """Start it, and wait for the task; None if it runs already.

        Raises PreflightError (`device_missing`, `cluster_not_ready`, `api_failed`, …), LockError, DeadlineError.
        """
        if self.status().state == "running":
            return None
        upid = self.api.post(*self.path, "status", "start")
        return tasks.wait(self.api, upid, self.label, deadline=deadline)

    def node_facts(self) -> NodeFacts:
        """Its node's versions and load. Raises PreflightError `api_forbidden` without Sys.Audit on the node."""
        seen = self.api.mapping("nodes", self.node, "status")
        cpu, memory = _mapping(seen.get("cpuinfo")), _mapping(seen.get("memory"))
        kernel = _mapping(seen.get("current-kernel")).get("release") or seen.get("kversion", "")
        return NodeFacts(
            node=self.node,
            proxmox=str(seen.get("pveversion", "")),
            kernel=str(kernel),
            cpu=str(cpu.get("model", "")),
            cores=_whole(cpu.get("cpus")),
            memory=_whole(memory.get("total")),
            used_memory=_whole(memory.get("used")),
            uptime_s=_whole(seen.get("uptime")),
        )

    def _missing(self, why: str) -> PreflightError:
        return PreflightError(
            "container_missing",
            f"{self.label} does not exist in the cluster of `{self.api.label}`",
            why=why,
            fix="`pct list` on the nodes shows them; correct `pct.container`, or `pct.api.host`",
        )


def version(api: Api) -> str:
    """The version of Proxmox VE, such as `9.0.10`; any token that is right may ask."""
    return str(api.mapping("version").get("version", "unknown"))


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) else 0
