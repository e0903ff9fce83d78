from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from orchestrator.errors import KINDS, UsageError
from orchestrator.remote.wire import source_of
from orchestrator.runs.choice import RunChoice, parse_run
from orchestrator.runs.run import (
    OUTCOMES,
    EndReason,
    Outcome,
    Retry,
    RunState,
    RunStatus,
    duration,
)
from orchestrator.runs.status import OVERVIEW, TargetStatus, overview
from orchestrator.runs.status import details as lines_about


def described(**changes: Any) -> dict[str, Any]:
    """What the target says about a run, as `describe_run` does."""
    return {
        "run": 57,
        "state": "running",
        "reason": None,
        "stage": "train",
        "exit_code": None,
        "signal": None,
        "release": "20261130-1612-9f3c1a",
        "devices": ["cuda:0"],
        "now": 1000.0,
        "unit": "dfo-57-5bd1e995.service",
        "started": 100.0,
        "ended": None,
        "updated": 990.0,
        "resume_from": None,
        "leftovers": [],
        "last_line": "step 140 loss 2.1",
        "step": None,
        "error": None,
        "details": {"max_runtime": None, "warmup_timeout": 1200.0},
    } | changes


def remote_names(program: str) -> dict[str, Any]:
    """The constants and functions of a remote program, without running it."""
    source = source_of(program).decode()
    names: dict[str, Any] = {"__name__": "looked at"}
    exec(compile(re.sub(r"^_main\(work\)$", "", source, flags=re.MULTILINE), program, "exec"), names)
    return names


def test_every_reason_says_everything() -> None:
    assert set(OUTCOMES) == set(EndReason)
    for reason, outcome in OUTCOMES.items():
        assert isinstance(outcome, Outcome) and isinstance(outcome.retry, Retry)
        assert all(getattr(outcome, name) for name in ("what", "why", "fix")), reason


def test_every_state_is_where_some_reason_leads_or_before_it() -> None:
    ends = {outcome.state for outcome in OUTCOMES.values()}
    assert ends == {RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED, RunState.LOST}
    assert {state for state in RunState if state.ended} == ends - {RunState.LOST}


@pytest.mark.parametrize("reason", EndReason)
def test_kind_and_exit_code_agree_with_the_errors(reason: EndReason) -> None:
    outcome = OUTCOMES[reason]
    assert (outcome.kind is None) == (outcome.state is RunState.SUCCEEDED) == (outcome.exit_code == 0)
    if outcome.kind is not None:
        assert KINDS[outcome.kind].exit_code == outcome.exit_code


@pytest.mark.parametrize("reason", EndReason)
def test_the_texts_of_every_reason_can_be_filled_in(reason: EndReason) -> None:
    outcome = OUTCOMES[reason]
    for details in ({}, {"max_runtime": 3600.0, "warmup_timeout": 60.0, "oom_kills": 2, "stopped_by": "anna@mbp"}):
        status = RunStatus.from_dict(
            described(state=str(outcome.state), reason=str(reason), exit_code=137, signal=9, details=details)
        )
        error = status.as_error("lab")
        assert (error is None) == (reason is EndReason.FINISHED)
        if error is not None:
            lines = (error.what, error.why, error.fix)
            assert all("\n" not in line and "{" not in line and "None" not in line for line in lines), lines
            assert error.what.startswith("run 57 ") and "`" in error.fix
            assert error.details["reason"] == str(reason)
        assert status.sentence("lab").startswith("run 57")


def test_the_supervisor_knows_the_same_reasons_and_states() -> None:
    known = remote_names("supervisor")["STATE_OF_REASON"]
    assert known == {str(reason): str(OUTCOMES[EndReason(reason)].state) for reason in known}
    # The others are what is said about a run whose supervisor cannot speak for it.
    assert set(EndReason) - set(known) == {
        EndReason.NEVER_STARTED,
        EndReason.SUPERVISOR_DIED,
        EndReason.CONTAINER_STOPPED,
        EndReason.CONTAINER_RESTARTED,
        EndReason.NODE_REBOOTED,
        EndReason.UNREACHABLE,
    }
    states = set(remote_names("supervisor")["STATE_OF_STAGE"].values())
    assert states <= set(RunState) and set(remote_names("status")["TERMINAL"]) == {s for s in RunState if s.ended}


def test_what_a_run_says_while_it_goes_on() -> None:
    status = RunStatus.from_dict(described())
    assert (status.alive, status.as_error("lab"), status.exit_like_run) == (True, None, 0)
    assert status.sentence("lab") == "run 57 is running (train)"


def test_an_error_event_explains_better_than_the_last_line() -> None:
    bad = {"state": "failed", "reason": "exit_code", "exit_code": 8, "last_line": "Traceback"}
    status = RunStatus.from_dict(described(**bad, error={"what": "loss is not finite at step 12"}))
    error = status.as_error("lab")
    assert error is not None and error.why == "exit code 8: loss is not finite at step 12"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"state": "succeeded", "reason": "finished", "exit_code": 0}, 0),
        ({"state": "failed", "reason": "exit_code", "exit_code": 3}, 3),
        ({"state": "failed", "reason": "signal", "exit_code": 139, "signal": 11}, 139),
        ({"state": "failed", "reason": "warmup_failed", "exit_code": 10}, 10),
        ({"state": "stopped", "reason": "stopped_by_user", "exit_code": 143}, 143),
        ({"state": "failed", "reason": "supervisor_died"}, 8),
        ({"state": "failed", "reason": "container_restarted"}, 8),
        ({"state": "lost", "reason": "unreachable"}, 8),
        ({}, 0),
    ],
)
def test_exit_like_run(changes: dict[str, Any], code: int) -> None:
    assert RunStatus.from_dict(described(**changes)).exit_like_run == code


def test_a_supervisor_that_died_says_what_systemd_saw() -> None:
    dead = {"state": "failed", "reason": "supervisor_died"}
    alone = RunStatus.from_dict(described(**dead, details={"supervisor_signal": None})).sentence("lab")
    assert ": the process is gone and left no final state; " in alone
    seen = RunStatus.from_dict(described(**dead, details={"supervisor_signal": 9})).sentence("lab")
    assert ": SIGKILL ended it, says systemd; it is gone and left no final state; " in seen


def table_of(*runs: dict[str, Any]) -> list[dict[str, str]]:
    found = TargetStatus(release=None, runs=tuple(RunStatus.from_dict(run) for run in runs), gpus=[])
    return [dict(zip(OVERVIEW, line, strict=True)) for line in overview(found, "lab")]


def test_the_overview_has_what_is_alive_else_the_newest() -> None:
    step = {"step": 3, "tokens_per_s": 41200.0, "queue_wait_s": 0.02, "device_idle": {"cuda:0": 0.1, "cuda:1": 0.3}}
    ended = described(run=58, state="succeeded", reason="finished", ended=900.0, step=step)
    (line,) = table_of(described(step=step), ended)
    assert (line["RUN"], line["RATE"], line["WAIT"], line["IDLE"]) == ("57", "41.2k tok/s", "0.02 s", "20%")
    (line,) = table_of(ended)
    assert (line["RUN"], line["STATE"], line["RATE"]) == ("58", "succeeded", "-")
    assert table_of()[0]["LAST LINE"] == "nothing was launched yet"
    assert overview(None, "lab")[0][-1] == "…"


def test_words_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="vanished"):
        RunStatus.from_dict(described(state="vanished"))
    assert {field.name for field in fields(RunStatus)} - set(described()) == set()


@pytest.mark.parametrize(
    ("words", "target", "choice"),
    [
        ([], None, RunChoice(None, None)),
        (["57"], None, RunChoice(57, None)),
        (["lab"], None, RunChoice(None, "lab")),
        (["57", "lab"], None, RunChoice(57, "lab")),
        (["lab", "57"], None, RunChoice(57, "lab")),
        (["57"], "lab", RunChoice(57, "lab")),
        (["lab"], "lab", RunChoice(None, "lab")),
        (["a100"], None, RunChoice(None, "a100")),
        (["٣"], None, RunChoice(None, "٣")),
    ],
)
def test_run_or_target(words: list[str], target: str | None, choice: RunChoice) -> None:
    assert parse_run(words, target=target) == choice


@pytest.mark.parametrize(("words", "target"), [(["57", "58"], None), (["lab", "other"], None), (["lab"], "other")])
def test_two_of_a_kind_are_one_too_many(words: list[str], target: str | None) -> None:
    with pytest.raises(UsageError, match="more than one") as wrong:
        parse_run(words, target=target)
    assert wrong.value.kind == "usage"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (12, "12 s"),
        (59.7, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (11400, "3 h 10 min"),
        (187200, "2 d 4 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def shown(step: dict[str, Any]) -> dict[str, str]:
    """The lines of `dfo status RUN` about a run with this last step, by their names."""
    run = RunStatus.from_dict(described(step={"step": 140, "loss": 2.101, "tokens_per_s": 41200.0} | step))
    lines = lines_about(TargetStatus(release=None, runs=(run,), gpus=[]), run, "lab")
    return {line[:10].strip(): line[10:] for line in lines}


def test_rates_of_both_roles_and_idle_devices_are_shown() -> None:
    rates = {"targets_tokens_per_s": 41250.0, "drafters_tokens_per_s": 950.0, "queue_wait_s": 0.0213}
    lines = shown({**rates, "device_idle": {"cuda:0": 0.034, "cuda:5": 0.5}, "compiles": 0})
    assert lines["step"] == "step 140  loss 2.101  41.2k tok/s"
    assert lines["rates"] == "targets 41.2k tok/s, drafters 950 tok/s, queue wait 0.021 s, idle cuda:0 3%, cuda:5 50%"
    assert "compiles" not in lines
    assert shown({"compiles": 2})["compiles"] == "2 after the warm-up: some shape was not warmed up"


def test_rates_of_the_wrong_kind_are_left_out() -> None:
    lines = shown({"targets_tokens_per_s": "much", "queue_wait_s": None, "device_idle": [1], "compiles": "x"})
    assert "rates" not in lines and "compiles" not in lines
    assert shown({"device_idle": {"cuda:0": "all"}, "queue_wait_s": 1.0})["rates"] == "queue wait 1 s"
