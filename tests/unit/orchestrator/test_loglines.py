"""Cutting log bytes into lines, and showing them without trusting them."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.console import Console
from orchestrator.errors import UsageError
from orchestrator.runs.loglines import LONGEST, PATIENCE, JsonPrinter, Lines, Piece, TextPrinter
from orchestrator.terminal import printable


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def shown(stream: io.TextIOWrapper) -> bytes:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def bytes_of(pieces: list[Piece]) -> bytes:
    return b"".join(piece.data + b"\n" * piece.ends for piece in pieces)


@given(st.binary(max_size=400), st.data())
def test_pieces_are_the_bytes_however_they_were_cut(data: bytes, draw: st.DataObject) -> None:
    lines, pieces, position = Lines(), [], 0
    while position < len(data):
        size = draw.draw(st.integers(1, 50))
        pieces += lines.feed(position, data[position : position + size])
        position += len(data[position : position + size])
    pieces += lines.flush()
    assert bytes_of(pieces) == data
    expected = 0
    for piece in pieces:
        assert piece.offset == expected
        expected += len(piece.data) + piece.ends


@given(st.text(max_size=60), st.integers(1, 7))
def test_overdue_pieces_never_split_a_character(text: str, size: int) -> None:
    now = [0.0]
    lines, data = Lines(clock=lambda: now[0]), text.encode()
    pieces: list[Piece] = []
    for start in range(0, len(data), size):
        pieces += lines.feed(start, data[start : start + size])
        now[0] += 2 * PATIENCE
        pieces += lines.overdue()
    for piece in pieces:
        piece.data.decode()
    assert bytes_of([*pieces, *lines.flush()]) == data


def test_a_line_without_end_is_given_out_in_pieces_and_not_kept() -> None:
    lines, position, pieces = Lines(), 0, []
    block = "é".encode() * 50_001
    for _ in range(40):
        pieces += lines.feed(position, block)
        position += len(block)
        assert len(lines._held) <= LONGEST
    assert max(len(piece.data) for piece in pieces) <= LONGEST
    assert all(piece.data.decode() for piece in pieces)
    assert sum(len(piece.data) for piece in pieces) + len(lines._held) == position


def test_the_start_of_a_line_waits_for_its_end_only_so_long() -> None:
    now = [0.0]
    lines = Lines(clock=lambda: now[0])
    assert list(lines.feed(0, b"first\nsec")) == [Piece(0, b"first", True)]
    assert list(lines.overdue()) == []
    now[0] = PATIENCE
    assert list(lines.overdue()) == [Piece(6, b"sec", False)]
    assert list(lines.feed(9, b"ond\n")) == [Piece(9, b"ond", True)]


def test_a_jump_gives_out_what_was_held() -> None:
    lines = Lines()
    assert list(lines.feed(0, b"old")) == []
    assert list(lines.feed(100, b"new\n")) == [Piece(0, b"old", False), Piece(100, b"new", True)]


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("plain text, tabs\tand accents é 漢", "plain text, tabs\tand accents é 漢"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x1b[2J\x1b[H", "␛[2J␛[H"),
        ("a\x9b2Jb", "a\\u009b2Jb"),
        ("evil \u202etxt", "evil \\u202etxt"),
        ("line\u2028break", "line\\u2028break"),
        ("nul\x00 del\x7f", "nul␀ del␡"),
        ("family \U0001f468\u200d\U0001f469", "family \U0001f468\u200d\U0001f469"),
        ("lone \udcff", "lone \\udcff"),
    ],
)
def test_control_characters_are_shown_not_obeyed(raw: str, safe: str) -> None:
    assert printable(raw) == safe


@given(st.text())
def test_printable_text_cannot_move_the_cursor(text: str) -> None:
    assert not set(printable(text)) & {*map(chr, [*range(9), *range(10, 32), *range(127, 160)]), "\u202e", "\u2028"}


def test_a_terminal_gets_safe_text_and_a_pipe_the_bytes() -> None:
    line = [Piece(0, b"10%\r20%\rdone \x1b[5n\xff", True)]
    terminal, pipe = Terminal(io.BytesIO(), encoding="utf-8"), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    TextPrinter(Console(out=terminal), 57).pieces("train", iter(line))
    TextPrinter(Console(out=pipe), 57).pieces("train", iter(line))
    assert shown(terminal) == "[57 train] done ␛[5n\ufffd\n".encode()
    assert shown(pipe) == b"[57 train] 10%\r20%\rdone \x1b[5n\xff\n"


def test_an_ascii_terminal_gets_escapes_instead_of_an_error() -> None:
    terminal = Terminal(io.BytesIO(), encoding="ascii")
    TextPrinter(Console(out=terminal), 1).pieces("train", iter([Piece(0, "é".encode(), True)]))
    assert shown(terminal) == b"[1 train] \\xe9\n"


def test_parts_of_a_line_are_joined_and_other_stages_start_their_own() -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    printer = TextPrinter(Console(out=pipe, err=io.StringIO()), 7)
    printer.pieces("train", iter([Piece(0, b"half", False)]))
    printer.pieces("train", iter([Piece(4, b" done", True), Piece(10, b"part", False)]))
    printer.pieces("evaluate", iter([Piece(0, b"next", True)]))
    printer.pieces("train", iter([Piece(14, b"open", False)]))
    printer.notice("-- remark --")
    assert shown(pipe) == b"[7 train] half done\n[7 train] part\n[7 evaluate] next\n[7 train] open\n"


def test_json_lines_carry_the_true_length() -> None:
    out = io.StringIO()
    printer = JsonPrinter(Console(json=True, command="logs", out=out), 7)
    printer.pieces("train", iter([Piece(3, b"\xff!", True)]))
    assert json.loads(out.getvalue()) == {
        "schema": "dfo/1",
        "command": "logs",
        "event": "line",
        "run": 7,
        "stage": "train",
        "offset": 3,
        "bytes": 3,
        "text": "\ufffd!",
        "ends": True,
    }


def test_no_message_can_steer_the_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out=out, err=err, verbose=1)
    evil = "a\x1b[2Jb\x9b1m"
    for tell in (console.say, console.warn, console.debug, console.data):
        tell(evil)
    console.table(["X"], [[evil]])
    console.error(UsageError("usage", evil, why=f"{evil}\nand {evil}", fix=evil))
    assert "\x1b" not in out.getvalue() + err.getvalue()
    assert "\x9b" not in out.getvalue() + err.getvalue()
    assert err.getvalue().endswith("  why: a␛[2Jb\\u009b1m\n       and a␛[2Jb\\u009b1m\n  fix: a␛[2Jb\\u009b1m\n")
