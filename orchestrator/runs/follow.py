"""Following the logs of a run by byte offset, through any number of dropped connections.

The target sends bytes with their offset; the laptop remembers, for each stage, where what it has handed on ends.
After a drop it asks for the rest, so nothing is shown twice and nothing is left out, and the end of a run is only
believed when every file has been read to its size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from orchestrator.errors import ConnectError, DfoError, UsageError
from orchestrator.inventory.units import parse_duration
from orchestrator.remote.wire import Record
from orchestrator.runs.reconnect import DOWN, SILENCE, Backoff, is_transient, listen
from orchestrator.runs.run import EndReason, RunState, RunStatus
from orchestrator.session import Session


@dataclass(frozen=True, kw_only=True)
class LogRequest:
    """What to show. `run` None is the newest; `since` is `{"ago": seconds}` or `{"at": unix seconds}`; `start` is
    (stage, offset); `tail` counts lines over all stages."""

    run: int | None = None
    follow: bool = False
    stage: str | None = None
    since: Mapping[str, float] | None = None
    tail: int | None = None
    start: tuple[str, int] | None = None

    def as_dict(self) -> dict[str, object]:
        start = None if self.start is None else {"stage": self.start[0], "offset": self.start[1]}
        return {
            "run": self.run,
            "follow": self.follow,
            "stage": self.stage,
            "since": self.since,
            "tail": self.tail,
            "start": start,
        }


def parse_since(text: str) -> dict[str, float]:
    """`10m` (an age, by the target's clock) or an ISO time (local unless it says otherwise). Raises UsageError."""
    try:
        return {"ago": parse_duration(text)}
    except ValueError:
        pass
    try:
        return {"at": datetime.fromisoformat(text).timestamp()}
    except ValueError:
        raise UsageError(
            "usage",
            f"`--since {text}` is neither an age nor a time",
            why="an age has a unit (30s, 10m, 2h, 1d); a time is ISO 8601 (2026-11-30T16:12, or with a zone)",
            fix="for example `--since 10m`",
        ) from None


def parse_from(text: str) -> tuple[str, int]:
    """`STAGE:OFFSET`. Raises UsageError."""
    match = re.fullmatch(r"([^:]+):([0-9]+)", text)
    if match is None:
        raise UsageError(
            "usage",
            f"`--from {text}` is not STAGE:OFFSET",
            why="the offset is the number of bytes already seen of that stage's log",
            fix="for example `--from train:184220`",
        )
    return match[1], int(match[2])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one stage's log, and where they stand in it."""

    stage: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Started:
    """The first contact: which run it is, how it stands, and where each log is taken up."""

    status: RunStatus
    stage_since: float | None
    starts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Changed:
    """The run has moved to another state or stage."""

    status: RunStatus
    stage_since: float | None


@dataclass(frozen=True, slots=True)
class Restarted:
    """A log was truncated or replaced; what follows starts at its first byte."""

    stage: str
    why: str
    was: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection is gone, or the container down; the next attempt comes in `delay` seconds."""

    error: DfoError
    delay: float


@dataclass(frozen=True, slots=True)
class Back:
    """Connected again, `after` seconds after the loss; `offset` of `stage` comes next."""

    after: float
    stage: str | None
    offset: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing new: a moment to look at the clock. At least every 5 s."""


@dataclass(frozen=True, slots=True)
class Ended:
    """All was read: to the end of the run when following, else to the size the logs had."""

    status: RunStatus
    sizes: Mapping[str, int]


Event = Chunk | Started | Changed | Restarted | Lost | Back | Tick | Ended

#: Without `--follow`, this many attempts in a row that bring nothing are enough.
PATIENCE = 5
#: A container that is restarted is down for so long at most (seconds); then it is taken for stopped.
RESTART = 20.0


@dataclass
class Follower:
    """One `logs` command. `positions` always holds where the bytes handed on so far end."""

    session: Session
    request: LogRequest
    backoff: Backoff = field(default_factory=Backoff)
    silence: float = SILENCE
    restart: float = RESTART
    clock: Callable[[], float] = time.monotonic
    run: int | None = None
    status: RunStatus | None = None
    positions: dict[str, dict[str, Any]] = field(default_factory=dict)
    current: str | None = None

    def events(self) -> Iterator[Event]:
        """Everything that happens, in order, up to `Ended`.

        Raises what the target reports (`unknown_run`, …) and `ConnectError` when it cannot be reached at first,
        or for good.
        """
        lost_at: float | None = None
        down_at: float | None = None
        while True:
            try:
                for event in self._one_connection(lost_at):
                    if isinstance(event, Ended):
                        yield event
                        return
                    yield event
                    if isinstance(event, Back | Chunk):
                        lost_at = down_at = None
            except DfoError as error:
                if self.run is None or self._hopeless(error):
                    raise
                now = self.clock()
                lost_at = now if lost_at is None else lost_at
                down_at = None if error.kind not in DOWN else now if down_at is None else down_at
                if down_at is not None and now - down_at >= self.restart:
                    yield self._end_of_container(error)
                    return
                yield Lost(error, self.backoff.next_delay)
                self.backoff.pause()

    def _hopeless(self, error: DfoError) -> bool:
        passes = is_transient(error) or error.kind in DOWN
        return not passes or (not self.request.follow and self.backoff.failures >= PATIENCE)

    def _end_of_container(self, error: DfoError) -> Ended:
        """A stopped container has ended its runs, though none of them could say so. Raises any other error."""
        assert self.status is not None, "a run has a status"
        if error.kind != "container_stopped":
            raise error
        status = replace(self.status, state=RunState.FAILED, reason=EndReason.CONTAINER_STOPPED)
        return Ended(status, {stage: position["offset"] for stage, position in self.positions.items()})

    def _one_connection(self, lost_at: float | None) -> Iterator[Event]:
        request = self.request.as_dict()
        if self.run is not None:
            request |= {"run": self.run, "positions": self.positions}
        with self.session.open("tail", request) as records:
            for record in listen(records, silence=self.silence, clock=self.clock):
                if record is not None and record.type == "run" and lost_at is not None:
                    yield Back(self.clock() - lost_at, self.current, self._offset(self.current))
                else:
                    yield from self._event(record)

    def _event(self, record: Record | None) -> Iterator[Event]:
        if record is None or record.type == "beat":
            yield Tick()
        elif record.type == "data":
            yield from self._chunk(record)
        elif record.type == "run":
            starts = _mapping(record.fields["starts"])
            self.positions = {stage: dict(position) for stage, position in starts.items()}
            self.status, since = _standing(record.fields["state"])
            self.run = self.status.run
            yield Started(self.status, since, {stage: position["offset"] for stage, position in starts.items()})
        elif record.type == "state":
            self.status, since = _standing(record.fields["state"])
            yield Changed(self.status, since)
        elif record.type == "restart":
            stage = str(record.fields["stage"])
            self.positions[stage] = {"offset": 0, "file": record.fields["file"]}
            yield Restarted(stage, str(record.fields["why"]), int(str(record.fields["was"])))
        elif record.type == "done":
            yield self._end(_mapping(record.fields["result"]))

    def _chunk(self, record: Record) -> Iterator[Event]:
        stage, offset = str(record.fields["stage"]), int(str(record.fields["offset"]))
        if offset != self._offset(stage):
            raise _gap(stage, self._offset(stage), offset)
        yield Chunk(stage, offset, record.data)
        # Only now: the reader has taken it.
        self.positions[stage] = {"offset": offset + len(record.data), "file": record.fields["file"]}
        self.current = stage
        self.backoff.progressed()

    def _end(self, result: Mapping[str, Any]) -> Ended:
        status, _ = _standing(result["state"])
        sizes = {str(stage): int(size) for stage, size in _mapping(result["sizes"]).items()}
        if self.request.follow:
            for stage, size in sizes.items():
                if self._offset(stage) != size:
                    raise _gap(stage, self._offset(stage), size)
        return Ended(status, sizes)

    def _offset(self, stage: str | None) -> int:
        return int(self.positions[stage]["offset"]) if stage in self.positions else 0


def _gap(stage: str, have: int, got: int) -> ConnectError:
    return ConnectError(
        "connection_lost",
        f"the log of stage `{stage}` did not arrive whole",
        why=f"byte {have:,} was expected next, the target went on at {got:,}",
        fix="run the command again",
    )


def _standing(state: object) -> tuple[RunStatus, float | None]:
    fields = _mapping(state)
    since = fields.get("stage_since")
    return RunStatus.from_dict(fields), float(since) if since is not None else None


def _mapping(value: object) -> Mapping[str, Any]:
    assert isinstance(value, Mapping)
    return value
