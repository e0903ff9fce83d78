"""What can be wrong on a node. Each situation is a context manager and is undone on leaving."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

Run = Callable[[Sequence[str]], subprocess.CompletedProcess[bytes]]


class Situations:
    """The switches of `pct` (files that the stand-in reads), locks and disks of a node."""

    root: Path
    run: Run

    def inside(self, argv: Sequence[str]) -> list[str]:
        raise NotImplementedError

    @contextmanager
    def switch(self, name: str, value: str = "") -> Iterator[None]:
        """Turn a switch of the stand-in on; the modules of `pct/` ask for them by name."""
        path = self.root / "run/bench/switches" / name
        path.write_text(value)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def delay(self, seconds: float = 0.5) -> AbstractContextManager[None]:
        """Each `pct` call costs this much more, as a real one does."""
        return self.switch("delay", str(seconds))

    def no_quorum(self) -> AbstractContextManager[None]:
        return self.switch("no-quorum")

    def cluster_down(self) -> AbstractContextManager[None]:
        return self.switch("cluster-down")

    def old_lxc(self) -> AbstractContextManager[None]:
        """Death by a signal gives exit status 0 (lxc#4203)."""
        return self.switch("old-lxc")

    def hanging_attach(self) -> AbstractContextManager[None]:
        return self.switch("hanging-attach")

    def lock_patience(self, seconds: float) -> AbstractContextManager[None]:
        """How long `pct` waits for the container's lock; 10 s without this."""
        return self.switch("lock-patience", str(seconds))

    def push_truncated(self, size: int) -> AbstractContextManager[None]:
        """A push writes only `size` bytes, says nothing and exits 0, as on a full disk."""
        return self.switch("push-truncated", str(size))

    @contextmanager
    def locked(self, vmid: int) -> Iterator[None]:
        """Somebody else holds the container's flock."""
        path = f"/run/lock/lxc/pve-config-{vmid}.lock"
        (self.root / "run/lock/lxc").mkdir(parents=True, exist_ok=True)
        holder = subprocess.Popen(
            self.inside(["flock", "--exclusive", path, "sh", "-c", "echo held; exec cat"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdin and holder.stdout
        assert holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.communicate()

    @contextmanager
    def config_lock(self, vmid: int, reason: str = "backup") -> Iterator[None]:
        """`lock: backup` in the configuration, as while a backup runs."""
        path = self.root / "etc/pve/nodes" / self._node_name() / "lxc" / f"{vmid}.conf"
        path.write_text(f"lock: {reason}\n{path.read_text()}")
        try:
            yield
        finally:
            kept = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith("lock:")]
            path.write_text("".join(kept))

    @contextmanager
    def full_disk(self, free: int = 0) -> Iterator[None]:
        """Only `free` bytes are left on the node's disk."""
        with filled(self.run, "/run/bench/disk", free):
            yield

    def _node_name(self) -> str:
        return (self.root / "etc/pve/lxc").readlink().parts[1]


@contextmanager
def filled(run: Run, folder: str, free: int) -> Iterator[None]:
    """A file in `folder` that takes what its file system has, but for `free` bytes."""
    size = f"$(( $(stat -f -c '%a * %S' {folder}) - {free} ))"
    run(["sh", "-c", f"size={size}; [ $size -le 0 ] || fallocate -l $size {folder}/.filler"])
    try:
        yield
    finally:
        run(["rm", "-f", f"{folder}/.filler"])
