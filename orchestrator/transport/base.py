"""The one seam to the outside.

A transport runs an argv inside the target and moves bytes through its standard streams. Everything else
(releases, runs, logs) is built on these two calls, so a new way to reach a container is one small class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended. `returncode` is negative for a signal, as in `subprocess`."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes


class Stream(Protocol):
    """A running command whose stdout is read as it comes.

    Iterating yields non-empty chunks of bytes and an empty chunk about once a second while nothing comes,
    so that the reader can look at its own clock. The iteration ends at end of file.
    """

    def __iter__(self) -> Iterator[bytes]: ...

    def finish(self) -> Completed:
        """Wait for the end (stdout is empty in the result). Call it after the iteration."""
        ...


class Transport(Protocol):
    """How commands reach one target. Both calls raise `ConnectError` or `DeadlineError`, never others."""

    @property
    def label(self) -> str:
        """For people: `local folder …`, `root@pve1, container 101`."""
        ...

    def run(self, argv: Sequence[str], *, stdin: Iterable[bytes] = (), deadline: float) -> Completed:
        """Run to the end. stdin is always closed after the last chunk; `deadline` is in seconds."""
        ...

    def stream(self, argv: Sequence[str], *, stdin: Iterable[bytes] = ()) -> AbstractContextManager[Stream]:
        """Run and read stdout as it comes. Leaving the block ends the reader's side at once."""
        ...

    def close(self) -> None:
        """Drop the connection; safe to call twice."""
        ...
