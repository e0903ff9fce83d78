"""Text from the target, made safe to show: a training run may print anything, also what moves a cursor."""

from __future__ import annotations

import re
import unicodedata
from typing import TextIO

#: Colours are harmless but would leak over the end of a line; they are dropped, not shown.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
#: Joins emoji; the other format characters (bidirectional overrides and the like) can forge a line.
_JOINER = "\u200d"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    """`text` with control, format and line-breaking characters made visible; tabs stay."""
    if text.isprintable():
        return text
    return "".join(map(_visible, _COLOUR.sub("", text)))


def printable_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def _visible(char: str) -> str:
    if char.isprintable() or char in {"\t", _JOINER} or unicodedata.category(char) not in _HIDDEN:
        return char
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def write(stream: TextIO, data: bytes) -> None:
    """Write bytes to a text stream and flush, whatever its encoding."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(data.decode("utf-8", "replace"))
    else:
        stream.flush()
        buffer.write(data)
    stream.flush()


def encode(stream: TextIO, text: str) -> bytes:
    """`text` as the stream's terminal understands it."""
    return text.encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")
