"""First process of a bench node: makes the node's own view of the machine, says where it is, and reaps.

Runs in fresh mount, pid and host-name namespaces, under Debian's own Python, with one argument: JSON with `base` (an
empty folder), `name`, `disk` (size for tmpfs), `guests` (where containers live), `bind` (paths to show inside:
`{inside: outside}`) and `files` (`{path: [mode, text]}`).

The node's `/` is an overlay over the machine's, so everything that changes lies in one folder, and nothing of it
survives: the kernel ends every process and drops every mount of the node with this process, which ends when its
standard input does, that is when the test run ends, however it ends.
"""

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

# Folders of the machine that the node must not see: it has its own, empty at first.
OPEN, SHARED, CLOSED = 0o755, 0o1777, 0o700
PRIVATE = {
    **dict.fromkeys(("home", "run", "srv", "var/log", "etc/pve"), OPEN),
    **dict.fromkeys(("tmp", "var/tmp", "run/lock"), SHARED),
    "root": CLOSED,
}


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True)


def private_folder(path: Path, mode: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    os.setxattr(path, "trusted.overlay.opaque", b"y")
    path.chmod(mode)


def build_root(base: Path, spec: dict) -> Path:
    """The node's file tree, not yet entered: `base/root`, with the changes in `base/upper`."""
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", f"mode=755,size={spec['disk']}", "bench-node", str(base))
    upper, root = base / "upper", base / "root"
    for folder in (upper, base / "work", root):
        folder.mkdir()
    for name, mode in PRIVATE.items():
        private_folder(upper / name, mode)
    for name, (mode, text) in spec["files"].items():
        path = upper / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    own = upper / "etc/pve/nodes" / spec["name"] / "lxc"
    own.mkdir(parents=True)
    (upper / "etc/pve/lxc").symlink_to(f"nodes/{spec['name']}/lxc")
    mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={base / 'work'}", "bench-node", str(root))
    mount("-t", "proc", "proc", str(root / "proc"))
    mount("--rbind", "/sys", str(root / "sys"))
    make_devices(root / "dev")
    for inside, outside in {**spec["bind"], "/run/bench/disk": str(base)}.items():
        target = root / inside.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mount("--bind", outside, str(target))
    guests = root / spec["guests"].lstrip("/")
    guests.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", "mode=755", "bench-guests", str(guests))
    (root / "run/bench/switches").mkdir()
    return root


def make_devices(dev: Path) -> None:
    """A `/dev` of the node's own, so that a test can put a GPU's device files there."""
    mount("-t", "tmpfs", "-o", "mode=755", "bench-dev", str(dev))
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        os.mknod(dev / name, 0o666 | stat.S_IFCHR, Path("/dev", name).stat().st_rdev)
        (dev / name).chmod(0o666)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    mount("-t", "devpts", "-o", "newinstance,ptmxmode=666,mode=620,gid=5", "bench-pts", str(dev / "pts"))
    mount("-t", "tmpfs", "-o", "mode=1777", "bench-shm", str(dev / "shm"))
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        (dev / name).symlink_to(target)


def enter(root: Path) -> None:
    old = root / "run" / "bench" / "old"
    old.mkdir()
    subprocess.run(["pivot_root", str(root), str(old)], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/run/bench/old"], check=True)
    Path("/run/bench/old").rmdir()


def reap_until_eof() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([0, read], [], [])
        if 0 in ready:
            return
        os.read(read, 4096)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def main() -> None:
    spec = json.loads(sys.argv[1])
    outer_pid = str(Path("/proc/self").readlink())  # this is still the machine's /proc
    socket.sethostname(spec["name"])
    enter(build_root(Path(spec["base"]), spec))
    print(outer_pid, flush=True)
    reap_until_eof()


if __name__ == "__main__":
    main()
