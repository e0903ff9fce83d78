"""Random access to the lines of large JSONL files through an index of byte offsets.

Only the offsets are kept in memory (8 bytes a line); the text of a line is read when it is asked for. The index of a
large file is kept in the cache folder and found again by the file's path, size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.cache_folder import cache_folder
from dflash_core.errors import DataError

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20
CACHE_FROM_BYTES = 64 * 2**20
"""Smaller files are scanned again faster than their index is looked up."""


class JsonLines:
    """The JSON objects of one or more JSONL files, by number; blank lines are left out. Safe to share by threads."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        """Index `files` in the given order. Raises `DataError` for a file that is missing, empty or compressed."""
        if not files:
            raise DataError("no data files", "the list of files is empty", "name at least one JSONL file")
        self.files = [Path(file) for file in files]
        self._descriptors: list[int] = []
        self._starts: list[np.ndarray] = []
        self._lines: list[np.ndarray] = []
        for file in self.files:
            self._open(file)
        counts = [len(lines) for lines in self._lines]
        self._first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", ()):
            os.close(descriptor)

    def place(self, number: int) -> str:
        """`file:line` of one record, lines counted from 1."""
        file, line = self._locate(number)
        return f"{self.files[file]}:{line + 1}"

    def record(self, number: int) -> dict[str, Any]:
        """Read and parse one line. Raises `DataError` with `file:line` when it is not a JSON object in UTF-8."""
        file, line = self._locate(number)
        start, end = self._starts[file][line : line + 2]
        raw = os.pread(self._descriptors[file], int(end - start), int(start))
        return parse_line(raw, f"{self.files[file]}:{line + 1}")

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        return file, int(self._lines[file][number - self._first[file]])

    def _open(self, file: Path) -> None:
        try:
            descriptor = os.open(file, os.O_RDONLY)
            self._descriptors.append(descriptor)
            head = os.pread(descriptor, 2, 0)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}", "the data file cannot be read", "correct the path") from error
        if head == b"\x1f\x8b":
            raise DataError(f"{file} is gzip-compressed", "lines are read at random", f"gunzip {file}")
        starts = line_starts(file, descriptor)
        lines = _lines_with_text(descriptor, starts)
        if len(lines) == 0:
            raise DataError(f"{file} is empty", "it holds no line with text", "remove it from the list of files")
        self._starts.append(starts)
        self._lines.append(lines)


def parse_line(raw: bytes, place: str) -> dict[str, Any]:
    """One line as a JSON object. Raises `DataError` that begins with `place`."""
    try:
        value = json.loads(raw.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line",
            "JSONL files are UTF-8",
            "convert the file, for example with iconv",
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not JSON: {error.msg} at column {error.colno}",
            "every line must be one JSON object",
            "repair or remove the line",
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: a JSON {type(value).__name__}, not an object",
            "every line must be one JSON object",
            "repair or remove the line",
        )
    return value


def line_starts(file: Path, descriptor: int) -> np.ndarray:
    """Byte offsets of all line starts and of the end of the file, `[lines + 1]` int64, from the cache if known."""
    stat = os.fstat(descriptor)
    if stat.st_size < CACHE_FROM_BYTES:
        return _scan(descriptor, stat.st_size)
    key = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    cached = cache_folder("line-index") / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
    try:
        starts: np.ndarray = np.load(cached)
        if len(starts) and starts[-1] == stat.st_size:
            return starts
    except (OSError, ValueError, EOFError):
        log.debug("no usable line index at %s", cached)
    starts = _scan(descriptor, stat.st_size)
    try:
        _save_atomically(cached, starts)
    except OSError as error:
        log.warning("the line index of %s is not kept: %s", file, error)
    return starts


def _scan(descriptor: int, size: int) -> np.ndarray:
    found = [np.zeros(1, dtype=np.int64)]
    for base in range(0, size, CHUNK_BYTES):
        chunk = np.frombuffer(os.pread(descriptor, CHUNK_BYTES, base), dtype=np.uint8)
        found.append(np.flatnonzero(chunk == ord("\n")).astype(np.int64) + (base + 1))
    starts = np.concatenate(found)
    return starts if starts[-1] == size else np.append(starts, size)


def _lines_with_text(descriptor: int, starts: np.ndarray) -> np.ndarray:
    """Numbers of the lines that are more than a line break, counted from 0."""
    length = np.diff(starts)
    keep = length > 1
    for line in np.flatnonzero(length == 2):
        keep[line] = os.pread(descriptor, 2, int(starts[line])) != b"\r\n"
    return np.flatnonzero(keep)


def _save_atomically(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            np.save(stream, array)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
