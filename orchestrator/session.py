"""A conversation with one target: programs go out, records come back, failures become `DfoError`s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import ConnectError, DeadlineError, DfoError, PreflightError, from_dict
from orchestrator.remote.wire import Decoder, Record, WireError, argv_for, source_of, stdin_for
from orchestrator.transport.base import Completed, Stream, Transport
from orchestrator.words import first_problem

if TYPE_CHECKING:
    from pydantic import ValidationError


def _silent(_text: str, _level: int) -> None:
    """Nobody asked to see the steps."""


@dataclass(frozen=True)
class Session:
    """One target, reached through one transport, with the interpreter and root folder it uses.

    `root` is absolute on the target; `python` is the interpreter that trains. `trace(text, level)` is told what
    `-v` (1) and `-vv` (2) show: the programs, never their requests, which may hold secrets.
    """

    name: str
    transport: Transport
    root: str
    python: str
    trace: Callable[[str, int], None] = _silent

    def call(
        self,
        program: str,
        request: Mapping[str, object] | None = None,
        *,
        payload: Iterable[bytes] = (),
        deadline: float = 60.0,
        on_record: Callable[[Record], None] | None = None,
    ) -> dict[str, object]:
        """Run a program to its end and return its result.

        Raises what the program reported, `DeadlineError` after `deadline` seconds, `ConnectError` when the
        connection broke before the answer, `PreflightError` when the target cannot run the program.
        """
        limit = time.monotonic() + deadline
        with self.open(program, request, payload=payload) as records:
            for record in records:
                if record is not None and record.type == "done":
                    result = record.fields.get("result")
                    assert isinstance(result, dict)
                    return result
                if record is not None and on_record is not None:
                    on_record(record)
                if time.monotonic() > limit:
                    raise DeadlineError(
                        "deadline",
                        f"`{program}` on `{self.name}` did not finish in {deadline:g} s",
                        why="our own deadline for this step passed",
                        fix=f"check the load of `{self.name}`, then run the command again",
                        program=program,
                    )
        raise AssertionError("the record iterator ends with `done` or raises")

    @contextmanager
    def open(
        self,
        program: str,
        request: Mapping[str, object] | None = None,
        *,
        payload: Iterable[bytes] = (),
    ) -> Iterator[Iterator[Record | None]]:
        """Run a program and iterate its records as they come, up to and including `done`.

        Yields `None` about once a second while nothing comes. Raises as `call` does.
        """
        body = {"root": self.root, **(request or {})}
        stdin = stdin_for(program, body, payload)
        started = time.monotonic()
        self.trace(f"  > {program} ({self.transport.label})", 1)
        self.trace(source_of(program).decode(), 2)
        with self.transport.stream(argv_for(self.python), stdin=stdin) as stream:
            yield self._records(program, stream)
        self.trace(f"  < {program} {time.monotonic() - started:.2f} s", 1)

    def _records(self, program: str, stream: Stream) -> Iterator[Record | None]:
        decoder = Decoder()
        try:
            for chunk in stream:
                if not chunk:
                    yield None
                for record in decoder.feed(chunk):
                    if record.type == "fail":
                        raise from_dict({k: v for k, v in record.fields.items() if k != "t"})
                    yield record
                    if record.type == "done":
                        return
        except WireError as error:
            raise self._no_answer(program, f"the answer contains {error}") from error
        raise self._explain(program, stream.finish(), bytes(decoder.noise))

    def _explain(self, program: str, ended: Completed, noise: bytes) -> DfoError:
        """Why a program ended without an answer, as far as it can be known."""
        self.trace(ended.stderr.decode(errors="replace"), 2)
        tail = (ended.stderr.strip() or noise.strip()).decode(errors="replace").splitlines()[-1:]
        last = tail[0][:300] if tail else "no message"
        if ended.returncode in (126, 127):
            return PreflightError(
                "no_python",
                f"`{self.python}` cannot be run on `{self.name}`",
                why=f"exit code {ended.returncode}: {last}",
                fix=f"install Python there, or set `python` of target `{self.name}`",
            )
        if ended.returncode < 0 or ended.returncode in (255, 137, 141, 143):
            return ConnectError(
                "connection_lost",
                f"the connection to `{self.name}` ended in the middle of `{program}`",
                why=f"exit code {ended.returncode}: {last}",
                fix="run the command again; nothing half-done is left in place",
            )
        return self._no_answer(program, f"exit code {ended.returncode}: {last}")

    def _no_answer(self, program: str, why: str) -> DfoError:
        return _remote_failed(f"`{program}` gave no answer on `{self.name}`", why)


def unreadable(what: str, error: ValidationError) -> PreflightError:
    """The error for an answer that came, and is not of the shape it should have."""
    return _remote_failed(f"{what} is not readable", first_problem(error))


def _remote_failed(what: str, why: str) -> PreflightError:
    fix = "run it again with `-vv`; if it repeats, report it with that output"
    return PreflightError("remote_failed", what, why=why, fix=fix)
