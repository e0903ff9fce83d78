"""Noticing that a link is dead, and coming back to it without hammering the other side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from orchestrator.errors import ConnectError, DeadlineError, DfoError
from orchestrator.remote.wire import Record

#: Programs that take long speak at least every 5 s; three missed beats are a dead link.
SILENCE = 15.0
#: Longest time one tick of a stream can stand for: a laptop that slept has not been listening.
TICK = 1.5
#: The first is for a link that had worked until now; each further failure in a row waits longer.
DELAYS = (0.2, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
TRANSIENT = frozenset({"connection_lost", "unreachable"})
#: What a container says of itself while it is down, or on its way up.
DOWN = frozenset({"container_stopped", "remote_failed"})


@dataclass
class Backoff:
    """Pauses between attempts: growing while nothing gets through, from the start again after progress."""

    delays: Sequence[float] = DELAYS
    sleep: Callable[[float], None] = time.sleep
    failures: int = field(default=0, init=False)

    def progressed(self) -> None:
        self.failures = 0

    @property
    def next_delay(self) -> float:
        return self.delays[min(self.failures, len(self.delays) - 1)]

    def pause(self) -> None:
        delay = self.next_delay
        self.failures += 1
        self.sleep(delay)


def is_transient(error: DfoError) -> bool:
    """Whether trying again can help: the network or a slow host, not a refused login or a changed host key."""
    return isinstance(error, DeadlineError) or (isinstance(error, ConnectError) and error.kind in TRANSIENT)


def listen(
    records: Iterator[Record | None], *, silence: float = SILENCE, clock: Callable[[], float] = time.monotonic
) -> Iterator[Record | None]:
    """Pass records (and ticks, `None`) through. Raises `ConnectError` after `silence` seconds of nothing.

    Only time spent waiting counts: a reader that was busy printing has not been listening.
    """
    quiet = 0.0
    while True:
        asked = clock()
        record = next(records, None)
        if record is not None:
            quiet = 0.0
        else:
            quiet += min(clock() - asked, TICK)
            if quiet >= silence:
                raise ConnectError(
                    "connection_lost",
                    "the connection went silent",
                    why=f"nothing was heard for {silence:g} s, and the other side speaks every 5 s",
                    fix="check the network, then run the command again",
                )
        yield record
        if record is not None and record.type == "done":
            return
