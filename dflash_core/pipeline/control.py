"""The one flag that every waiting thread of a run looks at.

A run ends in one of three ways: it is finished, it is asked to stop (a signal), or a worker failed. Each is set
once and seen by every thread within `POLL_SECONDS`, because no wait in the pipeline is longer than that without
looking here. That is what makes "no hang, ever" a property of one class.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

POLL_SECONDS = 0.1


class Stopped(Exception):
    """Raised in a worker thread that must end because the run ends; never shown to a user."""


class StalledError(Exception):
    """`worker` has delivered nothing for too long; somebody who waits for it raises this."""

    def __init__(self, worker: str, what: str, seconds: float) -> None:
        super().__init__(f"{worker} has not delivered {what} for {seconds:g} s")
        self.worker = worker


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong: who, at which step, and the error itself."""

    worker: str
    step: int | None
    error: BaseException


class Control:
    """Shared state of a run: running, finished, asked to stop, or failed (first failure wins)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.failure: Failure | None = None
        self.stop_signal: int | None = None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def finish(self) -> None:
        """Every thread may go home: the work is done."""
        self._ended.set()

    def request_stop(self, signal_number: int) -> None:
        """Ask for an orderly stop; called from a signal handler, so it takes no lock."""
        self.stop_signal = signal_number
        self._ended.set()

    def fail(self, worker: str, error: BaseException, *, step: int | None) -> None:
        """Record the first failure and end the run; what breaks after the end is no longer a failure of the run.

        A stall is the failure of the worker that stalls, not of the one that noticed.
        """
        with self._lock:
            if not self._ended.is_set():
                culprit = error.worker if isinstance(error, StalledError) else worker
                self.failure = Failure(worker=culprit, step=step, error=error)
                self._ended.set()

    def check(self) -> None:
        """Raise `Stopped` once the run has ended."""
        if self._ended.is_set():
            raise Stopped

    def wait(
        self,
        condition: threading.Condition,
        ready: Callable[[], bool],
        *,
        deadline_s: float | None = None,
        late: Callable[[], BaseException] | None = None,
    ) -> float:
        """Wait (holding `condition`) until `ready()`; returns the seconds waited.

        Raises `Stopped` when the run ends meanwhile, and `late()` after `deadline_s` seconds.
        """
        begin = time.monotonic()
        while not ready():
            self.check()
            waited = time.monotonic() - begin
            if deadline_s is not None and waited > deadline_s:
                assert late is not None
                raise late()
            condition.wait(POLL_SECONDS)
        return time.monotonic() - begin
