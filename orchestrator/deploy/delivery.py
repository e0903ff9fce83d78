"""The archive on its way to `apply`: stdin for it, and answers to what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from orchestrator.deploy.method import Method
from orchestrator.errors import ConnectError, DfoError, TransferError
from orchestrator.remote.wire import Record
from orchestrator.session import Session
from orchestrator.transport import container_of
from orchestrator.words import size

if TYPE_CHECKING:
    from orchestrator.transport.pct import PctTransport

SLICE = 32 * 1024
#: Bytes per second below which we call a transfer hung, and what else it may take (seconds).
SLOWEST = 20_000
PATIENCE = 60.0

Tell = Callable[[str], None]


@dataclass
class Streamed:
    """Behind the request, on stdin."""

    archive: bytes
    request: Mapping[str, object] = field(default_factory=dict)
    failed: DfoError | None = None

    @property
    def payload(self) -> Iterable[bytes]:
        return slices(self.archive)

    def hear(self, record: Record) -> None:
        """Nothing is asked."""

    def end(self) -> None:
        """Nothing waits."""


class Pushed:
    """Laid on the node while `apply` starts, for `pct push` once that has a place for it. stdin carries words only, or
    the whole archive if the push fails.

    `failed` is why it did not arrive, when `apply` only knows that it did not.
    """

    def __init__(self, transport: PctTransport, archive: bytes, method: Method, tell: Tell) -> None:
        self.request = {"archive_sha256": hashlib.sha256(archive).hexdigest()}
        self.failed: DfoError | None = None
        self._transport, self._archive = transport, archive
        self._only, self._tell = method.only, tell
        self._words: SimpleQueue[bytes | None] = SimpleQueue()
        self._said = ""
        self._over = False
        self._folder = ExitStack()
        self._helper = ThreadPoolExecutor(1)
        self._source = self._helper.submit(self._lay_on_node)

    @property
    def payload(self) -> Iterable[bytes]:
        return iter(self._words.get, None)

    def hear(self, record: Record) -> None:
        """Push when there is a place for it; when not all of it arrived, let it go the other way."""
        if record.type == "ready":
            try:
                self._push(str(record.fields.get("path")))
            except DfoError as error:
                self._otherwise(error)
        elif record.type == "refused":
            self._otherwise(self._lie(record))

    def end(self) -> None:
        """No more words, and nothing left on the node."""
        self._over = True
        self._words.put(None)
        self._helper.shutdown()
        self._folder.close()

    def _lay_on_node(self) -> str:
        node = self._transport.node
        source = f"{self._folder.enter_context(node.private_folder())}/archive"
        node.put(source, self._until_over(), deadline=self._deadline)
        return source

    def _until_over(self) -> Iterator[bytes]:
        for piece in slices(self._archive):
            if self._over:
                return
            yield piece

    @property
    def _deadline(self) -> float:
        return PATIENCE + len(self._archive) / SLOWEST

    def _push(self, path: str) -> None:
        node, vmid = self._transport.node, self._transport.vmid
        self._said = node.push(vmid, self._source.result(), path, deadline=self._deadline)
        self._words.put(b"pushed\n")

    def _lie(self, record: Record) -> TransferError:
        arrived, free = int(str(record.fields.get("size"))), int(str(record.fields.get("free")))
        container = f"container {self._transport.vmid}"
        if arrived == len(self._archive):
            kind, why = "damaged", "as many bytes arrived, but others"
        else:
            kind = "truncated"
            why = f"{arrived:,} of {len(self._archive):,} bytes arrived; {size(free)} are free in {container}"
        said = f"; pct says: {self._said}" if self._said else ""
        return TransferError(
            kind,
            f"`pct push` into {container} said it worked, and did not; the current release is untouched",
            why=f"{why}{said}",
            fix="look at the disks of node and container, or go past the node with `--method stream`",
        )

    def _otherwise(self, error: DfoError) -> None:
        if self._only or isinstance(error, ConnectError):
            self.failed = error
            self._words.put(None)
            return
        self._tell(f"{error.what} ({error.why}); sending it through stdin instead")
        self._words.put(b"stream\n")
        for piece in slices(self._archive):
            self._words.put(piece)
        self._words.put(None)


@contextmanager
def under_way(session: Session, archive: bytes, method: Method | None, tell: Tell) -> Iterator[Streamed | Pushed]:
    """The archive as `method` says. What it needs on the node is gone after the block."""
    transport = container_of(session.transport)
    way: Streamed | Pushed
    if transport is None or method is None or method.name == "stream":
        way = Streamed(archive)
    else:
        way = Pushed(transport, archive, method, tell)
    try:
        yield way
    finally:
        way.end()


def slices(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), SLICE):
        yield data[start : start + SLICE]
