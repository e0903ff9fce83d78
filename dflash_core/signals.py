"""SIGTERM and SIGINT: an orderly stop where one is possible, an immediate one elsewhere."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SAME_WISH_SECONDS = 2.0


class StopRequested(BaseException):
    """The process was asked to stop by a signal; `exit_code` is 128 + its number, as shells report it.

    A BaseException, so that no handler for errors takes it for one.
    """

    def __init__(self, signal_number: int, note: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}{note}")
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


class StopSignals:
    """The process's reaction to SIGTERM and SIGINT: raise `StopRequested` in the main thread.

    Inside `orderly(ask)` the first signal calls `ask(number)` instead, so that a step can be finished and saved. A
    second one raises at once, unless it follows so closely that it is the same wish: a terminal or a supervisor
    signals the whole group of processes, and a launcher in that group passes its own on.
    """

    def __init__(self) -> None:
        self._ask: Callable[[int], None] | None = None
        self._asked_at = -math.inf

    def install(self) -> None:
        """Take over both signals; call in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @contextmanager
    def orderly(self, ask: Callable[[int], None]) -> Iterator[None]:
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        ask, self._ask = self._ask, None
        if ask is not None:
            self._asked_at = time.monotonic()
            ask(number)
        elif time.monotonic() - self._asked_at > SAME_WISH_SECONDS:
            raise StopRequested(number)
