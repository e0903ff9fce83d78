"""`dfo logs` as a person sees it: lines, remarks about the connection, and how the run ended."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType

from orchestrator.console import Console
from orchestrator.errors import Interrupted
from orchestrator.runs.follow import (
    Back,
    Changed,
    Chunk,
    Ended,
    Event,
    Follower,
    LogRequest,
    Lost,
    Restarted,
    Started,
    Tick,
)
from orchestrator.runs.loglines import JsonPrinter, Lines, Printer, TextPrinter
from orchestrator.runs.reconnect import DOWN
from orchestrator.runs.run import RunStatus, duration

#: A run that has just begun is given this long before its silence is remarked upon.
FIRST_LOG = 2.0


def watch(
    follower: Follower, console: Console, *, options: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
) -> RunStatus:
    """Show what `follower` brings, to the end. Returns how the run stands then.

    `options` are the words that `dfo logs` needs to reach the same target again. Raises `Interrupted` after
    Ctrl-C, with the command that resumes exactly there, and what `Follower.events` raises.
    """
    view = _View(console, follower.request, clock)
    try:
        for event in follower.events():
            with _whole():
                view.show(event)
    except KeyboardInterrupt:
        view.flush()
        raise _stopped(view, options) from None
    finally:
        view.flush()
    assert view.status is not None, "the events end with `Ended` or raise"
    return view.status


def conclude(status: RunStatus, console: Console, target: str, *, like_run: bool) -> None:
    """Say how the run ended. With `like_run`, a bad end is raised as its error, with the run's own exit code."""
    error = status.as_error(target)
    if like_run and error is not None:
        error.exit_code = status.exit_like_run
        raise error
    if status.state.ended:
        console.say(status.sentence(target))
    if error is not None:
        console.say(f"  fix: {error.fix}")


def result_of(status: RunStatus, follower: Follower, target: str) -> dict[str, object]:
    """The `--json` result: how the run stands, and where to go on."""
    return {
        "target": target,
        "run": status.run,
        "state": status.state.value,
        "reason": status.reason.value if status.reason is not None else None,
        "run_exit_code": status.exit_code,
        "run_signal": status.signal,
        "positions": {stage: position["offset"] for stage, position in follower.positions.items()},
    }


@contextmanager
def _whole() -> Iterator[None]:
    """Let Ctrl-C wait until what is being shown is shown and counted; a second one does not wait."""
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@dataclass
class _View:
    console: Console
    request: LogRequest
    clock: Callable[[], float]
    status: RunStatus | None = None
    stage_since: float | None = None
    lines: dict[str, Lines] = field(default_factory=dict)
    current: str | None = None
    _printer: Printer | None = None
    _began: float = 0.0
    _said_waiting: str | None = None
    _lost: str | None = None

    def show(self, event: Event) -> None:
        match event:
            case Chunk(stage, offset, data):
                self.current = stage
                lines = self.lines.setdefault(stage, Lines(clock=self.clock))
                self.printer.pieces(stage, lines.feed(offset, data))
            case Started(status, since):
                self.status, self.stage_since, self._began = status, since, self.clock()
            case Changed(status, since):
                self._changed(status, since)
            case Lost():
                self._on_lost(event)
            case Back():
                self._on_back(event)
            case Restarted():
                self._on_restarted(event)
            case Tick():
                self._on_tick()
            case Ended(status, sizes):
                self._on_ended(status, any(sizes.values()))

    def flush(self) -> None:
        for stage, lines in self.lines.items():
            self.printer.pieces(stage, lines.flush())

    @property
    def printer(self) -> Printer:
        if self._printer is None:
            assert self.status is not None, "the first event is `Started`"
            kind = JsonPrinter if self.console.json else TextPrinter
            self._printer = kind(self.console, self.status.run)
        return self._printer

    def _changed(self, status: RunStatus, since: float | None) -> None:
        self.status, self.stage_since = status, since
        self.printer.notice("", event="state", state=status.state.value, stage=status.stage)

    def _on_tick(self) -> None:
        for stage, lines in self.lines.items():
            self.printer.pieces(stage, lines.overdue())
        assert self.status is not None
        waited = self.clock() - self._began >= FIRST_LOG
        if not self.lines and waited and self._said_waiting != self.status.stage:
            self._said_waiting = self.status.stage
            self._say_waiting(self.status)

    def _say_waiting(self, status: RunStatus) -> None:
        name = f"no log of stage `{self.request.stage}`" if self.request.stage else "no log"
        where = f"in stage {status.stage}" if status.stage else status.state.value
        since = ""
        if self.stage_since is not None:
            age = duration(status.now - self.stage_since)
            since = f" since {datetime.fromtimestamp(self.stage_since):%H:%M:%S} ({age})"
        self.printer.notice(f"run {status.run} wrote {name} yet; it is {where}{since}", event="waiting")

    def _on_lost(self, event: Lost) -> None:
        down = event.error.kind in DOWN
        sign = event.error.kind if down else "connection"
        if self._lost == sign:
            return
        self._lost = sign
        what = event.error.what if down else f"connection lost {datetime.now():%H:%M:%S}"
        self.printer.notice(
            f"-- {what}, trying again (1, 2, 4 s …) --",
            event="lost",
            why=event.error.why,
        )

    def _on_back(self, event: Back) -> None:
        self._lost = None
        where = f", resuming at byte {event.offset:,} of {event.stage}" if event.stage else ""
        self.printer.notice(
            f"-- back after {duration(event.after)}{where}: nothing lost --",
            event="back",
            after=round(event.after, 3),
            stage=event.stage,
            offset=event.offset,
        )

    def _on_restarted(self, event: Restarted) -> None:
        self.printer.notice(
            f"-- the log of {event.stage} was {event.why} after byte {event.was:,}; here is the new one --",
            event="restart",
            stage=event.stage,
            why=event.why,
            was=event.was,
        )

    def _on_ended(self, status: RunStatus, has_logs: bool) -> None:
        self.status = status
        self.flush()
        if has_logs:
            return
        if status.state.ended:
            missing = f"a log of stage `{self.request.stage}`" if self.request.stage else "a log"
            self.printer.notice(f"run {status.run} ended without writing {missing}", event="no_log")
        else:
            self._say_waiting(status)


def _stopped(view: _View, options: Sequence[str]) -> Interrupted:
    number = [] if view.status is None else [str(view.status.run)]
    words = ["dfo", "logs", *number, *options, "-f"]
    if view.request.stage is not None:
        words += ["--stage", view.request.stage]
    if view.current is not None:
        words += ["--from", f"{view.current}:{view.lines[view.current].offset}"]
    return Interrupted(
        "interrupted",
        f"stopped watching; {' '.join(['run', *number]) if number else 'the run'} goes on",
        why="Ctrl-C was pressed; the run does not depend on who watches it",
        fix=f"resume exactly here: `{shlex.join(words)}`",
    )
