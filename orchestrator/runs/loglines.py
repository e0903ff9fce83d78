"""From chunks of log bytes to lines on a screen, in a pipe or in JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.console import Console
from orchestrator.terminal import encode, printable, write

#: A longer line is shown in pieces: a target that never writes a newline must not fill the laptop's memory.
LONGEST = 64 * 1024
#: How long the beginning of a line waits for its end before it is shown.
PATIENCE = 1.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A line of one stage (`ends`), or a part of it. `offset` is where its first byte stands in the file."""

    offset: int
    data: bytes
    ends: bool


@dataclass
class Lines:
    """Cuts the bytes of one stage into pieces, never inside a UTF-8 character unless it is damaged."""

    clock: Callable[[], float] = time.monotonic
    offset: int = 0
    _held: bytearray = field(default_factory=bytearray)
    _since: float = 0.0

    def feed(self, offset: int, data: bytes) -> Iterator[Piece]:
        """`data` stands at `offset`; a jump (a replaced file) first gives out what was held."""
        if offset != self.offset + len(self._held):
            yield from self.flush()
            self.offset = offset
        if not self._held:
            self._since = self.clock()
        self._held += data
        *lines, rest = bytes(self._held).split(b"\n")
        self._held.clear()
        for line in lines:
            yield from self._cut(line + b"\n")
        if lines:
            self._since = self.clock()
        self._held += rest
        while len(self._held) > LONGEST:
            yield self._give(_whole(self._held[:LONGEST]))

    def overdue(self) -> Iterator[Piece]:
        """The beginning of a line that has waited long enough."""
        if self._held and self.clock() - self._since >= PATIENCE and (size := _whole(self._held)):
            yield self._give(size)

    def flush(self) -> Iterator[Piece]:
        """Everything held, also half a character."""
        if self._held:
            yield self._give(len(self._held))

    def _cut(self, line: bytes) -> Iterator[Piece]:
        """A line with its newline, in pieces of at most `LONGEST`."""
        while len(line) > LONGEST + 1:
            size = _whole(line[:LONGEST])
            yield self._piece(line[:size], ends=False)
            line = line[size:]
        yield self._piece(line[:-1], ends=True)

    def _give(self, size: int) -> Piece:
        data = bytes(self._held[:size])
        del self._held[:size]
        return self._piece(data, ends=False)

    def _piece(self, data: bytes, *, ends: bool) -> Piece:
        piece = Piece(self.offset, data, ends)
        self.offset += len(data) + ends
        return piece


def _whole(data: bytes | bytearray) -> int:
    """Length of `data` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            need = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) - back if need > back else len(data)
    return len(data)


class Printer(Protocol):
    """Where pieces go."""

    def pieces(self, stage: str, pieces: Iterator[Piece]) -> None: ...

    def notice(self, text: str, **fields: object) -> None:
        """A remark of ours: `text` for people (may be empty), `fields` (with `event`) for programs."""
        ...


@dataclass
class TextPrinter:
    """`[57 train] step 120 …`. A terminal gets the text made safe, a pipe the bytes as they are."""

    console: Console
    run: int
    _open: str | None = None

    def pieces(self, stage: str, pieces: Iterator[Piece]) -> None:
        out, parts = self.console.out, bytearray()
        terminal = out.isatty()
        prefix = f"[{self.run} {printable(stage)}] ".encode()
        for piece in pieces:
            data = encode(out, _on_terminal(piece.data)) if terminal else piece.data
            if self._open not in (None, stage) or (terminal and self._open and b"\r" in piece.data):
                parts += b"\n"
                self._open = None
            if self._open is None:
                parts += prefix
            parts += data
            self._open = None if piece.ends else stage
            if piece.ends:
                parts += b"\n"
        if parts:
            write(out, bytes(parts))

    def notice(self, text: str, **fields: object) -> None:
        if not text:
            return
        if self._open is not None:
            write(self.console.out, b"\n")
            self._open = None
        self.console.say(text)


def _on_terminal(data: bytes) -> str:
    """What a terminal would show of one line in the end: of a progress bar, its last state."""
    text = data.decode("utf-8", "replace").rstrip("\r")
    return printable(text.rpartition("\r")[2])


@dataclass
class JsonPrinter:
    """One JSON object for each line or remark. `bytes` is the true length: `text` may hold replacements."""

    console: Console
    run: int

    def pieces(self, stage: str, pieces: Iterator[Piece]) -> None:
        for piece in pieces:
            self.console.event(
                event="line",
                run=self.run,
                stage=stage,
                offset=piece.offset,
                bytes=len(piece.data) + piece.ends,
                text=piece.data.decode("utf-8", "replace"),
                ends=piece.ends,
            )

    def notice(self, text: str, **fields: object) -> None:
        self.console.event(run=self.run, **fields)
