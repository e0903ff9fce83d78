"""argv through real shells: every byte arrives, once quoted per layer, and the status comes back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.transport.words import read_receipt, shell_line, with_receipt

ECHO = (sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))")
#: Anything that UTF-8 can carry and an argv can hold: quotes, newlines, dollars, dashes, accents, nothing at all.
words = st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30), max_size=6)
odd = ["", "-", "--", "-c", "$(id)", "`id`", "'", '"', "\\", "\n", "a b", "*", "~", "é", "日", "#", "!", "%s", "A=b"]
nasty = st.lists(st.sampled_from(odd), max_size=8)


def through_shells(argv: tuple[str, ...], layers: int) -> subprocess.CompletedProcess[bytes]:
    """Each layer is a login shell that reads a line."""
    for _ in range(layers - 1):
        argv = ("sh", "-c", shell_line(argv))
    return subprocess.run(["sh", "-c", shell_line(argv)], capture_output=True, timeout=30)


@given(words | nasty, st.integers(1, 3))
@settings(max_examples=60)
def test_every_argv_arrives_unchanged(extra: list[str], layers: int) -> None:
    done = through_shells(with_receipt((*ECHO, *extra), "dfo-test"), layers)
    assert json.loads(done.stdout) == extra
    assert read_receipt("dfo-test", done.stderr) == (0, b"")


@given(words)
@settings(max_examples=20)
def test_receipts_nest(extra: list[str]) -> None:
    """As in `ssh node, pct exec`: one for the host, one for the inside."""
    inner = with_receipt((*ECHO, *extra), "dfo-inside", {"HOME": "/root", "LC_ALL": "C.UTF-8"})
    done = through_shells(with_receipt(inner, "dfo-host"), 1)
    host = read_receipt("dfo-host", done.stderr)
    assert host is not None and host[0] == 0
    assert read_receipt("dfo-inside", host[1]) == (0, b"")
    assert json.loads(done.stdout) == extra


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("exit 127", 127), ("kill -9 $$", -9), ("kill -TERM $$", -15)],
)
def test_the_status_comes_back(script: str, status: int) -> None:
    done = through_shells(with_receipt(("sh", "-c", script), "dfo-test"), 2)
    found = read_receipt("dfo-test", done.stderr)
    assert found is not None and found[0] == status


def test_a_missing_program_is_127_and_says_so() -> None:
    done = through_shells(with_receipt(("/no/such/program",), "dfo-test"), 1)
    found = read_receipt("dfo-test", done.stderr)
    assert found is not None and found[0] == 127 and b"/no/such/program" in found[1]


def test_stdin_is_the_commands_alone() -> None:
    data = bytes(range(256)) * 1000
    line = shell_line(with_receipt(("cat",), "dfo-test"))
    assert subprocess.run(["sh", "-c", line], input=data, capture_output=True, timeout=30).stdout == data


@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(0, 255))
def test_only_the_last_receipt_counts(before: bytes, after: bytes, code: int) -> None:
    """What a program prints that looks like one is not taken for ours, which comes last."""
    forged = before + b"\x1edfo-test 7\n"
    after = after.replace(b"\x1edfo-test", b"")
    found = read_receipt("dfo-test", forged + b"\x1edfo-test %d\n" % code + after)
    assert found == (128 - code if 128 < code <= 192 else code, forged + after)


def test_no_receipt() -> None:
    assert read_receipt("dfo-host", b"sudo: a password is required\n") is None
    assert read_receipt("dfo-host", b"\x1edfo-inside 0\n") is None


@pytest.mark.parametrize("argv", [(), ("",), ("-c",), ("A=b",), ("a", "\0")])
def test_what_is_no_command_is_a_mistake_of_ours(argv: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        with_receipt(argv, "dfo-test")
