"""The embedded default: the "container" is this machine, and the release root a folder on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from orchestrator.errors import ConnectError
from orchestrator.transport.base import Completed
from orchestrator.transport.process import ProcessPipes
from orchestrator.transport.streaming import PumpedStream, run_to_end

#: What a fresh login in a container would have; the laptop's own variables must not leak into a run.
KEPT_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")


class LocalTransport:
    """Runs argv as child processes in sessions of their own, with a clean environment."""

    label = "this machine"

    def run(self, argv: Sequence[str], *, stdin: Iterable[bytes] = (), deadline: float) -> Completed:
        return run_to_end(self.stream(argv, stdin=stdin), argv, deadline)

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: Iterable[bytes] = ()) -> Iterator[PumpedStream]:
        environment = {k: v for k in KEPT_VARIABLES if (v := os.environ.get(k)) is not None}
        try:
            pipes = ProcessPipes(argv, {**environment, "LC_ALL": "C.UTF-8"})
        except OSError as error:
            raise ConnectError(
                "unreachable",
                f"cannot start `{argv[0]}` on this machine",
                why=str(error),
                fix="set `python` of the target to an interpreter that exists",
            ) from error
        stream = PumpedStream(argv, pipes, stdin)
        try:
            yield stream
        finally:
            stream.end()

    def close(self) -> None:
        return None
