"""A transport whose connection breaks in the middle of an answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from orchestrator.transport.base import Stream
from orchestrator.transport.local import LocalTransport


@dataclass
class Breaking(LocalTransport):
    """Kills the remote program after so many bytes of its answer, once for each number in `after`."""

    after: list[int] = field(default_factory=list)
    drops: int = field(default=0, init=False)

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: Iterable[bytes] = ()) -> Iterator[Stream]:  # type: ignore[override]
        with super().stream(argv, stdin=stdin) as stream:
            yield _Broken(stream, self)  # type: ignore[arg-type]


@dataclass
class _Broken:
    stream: Stream
    owner: Breaking

    def __iter__(self) -> Iterator[bytes]:
        left = self.owner.after.pop(0) if self.owner.after else None
        for chunk in self.stream:
            if left is not None and len(chunk) >= left:
                self.owner.drops += 1
                os.kill(self.stream._pipes.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                self.stream._pipes.process.wait()  # type: ignore[attr-defined]
                yield chunk[:left]
                return
            left = left - len(chunk) if left is not None else None
            yield chunk

    def finish(self) -> object:
        return self.stream.finish()
