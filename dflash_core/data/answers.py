"""The file that answers are appended to: one writer, whole lines, and a torn last line is repaired."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from dflash_core.data.chats import Message, parse_chat, prompt_sha256
from dflash_core.data.jsonl import parse_line
from dflash_core.errors import DataError

TAIL_BYTES = 2**20


class AnswerFile:
    """Answers on disk, appended batch by batch. Made by `open_answers`."""

    def __init__(self, path: Path, stream: FileIO) -> None:
        self.path = path
        self._stream = stream
        self.prompts: set[bytes] = set(_answered_prompts(path))
        """SHA-256 digests of the prompts that have an answer."""

    def append(self, answers: Sequence[dict[str, Any]]) -> None:
        """Write one line per answer and return when they are on disk. Raises `DataError` when the disk refuses."""
        lines = b"".join(_line(answer) for answer in answers)
        try:
            # One unbuffered write, repeated only if the system took a part: nothing is left to a later flush.
            while lines:
                lines = lines[self._stream.write(lines) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise DataError(
                f"{self.path}: {error.strerror}",
                "the answers of this batch could not be written; earlier ones are safe",
                "make room and run the same command again: it continues behind the last whole line",
            ) from error
        self.prompts.update(_prompt_digest(answer["messages"]) for answer in answers)


@contextmanager
def open_answers(path: Path) -> Iterator[AnswerFile]:
    """Open or create the file for appending, alone.

    Raises `DataError` when another process is writing it, or with `file:line` when a line in it is not an answer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{path} is being written by another process",
                "two generators would answer the same prompts",
                "wait for it, or choose another generate.output",
            ) from error
        _repair_last_line(path)
        yield AnswerFile(path, stream)


def _repair_last_line(path: Path) -> None:
    """End the file with a line break: behind its last line if that is whole, else in place of it."""
    size = path.stat().st_size
    with path.open("r+b") as stream:
        tail = b""
        while len(tail) < size and b"\n" not in tail:
            length = min(size - len(tail), TAIL_BYTES)
            stream.seek(size - len(tail) - length)
            tail = stream.read(length) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            parse_line(last, str(path))
        except DataError:
            stream.truncate(size - len(last))
        else:
            stream.seek(size)
            stream.write(b"\n")


def _answered_prompts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            place = f"{path}:{number}"
            yield _prompt_digest(parse_chat(parse_line(raw, place), place).messages)


def _prompt_digest(messages: Sequence[Message]) -> bytes:
    """Digest of everything in front of the answer."""
    return bytes.fromhex(prompt_sha256(messages[:-1]))


def _line(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        # Half of a surrogate pair, legal in JSON escapes only.
        return json.dumps(answer).encode() + b"\n"
