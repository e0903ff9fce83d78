"""Where a follow starts, what it asks, and how it waits; the follow itself is tested against real runs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.console import Console
from orchestrator.errors import ConnectError, DeadlineError, Interrupted, UsageError
from orchestrator.remote.wire import Record
from orchestrator.runs.follow import LogRequest, parse_from, parse_since
from orchestrator.runs.reconnect import DELAYS, Backoff, is_transient, listen


def program(*names: str) -> dict[str, Any]:
    """The functions of remote fragments, as the target has them."""
    folder, scope = files("orchestrator.remote") / "programs", {"__name__": "fragments"}
    for name in ("_base", *names):
        exec((folder / f"{name}.py").read_text(), scope)
    return scope


STARTS = program("_log_starts")


class Log:
    """What the functions of `_log_starts` need of a log."""

    def __init__(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        self._file = path.open("rb")
        self.fd, self.size, self.stage, self.offset = self._file.fileno(), len(data), path.stem, 0


# --- the command line -----------------------------------------------------------------------------------------------


def test_since_is_an_age_or_a_time() -> None:
    assert parse_since("10m") == {"ago": 600.0}
    assert parse_since("2026-11-30T16:12:00+00:00") == {"at": 1796055120.0}
    assert parse_since("2026-11-30 16:12") == {"at": datetime(2026, 11, 30, 16, 12).timestamp()}
    with pytest.raises(UsageError, match="neither an age nor a time"):
        parse_since("yesterday")


def test_from_is_a_stage_and_an_offset() -> None:
    assert parse_from("train:184220") == ("train", 184220)
    for text in ("train", "train:", ":5", "train:-1", "train:5k"):
        with pytest.raises(UsageError, match="STAGE:OFFSET"):
            parse_from(text)


def test_the_request_is_plain_data() -> None:
    request = LogRequest(run=3, start=("train", 9), since={"ago": 5.0}, tail=1, stage="train", follow=True)
    assert json.loads(json.dumps(request.as_dict())) == {
        "run": 3,
        "follow": True,
        "stage": "train",
        "since": {"ago": 5.0},
        "tail": 1,
        "start": {"stage": "train", "offset": 9},
    }


# --- reconnecting ---------------------------------------------------------------------------------------------------


def test_pauses_grow_and_start_again_after_progress() -> None:
    slept: list[float] = []
    backoff = Backoff(sleep=slept.append)
    for _ in range(9):
        backoff.pause()
    backoff.progressed()
    backoff.pause()
    assert slept == [*DELAYS, 30.0, 30.0, 0.2]


def test_only_the_network_is_worth_another_try() -> None:
    def failed(kind: str) -> ConnectError:
        return ConnectError(kind, "x", why="y", fix="z")

    assert is_transient(failed("connection_lost")) and is_transient(failed("unreachable"))
    assert not is_transient(failed("host_key_mismatch")) and not is_transient(failed("login_refused"))
    assert not is_transient(UsageError("usage", "x", why="y", fix="z"))
    assert is_transient(DeadlineError("deadline", "a channel did not open", why="y", fix="z"))


def test_silence_is_counted_only_while_listening() -> None:
    now = [0.0]

    def records() -> Iterator[Record | None]:
        for wait, record in [(1, None), (0, Record({"t": "beat"})), *[(1, None)] * 20]:
            now[0] += wait
            yield record

    heard, listening = 0, listen(records(), silence=15, clock=lambda: now[0])
    with pytest.raises(ConnectError, match="silent"):
        for _ in listening:
            heard += 1
            now[0] += 100  # a slow reader
    assert heard == 2 + 14


# --- where to start, in the target ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), max_size=40), st.integers(-1, 400))
def test_sizes_at_a_moment_are_those_of_the_last_line_before_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], moment: int
) -> None:
    path, now, entries = tmp_path_factory.mktemp("index") / "index.jsonl", 0, []
    for step, padding in steps:
        now += step
        entries.append({"t": now, "sizes": {"train": now * 7}, "pad": "x" * padding * 30})
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"t": 9')
    before = [entry["sizes"] for entry in entries if entry["t"] <= moment]
    assert STARTS["sizes_at"](str(path), moment) == (before[-1] if before else {})


def test_without_an_index_nothing_is_known(tmp_path: Path) -> None:
    assert STARTS["sizes_at"](str(tmp_path / "index.jsonl"), 5) is None
    (tmp_path / "index.jsonl").touch()
    assert STARTS["sizes_at"](str(tmp_path / "index.jsonl"), 5) is None


@given(st.lists(st.sampled_from([b"\n", b"ab", b"x" * 40_000]), max_size=12).map(b"".join), st.integers(0, 14))
def test_lines_from_the_end(tmp_path_factory: pytest.TempPathFactory, data: bytes, lines: int) -> None:
    log = Log(tmp_path_factory.mktemp("log") / "train.log", data)
    offset, left = STARTS["line_from_end"](log, lines)
    whole = data.splitlines(keepends=True)
    assert data[offset:] == b"".join(whole[max(0, len(whole) - lines) :])
    assert left == max(0, lines - len(whole))


@given(st.binary(max_size=80).map(lambda data: data.replace(b"\x01", b"\n")), st.data())
def test_the_start_of_the_line_a_byte_is_in(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, draw: st.DataObject
) -> None:
    offset = draw.draw(st.integers(0, len(data)))
    log = Log(tmp_path_factory.mktemp("log") / "train.log", data)
    assert STARTS["line_start"](log, offset) == data.rfind(b"\n", 0, offset) + 1


# --- words ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_no_alarm() -> None:
    console = Console(err=io.StringIO())
    console.error(
        Interrupted(
            "interrupted", "stopped watching; run 57 goes on", why="Ctrl-C", fix="resume exactly here: `dfo logs`"
        )
    )
    assert console.err.getvalue() == (  # type: ignore[attr-defined]
        "\nStopped watching; run 57 goes on.\n  resume exactly here: `dfo logs`\n"
    )
