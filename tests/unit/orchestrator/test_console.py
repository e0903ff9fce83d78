"""What goes to stdout and what to stderr, under each policy."""

from __future__ import annotations

import io
import json

import pytest

from orchestrator.console import Console
from orchestrator.errors import Interrupted, LockError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(*, terminal: bool = False, **policy: object) -> Console:
    stream = Terminal if terminal else io.StringIO
    return Console(command="deploy", out=stream(), err=stream(), **policy)  # type: ignore[arg-type]


def written(console: Console) -> tuple[str, str]:
    assert isinstance(console.out, io.StringIO)
    assert isinstance(console.err, io.StringIO)
    return console.out.getvalue(), console.err.getvalue()


def everything(console: Console) -> None:
    console.say("for people")
    console.warn("careful")
    console.debug("detail")
    console.data("the answer")
    console.table(("A", "B"), [("1", "two"), ("three", "")])
    with console.step("send") as step:
        step.detail = "4 files"
    console.result(files=4)


ERROR = LockError("lock_held", "held", why="anna\nsince noon", fix="`dfo lock break`", pid=7)


def test_data_on_stdout_the_rest_on_stderr() -> None:
    shown = console()
    everything(shown)
    out, err = written(shown)
    assert out == "the answer\nA      B\n1      two\nthree\n"
    assert err.splitlines()[:2] == ["for people", "warning: careful"]
    assert err.splitlines()[2].split() == ["send", "4", "files", "0.0", "s"]


def test_json_is_one_object_and_nothing_else_on_stdout() -> None:
    shown = console(json=True)
    everything(shown)
    out, err = written(shown)
    assert json.loads(out) == {
        "schema": "dfo/1",
        "command": "deploy",
        "ok": True,
        "exit_code": 0,
        "result": {"files": 4},
    }
    assert out.count("\n") == 1
    assert err == "warning: careful\n"


def test_an_error_as_json() -> None:
    shown = console(json=True)
    shown.error(ERROR)
    out, err = written(shown)
    assert json.loads(out) == {
        "schema": "dfo/1",
        "command": "deploy",
        "ok": False,
        "exit_code": 6,
        "error": {
            "kind": "lock_held",
            "what": "held",
            "why": "anna\nsince noon",
            "fix": "`dfo lock break`",
            "pid": 7,
        },
    }
    assert err == ""


def test_a_stream_of_events_ends_with_the_result() -> None:
    shown = console(json=True)
    shown.event(event="log", text="step 1")
    shown.result()
    first, last = (json.loads(line) for line in written(shown)[0].splitlines())
    assert first == {"schema": "dfo/1", "command": "deploy", "event": "log", "text": "step 1"}
    assert last["ok"] is True


def test_an_interruption_raises_no_alarm() -> None:
    shown = console()
    shown.error(Interrupted("interrupted", "stopped watching", why="Ctrl-C", fix="run 57 goes on"))
    assert written(shown) == ("", "\nStopped watching.\n  run 57 goes on\n")


def test_quiet_leaves_the_answer_and_errors() -> None:
    shown = console(quiet=True)
    everything(shown)
    shown.error(ERROR)
    out, err = written(shown)
    assert out.startswith("the answer\n")
    assert err == "error: held\n  why: anna\n       since noon\n  fix: `dfo lock break`\n"


@pytest.mark.parametrize(("verbose", "seen"), [(0, ""), (1, "one\n"), (2, "one\ntwo\n")])
def test_verbose_has_two_levels(verbose: int, seen: str) -> None:
    shown = console(verbose=verbose)
    shown.debug("one")
    shown.debug("two", level=2)
    assert written(shown)[1] == seen


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for terminal, no_color, coloured in ((True, None, True), (True, "1", False), (False, None, False)):
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        shown = console(terminal=terminal)
        shown.error(ERROR)
        assert ("\033[" in written(shown)[1]) is coloured
        monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize("policy", [{"progress": False}, {"quiet": True}, {"json": True}, {"verbose": 1}])
def test_no_moving_lines_unless_wanted(policy: dict[str, object]) -> None:
    assert console(terminal=True).live
    assert not console(terminal=True, **policy).live
    assert not console().live


def test_a_failed_step_closes_its_line() -> None:
    shown = console(terminal=True)
    with pytest.raises(RuntimeError), shown.step("send"):
        raise RuntimeError
    assert written(shown)[1].split("\r")[-1] == "  send      failed\033[K\n"
