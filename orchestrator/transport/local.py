"""The embedded default: the "container" is this machine, and the release root a folder on it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from orchestrator.errors import ConnectError, DeadlineError
from orchestrator.transport.base import Completed

CHUNK = 64 * 1024
TICK = 1.0
GRACE = 3.0
#: What a fresh login in a container would have; the laptop's own variables must not leak into a run.
KEPT_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")


class LocalTransport:
    """Runs argv as child processes in sessions of their own, with a clean environment."""

    label = "this machine"

    def run(self, argv: Sequence[str], *, stdin: Iterable[bytes] = (), deadline: float) -> Completed:
        limit = time.monotonic() + deadline
        output = bytearray()
        with self.stream(argv, stdin=stdin) as stream:
            for chunk in stream:
                output += chunk
                if time.monotonic() > limit:
                    raise DeadlineError(
                        "deadline",
                        f"`{argv[0]}` did not finish in {deadline:g} s",
                        why="our own deadline for this step passed; the process was ended",
                        fix="look at the load of the machine, then run the command again",
                    )
            ended = stream.finish()
        return Completed(ended.argv, ended.returncode, bytes(output), ended.stderr)

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: Iterable[bytes] = ()) -> Iterator[_LocalStream]:
        environment = {k: v for k in KEPT_VARIABLES if (v := os.environ.get(k)) is not None}
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        except OSError as error:
            raise ConnectError(
                "unreachable",
                f"cannot start `{argv[0]}` on this machine",
                why=str(error),
                fix="set `python` of the target to an interpreter that exists",
            ) from error
        stream = _LocalStream(tuple(argv), process, stdin)
        try:
            yield stream
        finally:
            stream.end()

    def close(self) -> None:
        return None


class _LocalStream:
    """Feeds stdin and drains both outputs in threads, so that no pipe can fill up and block the child."""

    def __init__(self, argv: tuple[str, ...], process: subprocess.Popen[bytes], stdin: Iterable[bytes]) -> None:
        self._argv = argv
        self._process = process
        self._stdin = stdin
        self._chunks: queue.Queue[bytes | None] = queue.Queue(maxsize=64)
        self._stderr = bytearray()
        self._feed_error: BaseException | None = None
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._feed, self._drain_out, self._drain_err)
        ]
        for thread in self._threads:
            thread.start()

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

    def finish(self) -> Completed:
        code = self._process.wait()
        for thread in self._threads:
            thread.join(timeout=TICK)
        if self._feed_error is not None:
            raise self._feed_error
        return Completed(self._argv, code, b"", bytes(self._stderr))

    def end(self) -> None:
        """End the child's whole session if it still runs: its reader is gone.

        Asked first, so that a program in the middle of a release can clean up behind itself.
        """
        for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(patience)
        while self._threads[1].is_alive():
            with contextlib.suppress(queue.Empty):
                self._chunks.get(timeout=0.1)

    def _feed(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # A broken pipe is no error here: the exit code and the missing answer tell the story better.
        with contextlib.suppress(BrokenPipeError):
            try:
                for chunk in self._stdin:
                    pipe.write(chunk)
            except BrokenPipeError:
                raise
            except BaseException as error:
                self._feed_error = error
            finally:
                pipe.close()

    def _drain_out(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        while chunk := os.read(pipe.fileno(), CHUNK):
            self._chunks.put(chunk)
        pipe.close()
        self._chunks.put(None)

    def _drain_err(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        while chunk := os.read(pipe.fileno(), CHUNK):
            # The tail is what explains a failure; a chatty program must not fill the laptop's memory.
            self._stderr = (self._stderr + chunk)[-CHUNK:]
        pipe.close()
