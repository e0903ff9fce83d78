"""A TCP relay on loopback that delays, counts, cuts and swallows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Queue

from bench.sshd import Endpoint

CHUNK = 65536
BUFFERED = 64  # chunks on the way; a reader that stops is felt by the writer, as on a real network


class Relay:
    """Passes connections on to `target`. Times are in seconds, sizes in bytes, counted over all connections.

    `delay` is one way. `cut_up=N` ends every connection right after N bytes went towards the server, `cut_down=N` after
    N bytes from it; connections made later pass without limit, so a client may come back.
    """

    def __init__(
        self, target: Endpoint, *, delay: float = 0.0, cut_up: int | None = None, cut_down: int | None = None
    ) -> None:
        self.target = target
        self.delay = delay
        self.left = {"up": cut_up, "down": cut_down}
        self.passed = {"up": 0, "down": 0}
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def endpoint(self) -> Endpoint:
        """The target as reached through here. `known_hosts` gets a line for this port."""
        with self.target.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{self.port} {self.target.host_key}\n")
        return replace(self.target, host="127.0.0.1", port=self.port)

    @property
    def bytes_up(self) -> int:
        return self.passed["up"]

    @property
    def bytes_down(self) -> int:
        return self.passed["down"]

    def cut(self) -> None:
        """Drop every open connection at once, as a dying router does."""
        with self._lock:
            doomed, self._open = self._open, set()
        for end in doomed:
            # Both directions see the end; a plain close would wait for the thread that reads.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    @contextmanager
    def black_hole(self) -> Iterator[None]:
        """Nothing passes and nothing ends, as behind a dead NAT entry."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def close(self) -> None:
        self._flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; a close does not
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection((self.target.host, self.target.port), timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, server}
        writers = []
        for way, source, sink in (("up", client, server), ("down", server, client)):
            queue: Queue[tuple[float, bytes]] = Queue(BUFFERED)
            threading.Thread(target=self._read, args=(source, queue), daemon=True).start()
            writers.append(threading.Thread(target=self._write, args=(way, queue, sink), daemon=True))
            writers[-1].start()
        for writer in writers:
            writer.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _read(self, source: socket.socket, queue: Queue[tuple[float, bytes]]) -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = source.recv(CHUNK)
            except OSError:
                chunk = b""
            queue.put((time.monotonic() + self.delay, chunk))

    def _write(self, way: str, queue: Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        while True:
            due, chunk = queue.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._flowing.wait()
            if not chunk:
                with suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            chunk, last = self._within_limit(way, chunk)
            with suppress(OSError):  # the other side has gone; go on reading, so that its end is seen here too
                sink.sendall(chunk)
            if last:
                self.cut()
                return

    def _within_limit(self, way: str, chunk: bytes) -> tuple[bytes, bool]:
        with self._lock:
            left = self.left[way]
            if left is not None and len(chunk) >= left:
                chunk, self.left[way] = chunk[:left], None
                self.passed[way] += len(chunk)
                return chunk, True
            if left is not None:
                self.left[way] = left - len(chunk)
            self.passed[way] += len(chunk)
            return chunk, False
