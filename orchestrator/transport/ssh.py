"""A link through paramiko, hardened.

fabric's Connection holds one hop: the client, its login and its gateway. Its defaults are not ours: it accepts any host
key (fabric#2071), so each client gets our own policy; it reads ~/.fabric.yaml and ~/.ssh/config, so it gets an empty
configuration and the values of `route`; its `run` puts variables unquoted into a shell line and waits for output in
steps of 10 ms, so commands use channels of the transport.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paramiko
from fabric import Config, Connection
from paramiko.ssh_exception import ChannelException

from orchestrator.errors import ConnectError, DeadlineError, DfoError
from orchestrator.transport.base import Tell
from orchestrator.transport.host_keys import HostKeyCheck, check_of
from orchestrator.transport.link import GOODBYE, MAX_CHANNELS, not_started, within
from orchestrator.transport.login import Login
from orchestrator.transport.route import Hop, Route
from orchestrator.transport.streaming import CHUNK
from orchestrator.transport.trouble import lost, said, unreachable

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshConfig

# Without a handler of their own, its threads would write their exceptions to our stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

#: What paramiko raises when a connection is gone, depending on where it notices.
_BROKEN = (paramiko.SSHException, OSError, EOFError)
_GOODBYE_LATE = DeadlineError("deadline", "the goodbye takes too long", why="nobody answers", fix="just hang up")


class ParamikoLink:
    """One connection (and one to each hop before it), at most eight commands at a time."""

    def __init__(self, target: str, route: Route, ssh: SshConfig, *, tell: Tell) -> None:
        self._target = target
        self._route = route
        self._ssh = ssh
        self._tell = tell
        self._connecting = threading.Lock()
        self._connections: list[Connection] = []
        self._slots = threading.BoundedSemaphore(MAX_CHANNELS)

    @property
    def label(self) -> str:
        return self._route.hops[-1].label

    @property
    def alive(self) -> bool:
        return bool(self._connections and self._connections[-1].is_connected)

    def start(self, line: str, patience: float | None = None) -> ChannelPipes:
        transport = self._connected()
        longest = self._ssh.timeouts.channel
        patience = longest if patience is None else min(patience, longest)
        if not self._slots.acquire(timeout=patience):
            raise not_started(self.label, patience, f"{MAX_CHANNELS} commands of ours are at work on this connection")
        late = not_started(self.label, patience, "the server opened no channel for it")
        try:
            channel = within(patience, lambda: _execute(transport, line, longest), late)
        except DfoError:
            self._slots.release()
            drop(transport)
            raise
        except _BROKEN as error:
            self._slots.release()
            raise self._no_channel(error) from error
        return ChannelPipes(channel, transport, self._slots.release)

    def lost(self, status: int | None, stderr: bytes) -> ConnectError | None:
        if status is not None:
            return None
        reason: BaseException | None = None
        with contextlib.suppress(IndexError):
            reason = self._connections[-1].transport.get_exception()
        return lost(self.label, said(reason) if reason else "the other side closed it before the command had ended")

    def close(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            drop(connection.transport)

    def _connected(self) -> paramiko.Transport:
        with self._connecting:
            if self.alive:
                return self._transport
            self.close()
            self._connections = connect(self._route.hops, self._check, self._ssh)
            return self._transport

    @property
    def _transport(self) -> paramiko.Transport:
        transport = self._connections[-1].transport
        assert isinstance(transport, paramiko.Transport)
        return transport

    def _check(self, hop: Hop) -> HostKeyCheck:
        return check_of(hop, self._route, self._ssh, self._target, self._tell)

    def _no_channel(self, error: Exception) -> ConnectError:
        if isinstance(error, ChannelException):
            return lost(self.label, f"the server refuses another channel: {error.text} (MaxSessions of its sshd)")
        return lost(self.label, said(error))


def connect(hops: tuple[Hop, ...], check_for: Callable[[Hop], HostKeyCheck], ssh: SshConfig) -> list[Connection]:
    """Log in to each hop, through the ones before it. Raises ConnectError; nothing stays open then."""
    opened: list[Connection] = []
    try:
        for hop in hops:
            opened.append(_connect_one(hop, opened[-1] if opened else None, check_for(hop), ssh))
    except BaseException:
        for connection in opened:
            drop(connection.transport)
        raise
    return opened


def _connect_one(hop: Hop, gateway: Connection | None, check: HostKeyCheck, ssh: SshConfig) -> Connection:
    limits = ssh.timeouts
    connection = Connection(
        hop.host,
        user=hop.user,
        port=hop.port,
        gateway=gateway,
        config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        connect_kwargs={
            "timeout": limits.connect,
            "banner_timeout": limits.banner,
            "auth_timeout": limits.auth,
            "channel_timeout": limits.channel,
            "auth_strategy": Login(hop),
            "transport_factory": lambda sock, **more: _transport(sock, check.types, ssh, **more),
            **({"sock": _through_command(hop)} if hop.proxy_command else {}),
        },
    )
    connection.client.set_missing_host_key_policy(_Policy(check))
    whole = limits.connect + limits.banner + limits.auth + (limits.channel if gateway else 0)
    try:
        # A name server or an agent that hangs is outside of all of paramiko's own limits.
        within(whole, connection.open, unreachable(hop, TimeoutError(f"no login within {whole:g} s")))
    except BaseException as error:
        drop(connection.client.get_transport())
        if isinstance(error, _BROKEN):
            raise unreachable(hop, error, limits) from error
        raise
    connection.transport.set_keepalive(max(1, round(ssh.keepalive)))
    check.logged_in()
    return connection


class _Policy(paramiko.MissingHostKeyPolicy):
    """The client has no keys of its own, so every key is "missing" and comes here."""

    def __init__(self, check: HostKeyCheck) -> None:
        self._check = check

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        self._check.check(key)


def _through_command(hop: Hop) -> socket.socket:
    """The other end of ssh's ProxyCommand, which ends when this one is closed. (paramiko's own class for it stalls.)"""
    ours, theirs = socket.socketpair()
    values = {"%": "%", "h": hop.host, "p": str(hop.port), "r": hop.user, "n": hop.spoken}
    command = re.sub(r"%([%hprn])", lambda found: values[found[1]], hop.proxy_command or "")
    with theirs:
        subprocess.Popen(
            command,
            shell=True,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours


def _transport(sock: Any, known_types: list[str], ssh: SshConfig, **more: Any) -> paramiko.Transport:
    """AES-GCM first (the fastest of paramiko's ciphers, and its last choice), known key types first, no waiting for
    delayed ACKs.
    """
    if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A host that vanished: what we sent stays unacknowledged, and the kernel would try for a quarter hour.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(ssh.keepalive * 4000))
    transport = paramiko.Transport(sock, **more)
    options = transport.get_security_options()
    options.ciphers = sorted(options.ciphers, key=lambda name: "gcm" not in name)
    types = {new for old in known_types for new in (("rsa-sha2-512", "rsa-sha2-256") if old == "ssh-rsa" else (old,))}
    options.key_types = sorted(options.key_types, key=lambda name: name not in types)
    return transport


def _execute(transport: paramiko.Transport, line: str, patience: float) -> paramiko.Channel:
    channel = transport.open_session(timeout=patience)
    try:
        channel.exec_command(line)
    except BaseException:
        channel.close()
        raise
    return channel


def drop(transport: paramiko.Transport | None) -> None:
    """End a connection without a word: its threads and channels notice at once. The nearest hop goes first, so that
    nobody tries to say goodbye through a line that is dead.
    """
    if transport is not None:
        with contextlib.suppress(*_BROKEN):
            transport.close()


class ChannelPipes:
    """One command on one channel."""

    def __init__(self, channel: paramiko.Channel, transport: paramiko.Transport, release: Callable[[], None]) -> None:
        self._channel = channel
        self._transport = transport
        self._release = release
        self._torn = False

    def read(self) -> bytes:
        return self._received(self._channel.recv)

    def read_err(self) -> bytes:
        return self._received(self._channel.recv_stderr)

    def _received(self, receive: Callable[[int], bytes]) -> bytes:
        """Receiving also sends (it opens the window), so it fails when the connection does, and takes bytes with it."""
        try:
            return receive(CHUNK)
        except _BROKEN:
            self._torn = True
            return b""

    def write(self, data: memoryview) -> None:
        rest = bytes(data)
        while rest:
            try:
                sent = self._channel.send(rest)
            except _BROKEN as error:
                raise BrokenPipeError from error
            if not sent:
                raise BrokenPipeError
            rest = rest[sent:]

    def close_stdin(self) -> None:
        with contextlib.suppress(*_BROKEN):
            self._channel.shutdown_write()

    def wait(self, patience: float) -> int | None:
        if not self._channel.status_event.wait(patience):
            raise TimeoutError
        # The status may come before the last bytes, so a connection that broke in between is no clean end.
        whole = self._channel.eof_received or self._transport.is_active()
        status = self._channel.exit_status
        return None if status == -1 or self._torn or not whole else status

    def end(self) -> None:
        try:
            within(GOODBYE, self._channel.close, _GOODBYE_LATE)
        except (DfoError, *_BROKEN):
            drop(self._transport)
        finally:
            self._release()
