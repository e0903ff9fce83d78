"""Pipes of a child process of ours."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from orchestrator.transport.streaming import CHUNK

GRACE = 3.0


class ProcessPipes:
    """A child in a session of its own. Raises OSError when it cannot be started."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self._left, self._leave = os.pipe()

    def read(self) -> bytes:
        assert self.process.stdout is not None
        return self._read(self.process.stdout)

    def read_err(self) -> bytes:
        assert self.process.stderr is not None
        return self._read(self.process.stderr)

    def write(self, data: memoryview) -> None:
        assert self.process.stdin is not None
        descriptor = self.process.stdin.fileno()
        while data:
            if not self._ready(descriptor, select.POLLOUT):
                raise BrokenPipeError
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(descriptor, data) :]

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait(self, patience: float) -> int | None:
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error

    def end(self) -> None:
        """Asked first, so that a program in the middle of a release can clean up behind itself."""
        for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
        # Somebody else may hold the other ends: a daemon that was left behind, or ssh's master.
        os.close(self._leave)

    def _read(self, pipe: IO[bytes]) -> bytes:
        data = os.read(pipe.fileno(), CHUNK) if self._ready(pipe.fileno(), select.POLLIN) else b""
        if not data:
            pipe.close()
        return data

    def _ready(self, descriptor: int, event: int) -> bool:
        """Wait for a pipe; False when we leave."""
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(self._left, select.POLLIN)
        return any(ready == descriptor for ready, _ in poll.poll())

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self._left)
