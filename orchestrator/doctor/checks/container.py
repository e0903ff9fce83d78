"""The inside of the target, whatever way leads there."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from orchestrator.doctor.facts import Inside, Place, Trouble
from orchestrator.doctor.verdict import Checks, Verdict, failed, ok, skipped, warning
from orchestrator.environment.drift import NETWORK_FILE_SYSTEMS
from orchestrator.words import ago, count, size

OLDEST_PYTHON = (3, 11)
#: The oldest versions that the trainer is written for, as in the `train` extra of the package.
OLDEST = {"torch": "2.11", "transformers": "5", "triton": "3.6", "safetensors": "0.5", "numpy": "1.26", "yaml": "6.0"}
GPU_ONLY = frozenset({"triton"})
PIP_NAMES = {"yaml": "pyyaml"}
#: Mounts that systemd tries and an unprivileged container may not do.
FORBIDDEN_MOUNTS = frozenset({"dev-hugepages.mount", "sys-kernel-config.mount", "sys-kernel-debug.mount"})
#: Bytes free where releases, checkpoints and compile caches go: too little to deploy, and little for a run.
TOO_LITTLE, LITTLE, LITTLE_FOR_GPUS = 100e6, 500e6, 20e9
LITTLE_TMP = 200e6
FEW_INODES, LITTLE_INODES = 500, 10_000
LITTLE_SHM, LITTLE_SHM_FOR_GPUS = 32e6, 1e9
LITTLE_MEMLOCK = 64 * 2**20
LITTLE_MEMORY, LITTLE_MEMORY_FOR_GPUS = 256e6, 8e9
#: Seconds that a clock may be off: above the first, times in logs mislead; above the second, TLS and pip refuse.
SKEW, BAD_SKEW = 2.0, 300.0


def answers(inside: Inside | Trouble) -> Verdict:
    """The only check that sees a target whose programs do not run."""
    if isinstance(inside, Trouble):
        return failed(inside.text, inside.fix)
    return ok(f"programs run as {inside.said.user}")


def python(inside: Inside) -> Verdict:
    found = inside.said.python
    version = ".".join(map(str, found.version))
    if found.version[:2] < OLDEST_PYTHON:
        fix = f"install 3.11 or later there, and set `python` of target `{inside.wanted.target}` to it"
        return failed(f"{found.executable} is {version}; the trainer needs 3.11", fix)
    return ok(f"{found.executable} is {version}")


def modules(inside: Inside) -> Verdict:
    found = inside.said.modules
    needed = [name for name in OLDEST if inside.wanted.some_gpu or name not in GPU_ONLY]
    pip = f"`{inside.said.python.executable} -m pip install"
    if missing := [name for name in needed if name in found.missing]:
        names = " ".join(PIP_NAMES.get(name, name) for name in missing)
        return failed(f"no {', '.join(missing)}: the trainer imports them", f"{pip} {names}`")
    old = [name for name in needed if _older(found.versions.get(name), OLDEST[name])]
    if old:
        why = ", ".join(f"{name} {found.versions[name]} (needs {OLDEST[name]})" for name in old)
        names = " ".join(f"'{PIP_NAMES.get(name, name)}>={OLDEST[name]}'" for name in old)
        return warning(f"older than the trainer is written for: {why}", f"{pip} {names}`")
    return ok(", ".join(f"{name} {found.versions[name]}" for name in needed if name in found.versions))


def init_system(inside: Inside) -> Verdict:
    init = inside.said.init
    if inside.wanted.transport == "local":
        return skipped("runs on this machine start under the supervisor alone")
    if init.state is None:
        why = f"{init.name or 'an unknown init'}, no systemd: runs start under the supervisor alone"
        return warning(why, "use a template with systemd, so that a run is a unit and its end is known exactly")
    broken = [unit for unit in init.failed if unit not in FORBIDDEN_MOUNTS]
    if init.state == "degraded" and (broken or not init.failed):
        why = f"systemd is degraded: {', '.join(broken[:5]) or 'a unit'} failed"
        first = broken[0] if broken else "--failed"
        return warning(why, f"`systemctl status {first}` in the container")
    if init.state not in ("running", "degraded"):
        why = f"systemd is `{init.state}`: units cannot be relied on"
        return failed(why, "`systemctl list-jobs` in the container; `systemctl is-system-running --wait` waits for it")
    return ok(
        "systemd is running" + (f", but for {', '.join(init.failed)}, as in every container" if init.failed else "")
    )


def root_folder(inside: Inside) -> Verdict:
    place = inside.said.root
    if place.read_only:
        return failed(f"{place.place} is read-only", "look at the disk: `dmesg` on the node, and `ro` in `pct config`")
    if not place.writable:
        why = f"{inside.said.user} may not write to {place.place}"
        return failed(why, f"`chown {inside.said.user} {place.place}` as root, or set `deploy.root` elsewhere")
    return ok(f"{place.path} can be written" if place.path == place.place else f"{place.path} can be made")


def disk(inside: Inside) -> Verdict:
    little = LITTLE_FOR_GPUS if inside.wanted.some_gpu else LITTLE
    target = inside.wanted.target
    return _space(inside.said.root, little, f"`dfo releases {target} --prune 2`, or a larger disk: `pct resize`")


def inodes(inside: Inside) -> Verdict:
    place = inside.said.root
    if place.free_inodes is None:
        return ok(f"{place.file_system} counts none")
    text = f"{count(place.free_inodes, 'inode')} free under {place.place}"
    fix = f"`du --inodes -xd 2 {place.place} | sort -n | tail` there shows who has them"
    if place.free_inodes < FEW_INODES:
        return failed(f"{text}: a release has as many files", fix)
    return warning(f"{text}: compile caches have thousands", fix) if place.free_inodes < LITTLE_INODES else ok(text)


def tmp(inside: Inside) -> Verdict:
    place = inside.said.tmp
    if place.read_only or not place.writable:
        return failed(f"{inside.said.user} may not write to {place.place}", f"`chmod 1777 {place.place}` as root there")
    return _space(place, LITTLE_TMP, f"clear {place.place}, or set `env.TMPDIR` to a folder with space")


def cache(inside: Inside) -> Verdict:
    place = inside.said.cache
    if place.file_system in NETWORK_FILE_SYSTEMS:
        why = f"{place.place} is on {place.file_system}: compile caches there end in stale file handles"
        return warning(why, "set `deploy.root` to a folder on a local disk")
    return ok(f"{place.place} is on {place.file_system or 'an unknown file system'}")


def shared_memory(inside: Inside) -> Verdict:
    shm = inside.said.shm
    if shm.place != "/dev/shm" or not shm.writable:
        fix = "`mount -t tmpfs -o mode=1777 shm /dev/shm` there, and a line for it in its /etc/fstab"
        return failed("/dev/shm is not there or cannot be written: NCCL and data loaders need it", fix)
    little = LITTLE_SHM_FOR_GPUS if inside.wanted.some_gpu else LITTLE_SHM
    if shm.total_bytes < little:
        why = f"/dev/shm has {size(shm.total_bytes)}: NCCL and data loaders die with SIGBUS when it is full"
        return warning(why, "`mount -o remount,size=8g /dev/shm` there, and the same in its /etc/fstab")
    return ok(f"/dev/shm has {size(shm.total_bytes)}")


def memlock(inside: Inside) -> Verdict:
    limit = inside.said.memlock
    if limit is None:
        return ok("`ulimit -l` is unlimited")
    text = f"`ulimit -l` is {size(limit)}"
    if inside.wanted.some_gpu and limit < LITTLE_MEMLOCK:
        fix = f"`lxc.prlimit.memlock: unlimited` in /etc/pve/lxc/{inside.wanted.vmid or 'ID'}.conf, then restart it"
        return warning(f"{text}: NCCL may fail to pin its buffers", fix)
    return ok(text)


def cores(inside: Inside) -> Verdict:
    cpu = inside.said.cpu
    if cpu.quota is not None and cpu.quota < cpu.usable:
        why = f"`nproc` says {cpu.usable}, but {cpu.quota:g} cores of time are allowed: that many threads wait in turn"
        fix = f"set `cores` instead of `cpulimit`, or `env.OMP_NUM_THREADS` to {max(1, int(cpu.quota))} (in quotes)"
        return warning(why, fix)
    if cpu.usable < 2 and inside.wanted.some_gpu:
        return warning("one core is usable", "give it more: `pct set … --cores 8` on the node")
    return ok(f"{count(cpu.usable, 'core')} usable")


def memory(inside: Inside) -> Verdict:
    found = inside.said.memory
    limit = min(found.total, found.limit or found.total)
    little = LITTLE_MEMORY_FOR_GPUS if inside.wanted.some_gpu else LITTLE_MEMORY
    text = f"{size(found.available)} of {size(limit)} available"
    if min(found.available, limit) < little:
        why = f"{text}: out of memory, the kernel kills the run with signal 9"
        return warning(why, "`ps axo rss,args --sort -rss | head` there; or raise `memory` of the container")
    return ok(text)


def clock(inside: Inside) -> Verdict:
    off = abs(inside.skew)
    side = "ahead of" if inside.skew > 0 else "behind"
    text = f"its clock is {ago(off)} {side} this machine's"
    fix = "`timedatectl` on both; a container has its node's clock: `systemctl restart chrony` on the node"
    if off > BAD_SKEW:
        return failed(f"{text}: certificates look expired or not yet valid", fix)
    return warning(f"{text}: times in logs and status mislead", fix) if off > SKEW else ok("agrees with this machine's")


def _space(place: Place, little: float, fix: str) -> Verdict:
    text = f"{size(place.free_bytes)} free of {size(place.total_bytes)} under {place.place} ({place.file_system})"
    if place.free_bytes < TOO_LITTLE:
        return failed(text, fix)
    return warning(text, fix) if place.free_bytes < little else ok(text)


def _older(version: str | None, oldest: str) -> bool:
    try:
        return version is not None and Version(version) < Version(oldest)
    except InvalidVersion:
        return False


CHECKS: Checks[Inside] = (
    ("python", python),
    ("modules", modules),
    ("init", init_system),
    ("folder", root_folder),
    ("disk", disk),
    ("inodes", inodes),
    ("tmp", tmp),
    ("cache", cache),
    ("shared memory", shared_memory),
    ("locked memory", memlock),
    ("cores", cores),
    ("memory", memory),
    ("clock", clock),
)
