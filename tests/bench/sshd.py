"""The node's OpenSSH server, and what a client needs to reach it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import sweep

if TYPE_CHECKING:
    from bench.node import Node

CONFIG = "/etc/ssh/bench_sshd_config"  # sshd kills each connection, silently, when its -f is relative
HOST_KEY = "/etc/ssh/bench_host_key"


@dataclass(frozen=True)
class Endpoint:
    """Everything a client needs. `host_key` is the public key as in known_hosts: `ssh-ed25519 AAAA…`."""

    host: str
    port: int
    user: str
    key: Path
    known_hosts: Path
    host_key: str

    def command(self) -> list[str]:
        """An OpenSSH client's command line up to the remote command, which reads nobody's configuration."""
        options = {
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "LogLevel": "ERROR",
        }
        flags = [flag for key, value in options.items() for flag in ("-o", f"{key}={value}")]
        return ["ssh", "-F", "/dev/null", *flags, "-i", str(self.key), "-p", str(self.port), f"{self.user}@{self.host}"]


def make_key(path: Path, comment: str = "bench") -> str:
    """Write an ed25519 key pair at `path`; returns the public half without its comment."""
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


class Sshd:
    """Debian's sshd on a loopback port, with a configuration, keys and homes of its own."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.port = _free_port()
        self._client = tempfile.TemporaryDirectory(prefix=sweep.name())
        self._key = Path(self._client.name) / "id_ed25519"
        self._authorize(make_key(self._key))
        self.new_host_key()
        self.configure("")

    def endpoint(self, user: str) -> Endpoint:
        known_hosts = Path(self._client.name) / "known_hosts"
        return Endpoint("127.0.0.1", self.port, user, self._key, known_hosts, self.host_key)

    def configure(self, *extra: str) -> None:
        """Restart with these lines in front of the configuration, where sshd lets them win."""
        lines = [
            *extra,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {HOST_KEY}",
            "PidFile /run/sshd.pid",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "AcceptEnv LANG LC_*",
            "PrintMotd no",
            "Subsystem sftp /usr/lib/openssh/sftp-server",
        ]
        self._inside(CONFIG).write_text("\n".join(lines) + "\n")
        self.restart()

    def new_host_key(self) -> None:
        """As after a reinstallation; takes effect at the next (re)start. `known_hosts` keeps the first key."""
        path = self._inside(HOST_KEY)
        self.host_key = make_key(path)
        path.chmod(0o600)
        known_hosts = Path(self._client.name) / "known_hosts"
        if not known_hosts.exists():
            known_hosts.write_text(f"[127.0.0.1]:{self.port} {self.host_key}\n")

    def start(self) -> None:
        (self.node.root / "run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.node.run(["/usr/sbin/sshd", "-f", CONFIG, "-E", "/var/log/sshd.log"])
        deadline = time.monotonic() + 10
        while not self._listens():
            assert time.monotonic() < deadline, self._inside("/var/log/sshd.log").read_text()
            time.sleep(0.005)

    def stop(self) -> None:
        """No new connections; those that are open live on, as with the real service."""
        pid_file = self._inside("/run/sshd.pid")
        if not pid_file.exists():
            return
        self._kill("TERM", [int(pid_file.read_text())])
        deadline = time.monotonic() + 10
        while pid_file.exists():
            assert time.monotonic() < deadline, "sshd does not end"
            time.sleep(0.005)

    def restart(self) -> None:
        self.stop()
        self.start()

    def drop(self) -> None:
        """Kill the processes that serve connections: the client sees its connection end without a word."""
        listener = int(self._inside("/run/sshd.pid").read_text()) if self._inside("/run/sshd.pid").exists() else 0
        self._kill("KILL", [pid for pid in self._pids() if pid != listener])

    def close(self) -> None:
        self._client.cleanup()

    def _authorize(self, public_key: str) -> None:
        for user, uid in {"root": 0, "dfo": 20001, "guest": 20002}.items():
            home = self.node.root / ("root" if user == "root" else f"home/{user}")
            (home / ".ssh").mkdir(mode=0o700, parents=True)
            (home / ".ssh/authorized_keys").write_text(f"{public_key}\n")
            for path in (home, home / ".ssh", home / ".ssh/authorized_keys"):
                os.chown(path, uid, uid)

    def _inside(self, path: str) -> Path:
        return self.node.root / path.lstrip("/")

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
            return probe.recv(4) == b"SSH-"
        return False

    def _pids(self) -> list[int]:
        """sshd's processes, by the node's own numbers."""
        pids = [int(path.name) for path in (self.node.root / "proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if self._command_line(pid).startswith(b"sshd:")]

    def _command_line(self, pid: int) -> bytes:
        with suppress(OSError):
            return (self.node.root / f"proc/{pid}/cmdline").read_bytes()
        return b""

    def _kill(self, name: str, pids: list[int]) -> None:
        if pids:
            self.node.run(["kill", f"-{name}", *map(str, pids)], check=False)


def _free_port() -> int:
    """Below the range from which outgoing connections take theirs, so that nobody takes it before sshd does."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
