"""The one seam to the outside.

A transport runs an argv inside the target and moves bytes through its standard streams. Everything else
(releases, runs, logs) is built on these two calls, so a new way to reach a container is one small class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

#: How long a command may go on after it closed its stdout, before we stop waiting for its end (seconds).
PATIENCE = 30.0

Tell = Callable[[str], None]


def silent(_text: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended. `returncode` is negative for a signal, as in `subprocess`.

    Where only a shell over there knows how it ended, its convention is taken back: 128+N is signal N. `stderr` is
    the last 64 KiB.
    """

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def last_words(self) -> str:
        """The last line of stderr, else of stdout, short enough for a message."""
        lines = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace").splitlines()
        return lines[-1][:300] if lines else "no message"


class Stream(Protocol):
    """A running command whose stdout is read as it comes.

    Iterating yields non-empty chunks of bytes and an empty chunk about once a second while nothing comes,
    so that the reader can look at its own clock. The iteration ends at end of file.
    """

    def __iter__(self) -> Iterator[bytes]: ...

    def finish(self, patience: float = PATIENCE) -> Completed:
        """Wait for the end (stdout is empty in the result). Call it after the iteration."""
        ...


class Transport(Protocol):
    """How commands reach one target.

    Both calls raise `ConnectError` or `DeadlineError` for the way there, `PreflightError` for a target that cannot
    run anything (a stopped container, sudo that asks), and never others. What a command itself ends with is no error.
    The first word of an argv is a program: no leading `-`, no `=`. Text is UTF-8 without NUL. A kernel takes no more
    than 128 KiB in one piece, so whatever is long goes through stdin.
    """

    @property
    def label(self) -> str:
        """For people: `this machine`, `root@pve1, container 101`."""
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
