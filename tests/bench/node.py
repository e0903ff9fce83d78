"""A Proxmox node: namespaces of its own over this machine, with sshd, `pct` and containers. See README.md."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import sweep
from bench.container import Container
from bench.image import guest_image
from bench.situations import Situations
from bench.sshd import Endpoint, Sshd

HERE = Path(__file__).parent
TOOLS = {"pct": "main", "pvesh": "pvesh", "pveversion": "pveversion", "pvecm": "pvecm"}
SUDO_USER, PLAIN_USER = "dfo", "guest"
# Written by the node itself at any time; everything else that appears is a leftover.
OWN_TRAFFIC = (
    *("etc/pve/nodes", "etc/ssh/bench", "var/log", "var/lib/lxc"),
    *("run/bench", "run/lock/lxc", "run/lxc", "run/sshd", "run/sudo", "run/utmp"),
)


class Node(Situations):
    """A running node. Close it, or let the test run end: nothing of it stays.

    `shared` are folders of this machine that every container shows, read-only, at the same path: an environment
    that is too large to deploy, say.
    """

    def __init__(self, name: str = "pve1", *, disk: str = "2g", shared: Sequence[str] = ()) -> None:
        self.name = name
        self.shared = shared
        self.containers: dict[int, Container] = {}
        self.lxc_path = f"/var/lib/lxc/{os.getpid()}-{secrets.token_hex(3)}"
        self._base = tempfile.TemporaryDirectory(prefix=sweep.name(), ignore_cleanup_errors=True)
        self._boot(disk)
        self.sshd = Sshd(self)
        self._at_boot = set(self._changed())

    def _boot(self, disk: str) -> None:
        image = guest_image()
        binds = {
            "/usr/share/bench/pct": str(HERE / "pct"),
            "/usr/share/bench/privileged": str(image.privileged),
            "/usr/share/bench/unprivileged": str(image.unprivileged),
            **{f"/run/bench/shared{path}": path for path in self.shared},
        }
        folder = Path(self._base.name) / "node"
        folder.mkdir()
        spec = {"base": str(folder), "name": self.name, "disk": disk, "bind": binds}
        spec |= {"guests": self.lxc_path, "files": _files(self.name, self.lxc_path)}
        namespaces = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
        command = [*namespaces, "/usr/bin/python3", "-SE", str(HERE / "node_boot.py"), json.dumps(spec)]
        self._init = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._init.stdout
        self.pid = int(self._init.stdout.readline())

    @property
    def root(self) -> Path:
        """The node's `/`. An absolute symbolic link in it leads out of it: read links before following them."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def ssh(self) -> Endpoint:
        return self.endpoint("root")

    def endpoint(self, user: str) -> Endpoint:
        """`root`, `dfo` (may `sudo -n /usr/sbin/pct`) or `guest` (may not)."""
        return self.sshd.endpoint(user)

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in the node, for a `Popen` of the test's own."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--uts", "--root", "--wd", "--", *argv]

    def run(
        self, argv: Sequence[str], *, input: bytes | None = None, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Run in the node as root, without ssh. Raises `CalledProcessError` unless `check` is off."""
        return _run(self.inside(argv), input=input, check=check, timeout=timeout)

    def over_ssh(
        self, line: str, *, user: str = "root", input: bytes | None = None, check: bool = False, timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a shell line through the OpenSSH client and the node's sshd."""
        return _run([*self.endpoint(user).command(), line], input=input, check=check, timeout=timeout)

    def create(
        self, vmid: int = 200, *, unprivileged: bool = True, memory: int = 2048, disk: str = "1g", start: bool = True
    ) -> Container:
        """A container of this node; `memory` in MiB, `disk` as tmpfs takes it."""
        container = Container(self, vmid, unprivileged=unprivileged)
        self.containers[vmid] = container
        container.create(memory, disk)
        if start:
            container.start()
        return container

    def container_elsewhere(self, vmid: int, name: str = "pve2") -> None:
        """A container that another node of the cluster has: its configuration is here, it is not."""
        folder = self.root / "etc/pve/nodes" / name / "lxc"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{vmid}.conf").write_text(f"arch: amd64\nhostname: ct{vmid}\nmemory: 512\n")

    def leftovers(self) -> list[str]:
        """Paths that appeared, changed or vanished on the node since it booted; a folder only when it is new."""
        return sorted(f"/{path}" for path in set(self._changed()) - self._at_boot)

    def task_log(self) -> list[tuple[str, int, str]]:
        """What the node's task list says: type, vmid and result, oldest first."""
        index = self.root / "var/log/pve/tasks/index"
        lines = index.read_text().splitlines() if index.exists() else []
        split = [line.split(" ", 2) for line in lines]
        return [(upid.split(":")[5], int(upid.split(":")[6]), status) for upid, _, status in split]

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Power off: ends every process of the node, containers included, and drops its mounts."""
        assert self._init.stdin
        self._init.stdin.close()
        self._init.wait(timeout=30)
        assert self._init.stdout
        self._init.stdout.close()
        sweep.remove_groups(Path(self.lxc_path).name)
        self.sshd.close()
        self._base.cleanup()

    def _changed(self) -> Iterator[str]:
        upper = self.root / "run/bench/disk/upper"
        for folder, folders, files in os.walk(upper):
            here = Path(folder).relative_to(upper)
            for name in (*folders, *files):
                path = here / name
                if name in folders and not (upper / path).is_symlink() and not self._is_new_folder(path):
                    continue
                if not str(path).startswith(OWN_TRAFFIC):
                    yield str(path)
        yield from (str(path.relative_to(self.root)) for path in (self.root / "dev/shm").rglob("*"))

    def _is_new_folder(self, path: Path) -> bool:
        private = path.parts[0] in ("root", "home", "tmp", "run", "srv") or path.parts[:2] == ("var", "tmp")
        return private or not (Path("/") / path).is_dir()


def _run(
    command: Sequence[str], *, input: bytes | None, check: bool, timeout: float
) -> subprocess.CompletedProcess[bytes]:
    stdin = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, check=check, timeout=timeout, **stdin)  # type: ignore[call-overload,no-any-return]


def _files(name: str, lxc_path: str) -> dict[str, tuple[int, str]]:
    users = {SUDO_USER: 20001, PLAIN_USER: 20002}
    passwd = Path("/etc/passwd").read_text()
    passwd += "".join(f"{user}:x:{uid}:{uid}::/home/{user}:/bin/sh\n" for user, uid in users.items())
    group = Path("/etc/group").read_text() + "".join(f"{user}:x:{uid}:\n" for user, uid in users.items())
    # `*` is "no password"; `!` would be "locked", and sshd refuses a locked account even with a key.
    shadow = "".join(f"{user}:*:19000:0:99999:7:::\n" for user in ("root", *users))
    return {
        "/etc/passwd": (0o644, passwd),
        "/etc/group": (0o644, group),
        "/etc/shadow": (0o600, shadow),
        "/etc/hostname": (0o644, f"{name}\n"),
        "/etc/hosts": (0o644, f"127.0.0.1 localhost {name}\n"),
        "/etc/subuid": (0o644, "root:100000:65536\n"),
        "/etc/subgid": (0o644, "root:100000:65536\n"),
        "/etc/lxc/lxc.conf": (0o644, f"lxc.lxcpath = {lxc_path}\n"),
        "/etc/sudoers.d/dfo": (0o440, f"{SUDO_USER} ALL=(root) NOPASSWD: /usr/sbin/pct\n"),
        **{f"/usr/sbin/{tool}": (0o755, _launcher(module)) for tool, module in TOOLS.items()},
    }


def _launcher(module: str) -> str:
    lines = ["#!/usr/bin/python3 -SE", "import sys", "sys.path.insert(0, '/usr/share/bench')"]
    return "\n".join([*lines, f"from pct.{module} import main", "main()", ""])
