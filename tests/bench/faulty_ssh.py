"""An SSH server inside the test process, for faults that a real sshd does not show on demand.

asyncssh is used here only; its licence (EPL) keeps it out of the product. Commands run on this machine through
`/bin/sh`, in a temporary folder.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh
from asyncssh.process import SSHServerProcess

from bench import sweep
from bench.sshd import Endpoint, make_key

CHUNK = 32768
Answer = tuple[int, bytes, bytes]


@dataclass(frozen=True)
class Faults:
    """What goes wrong; by default nothing. Times are in seconds, sizes in bytes of a command's stdout.

    `answers` gives exit status, stdout and stderr of command lines that are not to be run.
    """

    banner_delay: float = 0
    refuse_auth: bool = False
    other_host_key: bool = False
    cut_after: int | None = None
    stall_after: int | None = None
    max_channels: int | None = None
    answers: Mapping[str, Answer] = field(default_factory=dict)


class FaultySsh:
    """A server on a loopback port, on a thread of its own, until `close`."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.commands: list[str] = []
        self.connections: set[asyncssh.SSHServerConnection] = set()
        self._folder = tempfile.TemporaryDirectory(prefix=sweep.name())
        self.home = Path(self._folder.name)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self.endpoint = self._make_endpoint()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._listener.close()
        self._folder.cleanup()

    def _make_endpoint(self) -> Endpoint:
        host_key = make_key(self.home / "host_key")
        make_key(self.home / "id_ed25519")
        port = self._listener.getsockname()[1]
        known = make_key(self.home / "another_key") if self.faults.other_host_key else host_key
        (self.home / "known_hosts").write_text(f"[127.0.0.1]:{port} {known}\n")
        return Endpoint("127.0.0.1", port, "root", self.home / "id_ed25519", self.home / "known_hosts", host_key)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        self._loop.run_until_complete(self._end(accepting))
        self._loop.close()

    async def _end(self, accepting: asyncio.Task[None]) -> None:
        accepting.cancel()
        for connection in self.connections:
            connection.abort()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        greeting = set()
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            greeting.add(self._loop.create_task(self._greet(client)))

    async def _greet(self, client: socket.socket) -> None:
        await asyncio.sleep(self.faults.banner_delay)
        with suppress(OSError, asyncssh.Error):
            await asyncssh.run_server(
                client,
                server_factory=lambda: _Server(self),
                server_host_keys=[str(self.home / "host_key")],
                encoding=None,
            )


class _Server(asyncssh.SSHServer):
    """One connection."""

    def __init__(self, owner: FaultySsh) -> None:
        self.owner = owner
        self.channels = 0

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self.owner.connections.add(conn)

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        known = asyncssh.read_public_key(self.owner.home / "id_ed25519.pub")
        return not self.owner.faults.refuse_auth and key == known

    def session_requested(self) -> asyncssh.SSHServerSession:
        limit = self.owner.faults.max_channels
        if limit is not None and self.channels >= limit:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_RESOURCE_SHORTAGE, "no more sessions")
        self.channels += 1
        return _Session(self)

    async def answer(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        line = process.command or ""
        self.owner.commands.append(line)
        if line in self.owner.faults.answers:
            status, output, errors = self.owner.faults.answers[line]
            process.stdout.write(output)
            process.stderr.write(errors)
            process.exit(status)
            return
        child = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", line),
            cwd=self.owner.home,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdin and child.stdout and child.stderr
        pumps = [_feed(process.stdin, child.stdin), _drain(child.stderr, process.stderr)]
        tasks = [asyncio.create_task(pump) for pump in pumps]
        try:
            await self._pass_on(child.stdout, process)
            await tasks[1]
            process.exit(await child.wait())
        finally:
            for task in tasks:
                task.cancel()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.stdin.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(child.stdout.read(), child.stderr.read(), child.wait())

    async def _pass_on(self, source: asyncio.StreamReader, process: asyncssh.SSHServerProcess[bytes]) -> None:
        faults = self.owner.faults
        limits = [limit for limit in (faults.cut_after, faults.stall_after) if limit is not None]
        left = min(limits, default=None)
        while chunk := await source.read(CHUNK):
            process.stdout.write(chunk if left is None else chunk[:left])
            await process.stdout.drain()
            if left is None:
                continue
            left -= len(chunk)
            if left <= 0 and faults.cut_after is not None:
                process.channel.get_connection().abort()
            if left <= 0:
                await asyncio.sleep(3600)  # until the client gives up


class _Session(SSHServerProcess):  # type: ignore[type-arg]
    """One channel, a command or SFTP, counted until it is closed."""

    def __init__(self, server: _Server) -> None:
        super().__init__(server.answer, lambda channel: _Files(channel, server.owner.home), 3, False)
        self.server = server

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server.channels -= 1


class _Files(asyncssh.SFTPServer):
    """This machine's files; a relative path is taken from `home`, not from the folder of the test run."""

    def __init__(self, channel: asyncssh.SSHServerChannel[bytes], home: Path) -> None:
        super().__init__(channel)
        self.home = os.fsencode(home)

    def map_path(self, path: bytes) -> bytes:
        return os.path.join(self.home, path)  # noqa: PTH118, SFTP's names are bytes


async def _feed(source: asyncssh.SSHReader[bytes], sink: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncssh.Error):
        while chunk := await source.read(CHUNK):
            sink.write(chunk)
            await sink.drain()
    sink.close()


async def _drain(source: asyncio.StreamReader, sink: asyncssh.SSHWriter[bytes]) -> None:
    while chunk := await source.read(CHUNK):
        sink.write(chunk)
        await sink.drain()
