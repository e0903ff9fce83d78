"""Commands on a host, or in something behind it that is entered from there: sudo, a container."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import DeadlineError, DfoError, PreflightError
from orchestrator.transport.base import Completed
from orchestrator.transport.link import GOODBYE, Link
from orchestrator.transport.streaming import PumpedStream, run_to_end
from orchestrator.transport.trouble import no_shell
from orchestrator.transport.words import (
    as_shell_says,
    read_pid,
    read_receipt,
    shell_line,
    with_receipt,
    without_marks,
)

HOST, INSIDE = "dfo-host", "dfo-inside"
#: The same as `GOODBYE` after Ctrl-C: somebody waits for the prompt (seconds).
HASTE = 0.4


class Door(Protocol):
    """The way from the host into where commands run."""

    @property
    def label(self) -> str: ...

    def through(self, argv: Sequence[str]) -> tuple[str, ...]:
        """What the host runs so that `argv` runs inside and leaves the receipt `INSIDE`."""
        ...

    def shut(self, ended: Completed) -> DfoError:
        """Why the command inside left no receipt, from what the host's command said."""
        ...


class RemoteTransport:
    """Runs argv through the login shell of a host, behind a door if there is one."""

    def __init__(self, link: Link, door: Door | None = None) -> None:
        self.link = link
        self._door = door

    @property
    def label(self) -> str:
        return self._door.label if self._door else self.link.label

    def run(self, argv: Sequence[str], *, stdin: Iterable[bytes] = (), deadline: float) -> Completed:
        return run_to_end(self._opened(argv, stdin, deadline), argv, deadline)

    def stream(self, argv: Sequence[str], *, stdin: Iterable[bytes] = ()) -> AbstractContextManager[PumpedStream]:
        return self._opened(argv, stdin, None)

    @contextmanager
    def _opened(self, argv: Sequence[str], stdin: Iterable[bytes], patience: float | None) -> Iterator[PumpedStream]:
        command = self._door.through(argv) if self._door else tuple(argv)
        pipes = self.link.start(shell_line(with_receipt(command, HOST)), patience)
        stream = PumpedStream(argv, pipes, stdin, self._judge)
        try:
            yield stream
        except BaseException as error:
            if isinstance(error, DeadlineError) or not isinstance(error, DfoError):
                patience = HASTE if isinstance(error, KeyboardInterrupt) else GOODBYE
                self._terminate(read_pid(HOST, stream.stderr), patience)
            raise
        finally:
            stream.end()

    def close(self) -> None:
        self.link.close()

    def _terminate(self, pid: int | None, patience: float) -> None:
        """Without a terminal, a command outlives its channel until it writes again, and sshd takes no signals for root
        ("session signalling requires privilege separation").
        """
        if pid is None or not self.link.alive:
            return
        with contextlib.suppress(DfoError):
            line = f"kill -TERM -{pid}"
            kill = PumpedStream((line,), self.link.start(line, patience), (), _whatever)
            try:
                kill.finish(patience)
            finally:
                kill.end()

    def _judge(self, status: int | None, stderr: bytes) -> tuple[int, bytes]:
        """The status of the command itself. Raises for everything that failed on the way to it."""
        found = read_receipt(HOST, stderr)
        # A receipt alone is not enough: sshd may send it before the last bytes of stdout.
        if found is None or status != as_shell_says(found[0]):
            stderr = without_marks(stderr)
            said = Completed((), 0, b"", stderr).last_words
            raise self.link.lost(status, stderr) or no_shell(self.link.label, f"it ended with {status}: {said}")
        if self._door is None:
            return found
        code, stderr = found
        inside = read_receipt(INSIDE, stderr)
        if inside is None:
            raise self._door.shut(Completed((), code, b"", without_marks(stderr)))
        return inside


def _whatever(status: int | None, stderr: bytes) -> tuple[int, bytes]:
    """Nobody asks how it ended."""
    return status or 0, stderr


@dataclass(frozen=True)
class Sudo:
    """Root on the host, by a rule that asks for nothing."""

    host: str

    @property
    def label(self) -> str:
        return f"{self.host} with sudo"

    def through(self, argv: Sequence[str]) -> tuple[str, ...]:
        return ("sudo", "-n", "-H", "--", *with_receipt(argv, INSIDE))

    def shut(self, ended: Completed) -> DfoError:
        user = self.host.partition("@")[0]
        return refused_by_sudo(self.host, ended, f"{user} ALL=(root) NOPASSWD: ALL") or PreflightError(
            "remote_failed",
            f"a command of root on `{self.host}` left no status",
            why=f"sudo ended with {ended.returncode}: {ended.last_words}",
            fix="run it again with `-vv`; if it repeats, report it with that output",
        )


def refused_by_sudo(host: str, ended: Completed, rule: str) -> PreflightError | None:
    """sudo's own refusal, if that is what `ended` is. `rule` is the line of sudoers that would do."""
    said = ended.stderr.decode(errors="replace")
    signs = ("sudo: ", "is not in the sudoers file", "is not allowed to execute", "sudo’: No such", "'sudo': No such")
    if not any(sign in said for sign in signs):
        return None
    user, _, name = host.partition("@")
    return PreflightError(
        "not_permitted",
        f"`{user}` may not become root on `{name}`",
        why=ended.last_words,
        fix=f"as root there: `echo '{rule}' > /etc/sudoers.d/dfo-{user}`, or connect as root",
    )
