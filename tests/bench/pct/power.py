"""Power and disks of containers, through LXC. The first half knows nothing of `pct`'s rules; tests use it directly."""

import os
import sys
import time

from . import world
from .guest_config import GuestConfig
from .world import Lock, PctError, spawn, warn

FIRST_ID, IDS = 100000, 65536
IMAGES = "/usr/share/bench"


def create(vmid, disk):
    """The disk of a container whose configuration exists: a tmpfs of this size, as the upper layer of an overlay."""
    folder = world.folder(vmid)
    for name in ("disk", "rootfs", "snapshots", "passthrough"):
        os.makedirs(f"{folder}/{name}")
    _run("mount", "-t", "tmpfs", "-o", f"mode=755,size={disk}", "bench-disk", f"{folder}/disk")
    os.mkdir(f"{folder}/disk/upper")
    first = FIRST_ID if _unprivileged(vmid) else 0
    os.chown(f"{folder}/disk/upper", first, first)
    attach_disk(vmid)
    hostname = GuestConfig(vmid).main.values["hostname"]
    with open(f"{folder}/rootfs/etc/hostname", "w") as file:
        file.write(f"{hostname}\n")


def attach_disk(vmid):
    """Mount the root file system."""
    folder = world.folder(vmid)
    image = f"{IMAGES}/{'unprivileged' if _unprivileged(vmid) else 'privileged'}"
    os.makedirs(f"{folder}/disk/work", exist_ok=True)
    layers = f"lowerdir={image},upperdir={folder}/disk/upper,workdir={folder}/disk/work"
    _run("mount", "-t", "overlay", "-o", layers, "bench-root", f"{folder}/rootfs")


def detach_disk(vmid):
    _run("umount", f"{world.folder(vmid)}/rootfs")


def boot(vmid):
    """Start it; raises `PctError` when LXC or a passed-through device refuses."""
    folder = world.folder(vmid)
    guest = GuestConfig(vmid).main
    devices = _pass_devices_through(vmid, guest)
    with open(f"{folder}/config", "w") as file:
        file.write("\n".join(_lxc_config(vmid, guest, devices)) + "\n")
    status, _ = spawn(["lxc-start", "--name", str(vmid), "--logfile", f"{folder}/log"], quiet=True)
    if status:
        with open(f"{folder}/log") as file:
            sys.stdout.write("".join(line.partition(" - ")[2] for line in file if " ERROR " in line))
        raise PctError(f"startup for container '{vmid}' failed")


def halt(vmid):
    """Kill it."""
    spawn(["lxc-stop", "--name", str(vmid), "--kill"])


def _run(*argv):
    status, _ = spawn(list(argv))
    assert status == 0, argv


def _unprivileged(vmid):
    return GuestConfig(vmid).main.values.get("unprivileged") == "1"


def _lxc_config(vmid, guest, devices):
    folder, group = world.folder(vmid), f"dfo-bench/{os.path.basename(world.lxc_path())}"
    values = guest.values
    yield "lxc.include = /usr/share/lxc/config/common.conf"
    if values.get("unprivileged") == "1":
        yield "lxc.include = /usr/share/lxc/config/userns.conf"
        yield f"lxc.idmap = u 0 {FIRST_ID} {IDS}"
        yield f"lxc.idmap = g 0 {FIRST_ID} {IDS}"
    yield f"lxc.rootfs.path = dir:{folder}/rootfs"
    yield f"lxc.uts.name = {values['hostname']}"
    yield "lxc.net.0.type = empty"
    yield f"lxc.cgroup.dir.monitor = {group}/{vmid}-monitor"
    yield f"lxc.cgroup.dir.container = {group}/{vmid}"
    yield "lxc.cgroup.dir.container.inner = ns"
    limit = int(values.get("memory", 512)) * 1024 * 1024
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        yield f"lxc.cgroup2.memory.max = {limit}"
    elif os.path.isdir("/sys/fs/cgroup/memory"):
        yield f"lxc.cgroup.memory.limit_in_bytes = {limit}"
    if os.path.isdir("/sys/kernel/security/apparmor"):
        yield "lxc.apparmor.profile = unconfined"
    yield from devices
    yield from (line.replace(":", " =", 1) for line in guest.raw)


def _pass_devices_through(vmid, guest):
    """`dev0: /dev/nvidia0,mode=0666`: a device node of the container's own, as Proxmox makes it at each start."""
    lines = []
    for key in sorted(key for key in guest.values if key.startswith("dev") and key[3:].isdigit()):
        options = device(guest.values[key])
        path = options["path"]
        if not os.path.exists(path):
            raise PctError(f"Device {path} does not exist")
        status = os.stat(path)
        first = FIRST_ID if guest.values.get("unprivileged") == "1" else 0
        copy = f"{world.folder(vmid)}/passthrough/{path.removeprefix('/dev/').replace('/', '-')}"
        if os.path.exists(copy):
            os.unlink(copy)
        os.mknod(copy, status.st_mode, status.st_rdev)
        os.chmod(copy, int(options.get("mode", "0660"), 8))
        os.chown(copy, first + int(options.get("uid", 0)), first + int(options.get("gid", 0)))
        numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        lines.append(f"lxc.cgroup2.devices.allow = c {numbers} rw")
        lines.append(f"lxc.mount.entry = {copy} {path[1:]} none bind,create=file")
    return lines


def device(text):
    """`/dev/x,mode=0666` or `path=/dev/x,…` as a dict."""
    first, *others = text.split(",")
    return dict([("path", first.removeprefix("path=")), *(other.split("=", 1) for other in others)])


def pct_start(vmid, args):
    if world.running(vmid):
        raise PctError(f"CT {vmid} already running")
    world.require_quorum()
    world.require(vmid, 255)
    with Lock(vmid):
        if not args.get("skiplock"):
            GuestConfig(vmid).require_unlocked()
        start_as_task(vmid)


def start_as_task(vmid):
    GuestConfig(vmid).apply_pending()
    try:
        boot(vmid)
        _wait_for_bus(vmid)
    except PctError as error:
        world.record_task("vzstart", vmid, error.text)
        raise
    warnings = _nesting_warning(vmid)
    world.record_task("vzstart", vmid, "WARNINGS: 1" if warnings else "OK")
    if warnings:
        print(warnings, flush=True)
        warn("Task finished with 1 warning(s)!")


def _wait_for_bus(vmid, patience=3.0):
    """The original's start takes longer than systemd needs for its bus, so callers may use units right afterwards."""
    socket = f"/proc/{world.init_pid(vmid)}/root/run/dbus/system_bus_socket"
    give_up = time.monotonic() + patience
    while not os.path.exists(socket) and time.monotonic() < give_up:
        time.sleep(0.01)


def _nesting_warning(vmid):
    if "nesting=1" in GuestConfig(vmid).main.values.get("features", ""):
        return ""
    names = os.listdir(f"{world.folder(vmid)}/rootfs/usr/lib/systemd")
    versions = [name[len("libsystemd-core-") :] for name in names if name.startswith("libsystemd-core-")]
    version = versions[0].removesuffix(".so") if versions else "252"
    return f"WARN: Systemd {version} detected. You may need to enable nesting."


def pct_stop(vmid, args):
    _require_running(vmid)
    with Lock(vmid):
        if not args.get("skiplock"):
            GuestConfig(vmid).require_unlocked()
        halt(vmid)
        world.record_task("vzstop", vmid, "OK")


def pct_shutdown(vmid, args):
    _require_running(vmid)
    with Lock(vmid):
        GuestConfig(vmid).require_unlocked()
        patience = ["--timeout", str(args.get("timeout", 60)), *([] if args.get("forceStop") else ["--nokill"])]
        spawn(["lxc-stop", "--name", str(vmid), *patience])
        world.record_task("vzshutdown", vmid, "OK")


def pct_suspend(vmid, _):
    _require_running(vmid)
    raise PctError("pct suspend is not part of the bench", 70)


def _require_running(vmid):
    if not world.running(vmid):
        raise PctError(f"CT {vmid} not running")


def pct_reboot(vmid, args):
    """Stops first and looks at the lock afterwards, so that a locked container stays down."""
    if not world.running(vmid):
        raise PctError(f"VM {vmid} not running")
    with Lock(vmid):
        spawn(["lxc-stop", "--name", str(vmid), "--timeout", str(args.get("timeout", 60))])
        if "lock" in GuestConfig(vmid).main.values:
            print("run_buffer: 571 Script exited with status 255")
            print(f'lxc_init: 845 Failed to run lxc.hook.pre-start for container "{vmid}"')
            print(f'__lxc_start: 2039 Failed to initialize container "{vmid}"', flush=True)
            raise PctError(f"startup for container '{vmid}' failed")
        start_as_task(vmid)
