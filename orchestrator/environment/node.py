"""The node under a container: what decides about training there and cannot be seen, or changed, from inside."""

from __future__ import annotations

import hashlib

from pydantic import BaseModel, ConfigDict

from orchestrator.transport import Transport, container_of

#: What of a container's configuration is told by name; of the rest, only whether it changed.
TOLD = ("cores", "cpulimit", "features", "memory", "rootfs", "swap", "unprivileged")
#: What comes and goes with backups and snapshots, and what is for people.
PASSING = ("description", "lock", "parent")


class NodeRecord(BaseModel):
    """`driver`: its kernel module. `majors`: of NVIDIA's modules. `devices`: path → `major:minor`. `passed`: the `devN`
    entries. `old_lines`: those of the old way, `trouble`: what is wrong with them. The hash leaves out `PASSING`.
    `proxmox`: the version of Proxmox VE, if it says it.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    kernel: str
    driver: str | None
    majors: dict[str, int]
    devices: dict[str, str]
    container: int
    passed: dict[str, str]
    old_lines: list[str]
    trouble: list[str]
    config: dict[str, str]
    config_sha256: str
    proxmox: str | None = None

    @property
    def summary(self) -> str:
        """For people: the node in one line."""
        ways = [f"{len(self.passed)} passed"] if self.passed else []
        ways += [f"{len(self.old_lines)} lines of the old way"] if self.old_lines else []
        devices = f"{len(self.devices)} devices of NVIDIA ({', '.join(ways) or 'none passed'})"
        proxmox = f"Proxmox VE {self.proxmox}, " if self.proxmox else ""
        return f"node {self.name}, {proxmox}kernel {self.kernel}, driver {self.driver or '-'}, {devices}"


def look(transport: Transport) -> NodeRecord | None:
    """Ask the node of a container; None for a target that has none. Raises what `Node` raises."""
    container = container_of(transport)
    if container is None:
        return None
    from orchestrator.proxmox import gpu  # knows ssh, which nobody else here needs

    node, vmid = container.node, container.vmid
    offered, config = gpu.look(node), gpu.read_config(node, vmid)
    lines = sorted(f"{key}: {value}" for key, value in config.keys.items() if key not in PASSING)
    return NodeRecord(
        name=node.label.rpartition("@")[2],
        kernel=offered.kernel,
        driver=offered.driver,
        majors={name: major for major, name in sorted(offered.majors.items()) if name.startswith("nvidia")},
        devices={path: f"{major}:{minor}" for path, (major, minor) in sorted(offered.devices.items())},
        container=vmid,
        passed={key: value for key, (path, value) in config.entries.items() if path.startswith("/dev/nvidia")},
        old_lines=list(gpu.old_lines(offered, config)),
        trouble=list(gpu.trouble(offered, config)),
        config={key: value for key, value in config.keys.items() if key in TOLD or key[:2] == "mp"},
        config_sha256=hashlib.sha256("\n".join([*lines, *config.raw]).encode()).hexdigest(),
        proxmox=node.version(),
    )
