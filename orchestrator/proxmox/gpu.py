"""GPUs of a node in a container: what is there, what the container's configuration says, what is missing.

Devices are for root on the node alone: no API token may set them, so the answer is commands to read and to run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import PreflightError
from orchestrator.transport.node import ASK_DEADLINE, Node

#: One line for each device, each major number and the driver; `stat` gives numbers in hexadecimal.
_LOOK = r"""
for f in /dev/nvidia* /dev/nvidia-caps/*; do
    [ -c "$f" ] && echo "device $f $(stat -c '%t %T' "$f")"
done
sed -n '/^Block/q; s/^ *\([0-9][0-9]*\) \(.*\)$/major \1 \2/p' /proc/devices
sed -n 's/^NVRM.* \([0-9][0-9]*\.[0-9][0-9.]*\) .*$/driver \1/p' /proc/driver/nvidia/version 2>/dev/null
uname -r | sed 's/^/kernel /'
"""
_GPU = re.compile(r"/dev/nvidia(\d+)")
_RULE = re.compile(r"lxc\.cgroup(?P<two>2?)\.devices\.allow[:=\s]+c\s+(?P<major>\d+):")
_MOUNT = re.compile(r"lxc\.mount\.entry[:=\s]+(?P<path>/dev/nvidia\S*)\s")
#: Without these no CUDA program starts, whichever GPU it wants.
ALWAYS = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
#: Makes them. They appear with the first use of CUDA on the node, which may come after the container's start.
MAKE_DEVICES = "nvidia-modprobe -c 0 -u"
#: The first two of nvidia-caps are for who partitions GPUs; the others are the partitions.
FIRST_PARTITION = 3


@dataclass(frozen=True)
class NodeDevices:
    """What the driver offers on a node. `devices`: path → (major, minor); `majors`: number → name of any driver."""

    kernel: str
    driver: str | None
    devices: Mapping[str, tuple[int, int]]
    majors: Mapping[int, str]

    @property
    def gpus(self) -> list[int]:
        return sorted(int(found[1]) for path in self.devices if (found := _GPU.fullmatch(path)))


@dataclass(frozen=True)
class Config:
    """`pct config` as lines: keys, and the raw `lxc.…` lines."""

    keys: Mapping[str, str]
    raw: tuple[str, ...]

    @property
    def entries(self) -> dict[str, tuple[str, str]]:
        """`dev0` → (path, the whole value), for every passed device."""
        found = {key: value for key, value in self.keys.items() if re.fullmatch(r"dev\d+", key)}
        return {key: (value.partition(",")[0].removeprefix("path="), value) for key, value in found.items()}


@dataclass(frozen=True)
class GpuPlan:
    """What to run on the node. `keep`: entries that are right already; `obsolete`: lines to take out by hand."""

    keep: Mapping[str, str]
    commands: tuple[str, ...]
    obsolete: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def done(self) -> bool:
        return not self.commands and not self.obsolete


def look(node: Node) -> NodeDevices:
    """Ask the node, as the login user. Raises PreflightError `remote_failed`, and what `Node.run` raises."""
    ended = node.run(("sh", "-c", _LOOK), deadline=ASK_DEADLINE)
    said = ended.stdout.decode(errors="replace")
    kernel = re.search(r"^kernel (\S+)$", said, re.MULTILINE)
    if kernel is None:
        raise PreflightError(
            "remote_failed",
            f"cannot see the devices of `{node.label}`",
            why=f"exit code {ended.returncode}: {ended.last_words}",
            fix="`ls -l /dev/nvidia*` there shows what the driver offers",
        )
    driver = re.search(r"^driver ([0-9.]+)$", said, re.MULTILINE)
    found = re.findall(r"^device (/dev/nvidia[\w./-]*) ([0-9a-f]{1,8}) ([0-9a-f]{1,8})$", said, re.MULTILINE)
    majors = re.findall(r"^major ([0-9]{1,9}) (.+)$", said, re.MULTILINE)
    return NodeDevices(
        kernel=kernel[1],
        driver=driver[1] if driver else None,
        devices={path: (int(major, 16), int(minor, 16)) for path, major, minor in found},
        majors={int(number): name for number, name in reversed(majors)},
    )


def read_config(node: Node, vmid: int) -> Config:
    """The container's configuration. Raises what `Node.failed` makes of pct's words."""
    ended = node.pct("config", str(vmid), deadline=ASK_DEADLINE)
    if ended.returncode != 0:
        raise node.failed(vmid, ended)
    lines = ended.stdout.decode(errors="replace").splitlines()
    pairs = (line.partition(": ") for line in lines if not line.startswith("lxc."))
    keys = {key: value for key, colon, value in pairs if colon}
    return Config(keys, tuple(line.strip() for line in lines if line.startswith("lxc.")))


def plan(
    vmid: int,
    offered: NodeDevices,
    config: Config,
    *,
    running: bool,
    wanted: Sequence[int] = (),
    gid: int | None = None,
) -> GpuPlan:
    """The commands that give container `vmid` the node's GPUs (or `wanted` of them) by `devN` entries.

    `gid`: the group inside the container that may use them; without it everybody there may. A device with neither
    belongs to root inside, mode 0660. Raises PreflightError `device_missing`.
    """
    paths = _needed(offered, wanted)
    option = "mode=0666" if gid is None else f"gid={gid},mode=0660"
    entries = config.entries
    slots = {path: key for key, (path, _) in entries.items()}
    keep = {slots[p]: entries[slots[p]][1] for p in paths if p in slots and _usable(entries[slots[p]][1], gid)}
    free = (f"dev{number}" for number in range(256) if f"dev{number}" not in entries)
    changes = [
        f"pct set {vmid} --{slots.get(path) or next(free)} {path},{option}"
        for path in paths
        if slots.get(path) not in keep
    ]
    # What is passed and not on the node keeps the container from starting at all.
    gone = [key for key, (path, _) in entries.items() if path.startswith("/dev/nvidia") and not _there(path, offered)]
    if gone:
        changes.insert(0, f"pct set {vmid} --delete {','.join(gone)}")
    if any(path not in offered.devices for path in ALWAYS):
        changes.insert(0, MAKE_DEVICES)
    if changes and running:
        changes = [f"pct shutdown {vmid}", *changes, f"pct start {vmid}"]
    notes = [*trouble(offered, config), *_notes(offered)]
    return GpuPlan(keep, tuple(changes), old_lines(offered, config), tuple(notes))


def _needed(offered: NodeDevices, wanted: Sequence[int]) -> list[str]:
    lacking = [number for number in wanted if number not in offered.gpus]
    if not offered.gpus or lacking:
        listed = ", ".join(map(str, offered.gpus)) or "none"
        raise PreflightError(
            "device_missing",
            f"the node has no GPU {', '.join(map(str, lacking))}" if offered.gpus else "the node offers no GPU",
            why=f"GPUs in /dev: {listed}; driver {offered.driver or 'not loaded'}, kernel {offered.kernel}",
            fix="name others with `--gpu`"
            if offered.gpus
            else f"install NVIDIA's driver on the node; `{MAKE_DEVICES}` there makes the devices",
        )
    gpus = [f"/dev/nvidia{number}" for number in offered.gpus if not wanted or number in wanted]
    partitions = [
        path
        for path, (_, minor) in sorted(offered.devices.items(), key=lambda item: item[1])
        if path.startswith("/dev/nvidia-caps/") and minor >= FIRST_PARTITION
    ]
    return [*gpus, *ALWAYS, *partitions]


def _there(path: str, offered: NodeDevices) -> bool:
    return path in offered.devices or path in ALWAYS


def _usable(value: str, gid: int | None) -> bool:
    options = dict(part.partition("=")[::2] for part in value.split(",")[1:])
    if gid is not None:
        return options.get("gid") == str(gid)
    return options.get("mode", "").endswith("666")


def old_lines(offered: NodeDevices, config: Config) -> tuple[str, ...]:
    """The raw lines that pass GPUs the old way, or once did."""
    return tuple(line for line in config.raw if _of_the_old_way(line, offered))


def _of_the_old_way(line: str, offered: NodeDevices) -> bool:
    """Whether a raw line mounts an NVIDIA device, or allows a major number that is, or was, of one."""
    if _MOUNT.match(line):
        return True
    rule = _RULE.match(line)
    return rule is not None and (is_nvidia(int(rule["major"]), offered) or is_stale(int(rule["major"]), offered))


def rules(config: Config) -> tuple[set[int], set[int]]:
    """The major numbers that raw lines allow: by `lxc.cgroup2`, and by `lxc.cgroup`, which does nothing any more."""
    found = [rule for line in config.raw if (rule := _RULE.match(line))]
    work = {int(rule["major"]) for rule in found if rule["two"]}
    return work, {int(rule["major"]) for rule in found if not rule["two"]}


def passed(config: Config) -> set[str]:
    """The paths of NVIDIA's devices that the container gets, by `devN` entries or mounted the old way."""
    mounted = {rule["path"] for line in config.raw if (rule := _MOUNT.match(line))}
    return mounted | {path for path, _ in config.entries.values() if path.startswith("/dev/nvidia")}


def is_nvidia(major: int, offered: NodeDevices) -> bool:
    """Whether a major number is of a module of NVIDIA now."""
    return offered.majors.get(major, "").startswith("nvidia")


def is_stale(major: int, offered: NodeDevices) -> bool:
    """A number that the kernel gives out as it likes (its devices.txt: 234 to 254 and 384 to 511), and nobody has."""
    return major not in offered.majors and (234 <= major <= 254 or 384 <= major <= 511)


def trouble(offered: NodeDevices, config: Config) -> Iterator[str]:
    """What is wrong with the lines of the old way."""
    allowed, idle = rules(config)
    old = old_lines(offered, config)
    if idle:
        yield "lines with `lxc.cgroup.` instead of `lxc.cgroup2.` do nothing since Proxmox VE 7"
    for major in sorted(allowed):
        if is_stale(major, offered):
            yield f"major {major} is allowed, and no module has it: it went stale with a boot or another kernel"
        elif old and not is_nvidia(major, offered) and major >= 234:
            yield f"major {major} is allowed and belongs to {offered.majors[major]} now: look whether that is meant"
    for path in ("/dev/nvidiactl", "/dev/nvidia-uvm") if old else ():
        if path in offered.devices and (number := offered.devices[path][0]) not in allowed:
            yield f"major {number} ({path}) is not allowed by the old lines: CUDA cannot start"
    if old and any(_MOUNT.match(line) for line in config.raw) and config.keys.get("unprivileged") == "1":
        yield "in an unprivileged container, a device mounted the old way belongs to nobody: only mode 0666 lets it in"


def _notes(offered: NodeDevices) -> Iterator[str]:
    yield f"a device that is missing keeps the container from starting: run `{MAKE_DEVICES}` at boot, before the guests"
    if offered.driver:
        yield f"the container needs NVIDIA's libraries of exactly {offered.driver}, without the kernel module"
