"""One file on its way from the target: checked, written beside its place, verified, renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import PreflightError, TransferError
from orchestrator.terminal import printable

BLOCK = 1 << 20
#: Room in a file name (255 bytes) for what we add to it.
LONGEST_NAME = 255 - len(".") - len(".0123456789abcdef.part")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the target's manifest."""

    path: str
    size: int
    sha256: str


def entry_from(item: Mapping[str, Any], include: Sequence[str]) -> Entry:
    """A checked entry: a plain relative path below what was asked for. Raises TransferError.

    The target may be broken or hostile; a path of its choice must not lead out of the folder we write to.
    """
    path, num_bytes, digest = item.get("path"), item.get("size"), item.get("sha256")
    parts = path.split("/") if isinstance(path, str) else [""]
    plain = all(part not in {"", ".", ".."} and not re.search(r"[\\\0]", part) for part in parts)
    asked = isinstance(path, str) and any(path == top or path.startswith(top + "/") for top in include)
    short = all(len(os.fsencode(part)) <= LONGEST_NAME for part in parts)
    if not (plain and asked and short):
        raise TransferError(
            "pull_failed",
            "the target offers a file that must not be written here",
            why=f"its path is `{printable(str(path))[:300]}`; nothing was copied",
            fix="look at the folder of the run on the target",
        )
    assert isinstance(path, str)
    good = isinstance(num_bytes, int) and num_bytes >= 0 and isinstance(digest, str)
    if not good or not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
        raise TransferError(
            "pull_failed",
            "the target's list of files cannot be read",
            why=f"`{printable(path)}` has size {num_bytes!r} and hash {digest!r}",
            fix="run it again with `-vv`; if it repeats, report it with that output",
        )
    return Entry(path, int(str(num_bytes)), str(digest))


@contextmanager
def laptop_disk(place: Path) -> Iterator[None]:
    """Turn failures of this machine's disk into errors that say so."""
    try:
        yield
    except OSError as error:
        why = f"`{error.filename or place}`: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PreflightError(
                "disk_full",
                "this machine's disk is full",
                why=why,
                fix="free some space and pull again; it goes on where it stopped",
            ) from error
        raise TransferError(
            "pull_failed",
            "a file cannot be written on this machine",
            why=why,
            fix="make that place writable, or give another folder with `--to`",
        ) from error


def is_there(place: Path, entry: Entry) -> bool:
    """Whether the file is here already, whole and equal."""
    with laptop_disk(place):
        if not place.is_file() or place.stat().st_size != entry.size:
            return False
        with place.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


@dataclass
class Part:
    """The bytes of `entry` that are here so far; `final` is where the whole file goes.

    The file is opened when the first bytes come: a run may have more files than a process may have open.
    """

    entry: Entry
    final: Path
    _file: IO[bytes] | None = field(default=None, init=False)
    _digest: Any = field(default=None, init=False)
    _written: int = field(default=0, init=False)

    @property
    def path(self) -> Path:
        return self.final.with_name(f".{self.final.name}.{self.entry.sha256[:16]}.part")

    @property
    def offset(self) -> int:
        """Where the next byte goes."""
        if self._file is not None:
            return self._written
        with laptop_disk(self.path):
            here = self.path.lstat().st_size if self.path.is_file() else 0
        return here if here <= self.entry.size else 0

    @property
    def complete(self) -> bool:
        return self.offset == self.entry.size

    def _open(self) -> IO[bytes]:
        """Open what an earlier attempt left, and hash it again: it may have been damaged since."""
        if self._file is not None:
            return self._file
        with laptop_disk(self.path):
            self.final.parent.mkdir(parents=True, exist_ok=True)
            # A link in its place would lead the bytes elsewhere.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            file = self._file = os.fdopen(descriptor, "r+b")
            self._lock(file)
            self._digest = hashlib.sha256()
            while block := file.read(BLOCK):
                self._digest.update(block)
            if file.tell() > self.entry.size:
                file.seek(0)
                file.truncate()
                self._digest = hashlib.sha256()
            self._written = file.tell()
        return file

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise TransferError(
                "pull_failed",
                f"another `dfo pull` is writing `{self.final}`",
                why="its unfinished file is locked by a running process",
                fix="wait for it, or give another folder with `--to`",
            ) from error

    def write(self, offset: int, data: bytes) -> None:
        file = self._open()
        if offset != self._written or offset + len(data) > self.entry.size:
            raise TransferError(
                "damaged",
                f"the target sent bytes of `{self.entry.path}` that were not asked for",
                why=f"{len(data)} bytes at {offset}; {self._written} of {self.entry.size} were here",
                fix="run it again with `-vv`; if it repeats, report it with that output",
            )
        with laptop_disk(self.path):
            file.write(data)
        self._digest.update(data)
        self._written += len(data)

    def finish(self) -> bool:
        """Put the file in its place if its hash is right; else forget it. Returns which."""
        file = self._open()
        assert self.complete
        if self._digest.hexdigest() != self.entry.sha256:
            self.discard()
            return False
        with laptop_disk(self.final):
            file.flush()
            os.fsync(file.fileno())
            self.path.replace(self.final)
            self._forget_older()
        self.close()
        return True

    def _forget_older(self) -> None:
        """Parts of earlier versions of this file are of no more use."""
        stale = re.compile(re.escape(f".{self.final.name}.") + r"[0-9a-f]{16}\.part")
        for sibling in self.final.parent.iterdir():
            if stale.fullmatch(sibling.name):
                sibling.unlink()

    def discard(self) -> None:
        self.close()
        with laptop_disk(self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Keep what is here for the next attempt."""
        if self._file is not None:
            with laptop_disk(self.path):
                self._file.close()
            self._file = None
