"""A running command with all its pipes served: nothing can fill up and block the other side."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from orchestrator.errors import DeadlineError
from orchestrator.transport.base import PATIENCE, Completed, Stream

CHUNK = 64 * 1024
#: paramiko copies the rest of the buffer for each packet it sends, so one big `sendall` is quadratic.
SLICE = 32 * 1024
TICK = 1.0
#: How long the last bytes of stderr may take after the command has ended (seconds).
STRAGGLERS = 5.0

#: Raw end of a command (None: the status is lost) and its stderr → what the caller sees. May raise.
Judge = Callable[["int | None", bytes], "tuple[int, bytes]"]


class Pipes(Protocol):
    """Both ends of one command. Every method but `end` may block, and is used by one thread only."""

    def read(self) -> bytes:
        """Some bytes of stdout; empty at its end, also when the connection is gone."""
        ...

    def read_err(self) -> bytes:
        """The same of stderr."""
        ...

    def write(self, data: memoryview) -> None:
        """All of `data` to stdin. Raises BrokenPipeError when nobody reads it any more."""
        ...

    def close_stdin(self) -> None:
        """Tell the command that there is no more input. Never raises."""
        ...

    def wait(self, patience: float) -> int | None:
        """The exit status, negative for a signal; None when it is lost. Raises TimeoutError."""
        ...

    def end(self) -> None:
        """End the command if it still runs, unblock every other method, and give everything back."""
        ...


class PumpedStream:
    """Feeds stdin and drains both outputs in threads, with bounded memory."""

    def __init__(self, argv: Sequence[str], pipes: Pipes, stdin: Iterable[bytes], judge: Judge | None = None) -> None:
        self._argv = tuple(argv)
        self._pipes = pipes
        self._stdin = stdin
        self._judge = judge or _as_it_is
        self._chunks: queue.Queue[bytes | None] = queue.Queue(maxsize=64)
        self._stderr = bytearray()
        self._feed_error: BaseException | None = None
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._feed, self._drain_out, self._drain_err)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB so far."""
        return bytes(self._stderr)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                chunk = self._chunks.get(timeout=TICK)
            except queue.Empty:
                yield b""
                continue
            if chunk is None:
                return
            yield chunk

    def finish(self, patience: float = PATIENCE) -> Completed:
        """How it ended. Raises what the source of stdin raised, and `DeadlineError` after `patience` seconds."""
        try:
            self._pipes.wait(patience)
        except TimeoutError as error:
            raise too_late(self._argv, patience, "it closed its output, but goes on") from error
        for thread, patience in zip(self._threads, (TICK, TICK, STRAGGLERS), strict=True):
            thread.join(timeout=patience)
        status = self._pipes.wait(0)  # once more: only now it is known whether everything arrived
        if self._feed_error is not None:
            raise self._feed_error
        code, stderr = self._judge(status, self.stderr)
        return Completed(self._argv, code, b"", stderr)

    def end(self) -> None:
        """End the command if it still runs: its reader is gone."""
        self._pipes.end()
        while self._threads[1].is_alive():
            with contextlib.suppress(queue.Empty):
                self._chunks.get(timeout=0.1)

    def _feed(self) -> None:
        # A broken pipe is no error here: the exit code and the missing answer tell the story better.
        with contextlib.suppress(BrokenPipeError):
            try:
                for chunk in self._stdin:
                    view = memoryview(chunk)
                    for start in range(0, len(view), SLICE):
                        self._pipes.write(view[start : start + SLICE])
            except BrokenPipeError:
                raise
            except BaseException as error:
                self._feed_error = error
            finally:
                self._pipes.close_stdin()

    def _drain_out(self) -> None:
        try:
            while chunk := self._pipes.read():
                self._chunks.put(chunk)
        finally:
            self._chunks.put(None)

    def _drain_err(self) -> None:
        while chunk := self._pipes.read_err():
            # The tail is what explains a failure; a chatty program must not fill the laptop's memory.
            self._stderr = (self._stderr + chunk)[-CHUNK:]


class IdleStdin:
    """Input that says nothing until `end`: what waits for it to end lives as long as we do, or our connection."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self._ended.wait()
        return iter(())

    def end(self) -> None:
        self._ended.set()


def _as_it_is(status: int | None, stderr: bytes) -> tuple[int, bytes]:
    assert status is not None, "these pipes never lose a status"
    return status, stderr


def run_to_end(opened: AbstractContextManager[Stream], argv: Sequence[str], deadline: float) -> Completed:
    """`Transport.run` on top of a stream not entered yet. Raises `DeadlineError` after `deadline` seconds."""
    limit = time.monotonic() + deadline
    output = bytearray()
    with opened as stream:
        for chunk in stream:
            output += chunk
            if time.monotonic() > limit:
                raise too_late(argv, deadline, "our own deadline for this step passed; the program was ended")
        ended = stream.finish(max(0.0, limit - time.monotonic()) + TICK)
    return Completed(ended.argv, ended.returncode, bytes(output), ended.stderr)


def too_late(argv: Sequence[str], deadline: float, why: str) -> DeadlineError:
    return DeadlineError(
        "deadline",
        f"`{argv[0]}` did not finish in {deadline:g} s",
        why=why,
        fix="look at the load of the machine, then run the command again",
    )
