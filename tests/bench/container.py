"""A real LXC container of a bench node: systemd inside, an overlay over the shared image, gone with the node."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.image import FIRST_ID
from bench.inner_sshd import InnerSshd
from bench.situations import filled

if TYPE_CHECKING:
    from bench.node import Node
    from bench.sshd import Endpoint

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


class Container:
    """One container. `run` and power go below `pct`, so that a test can look and act whatever `pct` says."""

    def __init__(self, node: Node, vmid: int, *, unprivileged: bool) -> None:
        self.node = node
        self.vmid = vmid
        self.unprivileged = unprivileged

    @property
    def config(self) -> Path:
        return self.node.root / "etc/pve/nodes" / self.node.name / "lxc" / f"{self.vmid}.conf"

    @property
    def root(self) -> Path:
        """Its `/` from outside; while it runs, with what is mounted inside.

        Owners are the node's: shifted by `FIRST_ID` when unprivileged, and what a test writes belongs to nobody inside.
        In what the container itself mounted (/run, /dev/shm) a test can only read. An absolute link leads out of it.
        """
        pid = self.init_pid()
        return self.node.root / (f"proc/{pid}/root" if pid else f"{self._folder.lstrip('/')}/rootfs")

    @property
    def running(self) -> bool:
        return self.init_pid() is not None

    def init_pid(self) -> int | None:
        """The process id of its init, as the node counts."""
        info = self.node.run(["lxc-info", "--name", str(self.vmid), "--pid", "--no-humanize"], check=False)
        return int(info.stdout) if info.stdout.strip() else None

    def create(self, memory: int, disk: str) -> None:
        """Write its configuration and mount its disk. `disk` as tmpfs takes it, `memory` in MiB."""
        lines = {
            "arch": "amd64",
            "features": "nesting=1",
            "hostname": f"ct{self.vmid}",
            "memory": memory,
            "ostype": "debian",
            "rootfs": f"bench:{self.vmid}/vm-{self.vmid}-disk-0,size={disk.upper()}",
            "swap": 512,
            **({"unprivileged": 1} if self.unprivileged else {}),
        }
        mount = "lxc.mount.entry: /run/bench/shared{} {} none bind,ro,create=dir"
        shared = [mount.format(path, path.lstrip("/")) for path in self.node.shared]
        self.config.write_text("\n".join([*(f"{key}: {value}" for key, value in lines.items()), *shared, ""]))
        self._power(f"create({self.vmid}, {disk!r})")

    def start(self, wait: bool = True) -> None:
        """Start; with `wait`, until systemd has finished booting. Raises `AssertionError` if it does not in 30 s."""
        self._power(f"boot({self.vmid})")
        if wait:
            self.wait_until_up()

    def wait_until_up(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        state = b""
        while state.strip() not in (b"running", b"degraded"):
            assert time.monotonic() < deadline, f"container {self.vmid} does not come up: {state!r}"
            state = self.run(["systemctl", "is-system-running", "--wait"], check=False).stdout
            if not state:  # no bus yet
                time.sleep(0.01)

    def stop(self) -> None:
        self._power(f"halt({self.vmid})")

    def run(
        self, argv: Sequence[str], *, input: bytes | None = None, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Run inside as root with a clean environment. Raises `CalledProcessError` unless `check` is off."""
        attach = ["lxc-attach", "--name", str(self.vmid), "--clear-env", "--", *argv]
        return self.node.run(attach, input=input, check=check, timeout=timeout)

    @contextmanager
    def sshd(self) -> Iterator[Endpoint]:
        """An OpenSSH server of its own, reached through a port on the machine's loopback."""
        server = InnerSshd(self)
        try:
            yield server.endpoint
        finally:
            server.close()

    @contextmanager
    def small(self, path: str, size: str = "1m") -> Iterator[None]:
        """A file system of this size (or inodes, `size="1m,nr_inodes=20"`) at `path` inside."""
        self.run(["mkdir", "-p", path])
        self.run(["mount", "-t", "tmpfs", "-o", f"mode=755,size={size}", "bench-small", path])
        try:
            yield
        finally:
            self.run(["umount", "--lazy", path])

    @contextmanager
    def read_only(self, path: str) -> Iterator[None]:
        """`path` inside, made a folder if it is none, cannot be written to."""
        self.run(["mkdir", "-p", path])
        self.run(["mount", "--bind", path, path])
        self.run(["mount", "-o", "remount,bind,ro", path])
        try:
            yield
        finally:
            self.run(["umount", "--lazy", path])

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Hide files inside, given as shell patterns without a leading slash: `usr/bin/python3*`."""
        found = [path for name in names for path in self.root.glob(name)]
        for path in found:
            path.rename(path.with_name(f".bench-{path.name}"))
        try:
            yield
        finally:
            for path in found:
                path.with_name(f".bench-{path.name}").rename(path)

    @contextmanager
    def clock(self, offset: int) -> Iterator[None]:
        """Programs started inside from now on see the wall clock off by `offset` seconds."""
        preload, settings = self.root / "etc/ld.so.preload", self.root / "etc/faketimerc"
        settings.write_text(f"{offset:+d}\n")
        preload.write_text(f"{FAKETIME}\n")
        try:
            yield
        finally:
            preload.unlink()
            settings.unlink()

    @contextmanager
    def full(self, path: str = "/", free: int = 0) -> Iterator[None]:
        """Only `free` bytes are left on the file system at `path` inside; `/` is its disk."""
        below = (self.node.run, f"{self._folder}/disk") if path == "/" else (self.run, path)
        with filled(*below, free):
            yield

    @property
    def first_id(self) -> int:
        return FIRST_ID if self.unprivileged else 0

    @property
    def _folder(self) -> str:
        return f"{self.node.lxc_path}/{self.vmid}"

    def _power(self, call: str) -> None:
        code = f"import sys; sys.path.insert(0, '/usr/share/bench'); from pct import power; power.{call}"
        self.node.run(["/usr/bin/python3", "-SE", "-c", code], timeout=30)
