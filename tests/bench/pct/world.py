"""The node as `pct` sees it: names, files, locks, the task list, and the switches of the bench.

Nothing here imports more of the standard library than it must: a call of `pct` should cost what the test asks for
(switch `delay`), not what Python's start takes.
"""

import fcntl
import os
import sys
import time

SWITCHES = "/run/bench/switches"
LOCKS = "/run/lock/lxc"
TASKS = "/var/log/pve/tasks"
LOCK_POLL = 0.02


class PctError(Exception):
    """Ends the call with `text` on stderr and the exit status `status`."""

    def __init__(self, text: str, status: int = 255):
        super().__init__(text)
        self.text = text
        self.status = status


def switch(name):
    """The text of a switch of the bench, or None when it is off. `PCT_<NAME>` in the environment wins."""
    value = os.environ.get("PCT_" + name.upper().replace("-", "_"))
    if value is not None:
        return value
    try:
        with open(f"{SWITCHES}/{name}") as file:
            return file.read()
    except OSError:
        return None


def node_name():
    return os.uname().nodename


def lxc_path():
    with open("/etc/lxc/lxc.conf") as file:
        return file.read().split("=", 1)[1].strip()


def folder(vmid):
    return f"{lxc_path()}/{vmid}"


def config_path(vmid):
    return f"/etc/pve/nodes/{node_name()}/lxc/{vmid}.conf"


def exists(vmid):
    return os.path.exists(config_path(vmid))


def require(vmid, status=2):
    """Raises `PctError` when this node has no such container (one on another node counts as none)."""
    if not exists(vmid):
        raise PctError(f"Configuration file 'nodes/{node_name()}/lxc/{vmid}.conf' does not exist", status)


def require_quorum():
    if switch("no-quorum") is not None:
        raise PctError("cluster not ready - no quorum?")


def vmids():
    names = os.listdir(f"/etc/pve/nodes/{node_name()}/lxc")
    return sorted(int(name[:-5]) for name in names if name.endswith(".conf") and name[:-5].isdigit())


def running(vmid):
    """Whether LXC's monitor of this container listens, which is where the real `pct` looks too."""
    wanted = f"@{folder(vmid)}/command"
    with open("/proc/net/unix") as file:
        return any(line.rstrip().endswith(wanted) for line in file)


def init_pid(vmid):
    _, output = spawn(["lxc-info", "--name", str(vmid), "--pid", "--no-humanize"])
    return int(output)


def spawn(argv, quiet=False):
    """Run a program; returns its exit status and its stdout."""
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
    if quiet:
        actions.append((os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0))
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsigdef=[13])
    os.close(write)
    with open(read, "rb") as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output


class Lock:
    """The container's flock, held for the whole of push, pull, set, start, stop and snapshot."""

    def __init__(self, vmid):
        self.path = f"{LOCKS}/pve-config-{vmid}.lock"

    def __enter__(self):
        os.makedirs(LOCKS, exist_ok=True)
        self.file = open(self.path, "a")
        if self._try():
            return
        warn("trying to acquire lock...")
        give_up = time.monotonic() + float(switch("lock-patience") or 10)
        while not self._try():
            if time.monotonic() > give_up:
                raise PctError(f"can't lock file '{self.path}' - got timeout", 4)
            time.sleep(LOCK_POLL)
        warn(" OK")

    def __exit__(self, *_):
        self.file.close()

    def _try(self):
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def record_task(kind, vmid, status):
    """One line in the node's task list, the only place that knows how a push ended."""
    os.makedirs(TASKS, exist_ok=True)
    now = int(time.time())
    upid = f"UPID:{node_name()}:{os.getpid():08X}:{int(time.monotonic() * 100):08X}:{now:08X}:{kind}:{vmid}:root@pam:"
    with open(f"{TASKS}/index", "a") as file:
        file.write(f"{upid} {now:08X} {status}\n")


def warn(text):
    print(text, file=sys.stderr, flush=True)
