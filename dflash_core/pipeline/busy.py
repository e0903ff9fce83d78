"""How long each device of a run is at work, whichever of its workers keeps it so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch

T = TypeVar("T")
Moment = float | torch.cuda.Event
# So many spans are summed up at the latest: each holds two events on a GPU.
GATHERED = 256


class Busy:
    """The time in which at least one worker computes on `device`.

    On a GPU a span lies between two events of the stream its worker launches on. So it is the device's time and not
    the host's, and nobody waits for it. A span counts when it has ended.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._spans: list[tuple[Moment, Moment]] = []
        self._counted_to: Moment | None = None
        self._seconds = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """The block computes on the device."""
        begin = self._now()
        with self._lock:
            if self._counted_to is None:
                self._counted_to = begin
        try:
            yield
        finally:
            end = self._now()
            with self._lock:
                self._spans.append((begin, end))
                if len(self._spans) >= GATHERED:
                    self._sum_up()

    def timed(self, job: Callable[[], T]) -> Callable[[], T]:
        """`job` in a span."""

        def run() -> T:
            with self.span():
                return job()

        return run

    def take(self) -> float:
        """Seconds of work since the last call. What several workers did at the same time counts once."""
        with self._lock:
            self._sum_up()
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _now(self) -> Moment:
        if not self._device.startswith("cuda"):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _sum_up(self) -> None:
        """Add the union of the ended spans, and start counting anew from the last of their ends.

        Anew, because two events know their distance to 24 bits only.
        """
        if self._counted_to is None or not _has_passed(self._counted_to):
            return
        ended = [span for span in self._spans if _has_passed(span[1])]
        self._spans = [span for span in self._spans if span not in ended]
        reached, last = 0.0, self._counted_to
        since = [(_between(self._counted_to, begin), _between(self._counted_to, end), end) for begin, end in ended]
        for begin_s, end_s, end in sorted(since, key=lambda span: span[:2]):
            self._seconds += max(0.0, end_s - max(begin_s, reached))
            if end_s > reached:
                reached, last = end_s, end
        self._counted_to = last


def _has_passed(moment: Moment) -> bool:
    return isinstance(moment, float) or moment.query()


def _between(earlier: Moment, later: Moment) -> float:
    """Seconds, negative when `later` came first."""
    if isinstance(earlier, float):
        return cast(float, later) - earlier
    return earlier.elapsed_time(cast(torch.cuda.Event, later)) / 1000
