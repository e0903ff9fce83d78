"""TensorBoard on the target, shown at a port of this machine.

The target's own TensorBoard listens on the loopback over there. Every connection of a browser here becomes frames on
the streams of one remote program, so it needs no port on the node, no address of the container and nothing installed:
the way of every other command is enough, `pct exec` included.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator

from orchestrator.errors import UsageError
from orchestrator.runs.reconnect import listen
from orchestrator.session import Session

CHUNK = 32 * 1024
USUAL_PORT = 6006


def listen_here(port: int | None) -> socket.socket:
    """A listening socket on the loopback; None is 6006, or any other if that is taken. Raises UsageError."""
    for wanted in (USUAL_PORT, 0) if port is None else (port,):
        try:
            return socket.create_server(("127.0.0.1", wanted))
        except OSError as error:
            reason = error
    raise UsageError(
        "usage",
        f"cannot listen on port {port} of this machine",
        why=str(reason.strerror or reason),
        fix="another `--port`, or none: then a free one is taken",
    )


def serve_board(session: Session, run: int | None, listener: socket.socket, *, on_ready: Callable[[str], None]) -> None:
    """Run TensorBoard for a run (None: all of them) and pass connections on; goes on until it is interrupted.

    `on_ready` is told the version once a browser may come. Raises `unknown_run`, PreflightError `remote_failed` when
    there is no TensorBoard or it ends, ConnectError when the connection is lost.
    """
    frames = Frames()
    hub = Hub(listener, frames)
    try:
        with session.open("board", {"run": run}, payload=frames) as records:
            for record in listen(records):
                if record is not None and record.type == "ready":
                    threading.Thread(target=hub.accept, daemon=True).start()
                    on_ready(str(record.fields["version"]))
                elif record is not None and record.type == "data":
                    hub.deliver(int(str(record.fields["c"])), record.data)
    finally:
        hub.close()


class Frames:
    """What goes to the target, as it comes."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, connection: int, data: bytes) -> None:
        self._waiting.put(json.dumps({"c": connection, "n": len(data)}).encode() + b"\n" + data)

    def end(self) -> None:
        self._waiting.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (frame := self._waiting.get()) is not None:
            yield frame


class Hub:
    """The connections of this machine, by number."""

    def __init__(self, listener: socket.socket, frames: Frames) -> None:
        self._listener = listener
        self._frames = frames
        self._open: dict[int, socket.socket] = {}

    def accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            for number in itertools.count():
                connection, _ = self._listener.accept()
                self._open[number] = connection
                threading.Thread(target=self._read, args=(number, connection), daemon=True).start()

    def deliver(self, number: int, data: bytes) -> None:
        """What the target answered; nothing ends the connection."""
        connection = self._open.get(number) if data else self._open.pop(number, None)
        if connection is None:
            return
        with contextlib.suppress(OSError):  # the browser has left
            if data:
                connection.sendall(data)
            else:
                connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def close(self) -> None:
        self._frames.end()
        self._listener.close()
        for number in list(self._open):
            self.deliver(number, b"")

    def _read(self, number: int, connection: socket.socket) -> None:
        data = b"-"
        while data:
            try:
                data = connection.recv(CHUNK)
            except OSError:
                data = b""
            self._frames.put(number, data)
