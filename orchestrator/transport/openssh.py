"""A link through the ssh program of this machine, for what paramiko cannot do: hardware keys, cards, ProxyCommand.

One master holds the connection, commands go through its socket. The master runs `cat` over there with its stdin in our
hand, so it ends with us, however we end.
"""

from __future__ import annotations

import math
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ConnectError
from orchestrator.transport.base import Completed, Tell
from orchestrator.transport.host_keys import HostKeyCheck, check_of
from orchestrator.transport.link import MAX_CHANNELS, not_started
from orchestrator.transport.openssh_words import Story, explain
from orchestrator.transport.process import ProcessPipes
from orchestrator.transport.route import Hop, Route
from orchestrator.transport.streaming import IdleStdin, PumpedStream
from orchestrator.transport.trouble import lost

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshConfig

_READY = b"dfo-ready"
#: Prints the key it is asked about if its fingerprint is pinned. %f, %H, %t and %K are ssh's (OpenSSH 8.5).
_PINNED = """case " $4 " in *" $0 "*) echo "$1 $2 $3";; esac"""
#: Nothing is asked, nothing is forwarded, nothing but our line is run, whatever ~/.ssh/config likes to add.
_PLAIN = {
    "BatchMode": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "EscapeChar": "none",
}


class OpenSshLink:
    """One master, at most eight commands at a time."""

    def __init__(self, target: str, route: Route, ssh: SshConfig, *, tell: Tell) -> None:
        self._target = target
        self._route = route
        self._ssh = ssh
        self._tell = tell
        self._connecting = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_CHANNELS)
        self._master: _Master | None = None

    @property
    def label(self) -> str:
        return self._route.hops[-1].label

    @property
    def alive(self) -> bool:
        return self._master is not None and self._master.alive

    def start(self, line: str, patience: float | None = None) -> ProcessPipes:
        master = self._connected()
        longest = self._ssh.timeouts.channel
        patience = longest if patience is None else min(patience, longest)
        if not self._slots.acquire(timeout=patience):
            raise not_started(self.label, patience, f"{MAX_CHANNELS} commands of ours are at work on this connection")
        # Without its socket the program would connect by itself, with none of our checks: it finds no way then.
        through = {"ControlMaster": "no", "ControlPath": str(master.socket), "ProxyCommand": "false"}
        flags = _flags({**_PLAIN, **through, "LogLevel": "ERROR"})
        argv = [*_program(self._ssh), *flags, "-T", "--", self._route.hops[-1].spoken, line]
        try:
            return _Slot(argv, master, self._slots.release)
        except OSError as error:  # of this machine: too many processes, a line that is too long
            self._slots.release()
            raise lost(self.label, f"the ssh program cannot be started: {error.strerror}") from error

    def lost(self, status: int | None, stderr: bytes) -> ConnectError | None:
        if status is not None and 0 <= status < 255:
            return None
        said = Completed((), 0, b"", stderr).last_words
        if "session request failed" in stderr.decode(errors="replace"):
            return lost(self.label, f"the server refuses another channel: {said} (MaxSessions of its sshd)")
        self.close()  # the master may not have noticed yet
        return lost(self.label, said if stderr.strip() else "the ssh program lost it")

    def close(self) -> None:
        master, self._master = self._master, None
        if master is not None:
            master.end()

    def _connected(self) -> _Master:
        with self._connecting:
            if self._master is None or not self._master.alive:
                self.close()
                self._master = self._connect()
            return self._master

    def _connect(self) -> _Master:
        checks = {hop: check_of(hop, self._route, self._ssh, self._target, self._tell) for hop in self._route.hops}
        limits = self._ssh.timeouts
        limit = time.monotonic() + (limits.connect + limits.banner + limits.auth) * len(checks)
        argv = [*_program(self._ssh), *_way(self._route.hops, checks, self._ssh)]
        master = _Master(argv, self._route.hops[-1].spoken)
        try:
            if not master.ready(limit):
                raise explain(self._route.hops, checks, master.story(), limits)
        except BaseException:
            master.end()
            raise
        for hop, check in checks.items():
            if key := master.story().accepted(hop):
                check.tell_new(key)
        return master


class _Master:
    """The process that holds the connection, and the private folder of its socket."""

    def __init__(self, argv: Sequence[str], host: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="dfo-")
        self.socket = Path(self._folder) / "s"
        self._stdin = IdleStdin()
        self._timed_out = False
        control = _flags({"ControlMaster": "yes", "ControlPath": str(self.socket), "ControlPersist": "no"})
        line = f"echo {_READY.decode()}; exec cat >/dev/null"
        self._pipes = ProcessPipes([*argv, *control, "-v", "-T", "--", host, line])
        self._stream = PumpedStream(argv, self._pipes, self._stdin)

    @property
    def alive(self) -> bool:
        return self._pipes.process.poll() is None

    def ready(self, limit: float) -> bool:
        """Whether it has logged in, by the time `limit` (`time.monotonic`)."""
        said = b""
        for chunk in self._stream:
            said = (said + chunk)[-4096:]
            if _READY in said:
                return True
            if time.monotonic() > limit:
                self._timed_out = True
                return False
        self._stdin.end()
        self._stream.finish()  # so that its last words are there
        return False

    def story(self) -> Story:
        return Story(self._stream.stderr.decode(errors="replace"), self._timed_out)

    def end(self) -> None:
        self._stdin.end()
        self._stream.end()
        with suppress(OSError):
            shutil.rmtree(self._folder)


class _Slot(ProcessPipes):
    """One command through the master."""

    def __init__(self, argv: Sequence[str], master: _Master, release: Callable[[], None]) -> None:
        super().__init__(argv)
        self._master = master
        self._release = release

    def wait(self, patience: float) -> int | None:
        status = super().wait(patience)
        # A status may come before the last bytes, so a master that died in between is no clean end.
        return status if self._master.alive else None

    def end(self) -> None:
        super().end()
        self._release()


def _program(ssh: SshConfig) -> list[str]:
    return ["ssh", *(["-F", ssh.config] if ssh.config else [])]


def _flags(options: Mapping[str, str]) -> list[str]:
    return [flag for key, value in options.items() for flag in ("-o", f"{key}={value}")]


def _way(hops: Sequence[Hop], checks: dict[Hop, HostKeyCheck], ssh: SshConfig) -> list[str]:
    """Options for the last hop. Those before it become a ProxyCommand with options of its own.

    `-J` would not do: it hands none of our options on, so the hops would be reached by other rules than the host.
    """
    hop, before = hops[-1], hops[:-1]
    options = _options(hop, checks[hop], ssh)
    if before:
        inner = shlex.join([*_program(ssh), *_way(before, checks, ssh), "-v"]).replace("%", "%%")
        options["ProxyCommand"] = f"{inner} -W '[%h]:%p' -- {shlex.quote(before[-1].spoken)}"
    elif not hop.proxy_command:
        options["ProxyCommand"] = "none"
    keys = [flag for key in ssh.keys for flag in ("-i", key)]
    return [*_flags(options), *keys, "-p", str(hop.port), "-l", hop.user]


def _options(hop: Hop, check: HostKeyCheck, ssh: SshConfig) -> dict[str, str]:
    options = {
        **_PLAIN,
        "ConnectTimeout": str(math.ceil(ssh.timeouts.connect)),
        "ServerAliveInterval": str(max(1, round(ssh.keepalive))),
        "ServerAliveCountMax": "3",
        "UpdateHostKeys": "no",
        **_host_key_options(check),
    }
    return options if ssh.agent else {**options, "IdentityAgent": "none"}


def _host_key_options(check: HostKeyCheck) -> dict[str, str]:
    if check.pins:
        command = shlex.join(["/bin/sh", "-c", _PINNED])
        return {
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": "/dev/null",
            "GlobalKnownHostsFile": "/dev/null",
            "KnownHostsCommand": f"{command} %f %H %t %K {shlex.quote(' '.join(check.pins))}",
        }
    own, known = check.known_hosts.own, check.known
    files = [own] if known.source == own else [own, *check.known_hosts.others]
    with suppress(OSError):
        own.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return {
        "StrictHostKeyChecking": "yes" if check.policy == "strict" else "accept-new",
        "UserKnownHostsFile": " ".join(f'"{file}"' for file in files),
        "GlobalKnownHostsFile": "/dev/null",
        "HashKnownHosts": "no",
    }
