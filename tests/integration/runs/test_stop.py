"""`dfo stop`: it asks, waits, kills, and leaves nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from orchestrator.errors import UsageError
from orchestrator.runs.run import EndReason, RunState

from .conftest import until

if TYPE_CHECKING:
    from .conftest import Bench


def test_a_polite_stage_writes_its_checkpoint(bench: Bench) -> None:
    bench.configure(train=["polite 143", "print ready", "sleep 60"], export=[])
    bench.start()
    bench.await_log(1, "ready")
    begun = time.monotonic()
    stopped = bench.stop(1)
    took = time.monotonic() - begun
    status = stopped.status
    assert (status.state, status.reason, status.exit_code) == (RunState.STOPPED, EndReason.STOPPED_BY_USER, 143)
    assert not stopped.already and len(stopped.ended) >= 3 and bench.pids(1) == []
    assert bench.begun(1) == ["train"] and took < 5
    error = status.as_error("lab")
    assert error is not None and error.kind == "run_stopped" and "asked for it in stage train" in error.why


def test_a_stubborn_stage_with_a_daemon_is_killed_after_the_grace(bench: Bench) -> None:
    bench.configure(train=["stubborn", "daemon 600", "print ready", "sleep 600"])
    bench.start()
    bench.await_log(1, "ready")
    begun = time.monotonic()
    stopped = bench.stop(1, grace=1.5)
    took = time.monotonic() - begun
    assert (stopped.status.reason, stopped.status.signal) == (EndReason.STOPPED_BY_USER, 9)
    assert 1.5 <= took < 6
    assert bench.pids(1) == [] and len(stopped.ended) >= 4, "supervisor, script, stage, daemon"


def test_now_does_not_wait(bench: Bench) -> None:
    bench.configure(train=["stubborn", "print ready", "sleep 600"])
    bench.start()
    bench.await_log(1, "ready")
    begun = time.monotonic()
    stopped = bench.stop(1, grace=0)
    assert time.monotonic() - begun < 4
    assert stopped.status.signal == 9 and bench.pids(1) == []


def test_a_second_stop_can_shorten_the_first(bench: Bench) -> None:
    bench.configure(train=["stubborn", "print ready", "sleep 600"])
    bench.start()
    bench.await_log(1, "ready")
    patient = bench.dfo("stop", "1", "--grace", "10m")
    until(lambda: (bench.folder(1) / "stop").exists())
    hasty = bench.dfo("stop", "1", "--now", "--json")
    out, _ = hasty.communicate(timeout=20)
    assert json.loads(out)["result"]["reason"] == "stopped_by_user"
    patient.communicate(timeout=20)
    assert patient.returncode == 0 and bench.pids(1) == []


def test_stopping_what_has_ended_changes_nothing(bench: Bench) -> None:
    bench.configure(train=[])
    bench.run()
    before = (bench.folder(1) / "state.json").read_bytes()
    stopped = bench.stop(1)
    assert stopped.already and stopped.status.state is RunState.SUCCEEDED
    assert (bench.folder(1) / "state.json").read_bytes() == before
    done = bench.dfo("stop", "1")
    _, err = done.communicate(timeout=20)
    assert done.returncode == 0 and "run 1 had ended already" in err


def test_stopping_a_run_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(UsageError) as nothing:
        bench.stop()
    assert nothing.value.kind == "unknown_run" and nothing.value.what == "nothing was launched yet"


def test_a_supervisor_that_hangs_is_killed_too(bench: Bench) -> None:
    bench.configure(train=["stubborn", "print ready", "sleep 600"])
    bench.start()
    bench.await_log(1, "ready")
    os.kill(bench.state(1)["supervisor"]["pid"], signal.SIGSTOP)
    stopped = bench.stop(1, grace=0)
    assert stopped.status.reason is EndReason.SUPERVISOR_DIED and bench.pids(1) == []


def test_stopping_at_any_moment_leaves_nothing(bench: Bench) -> None:
    bench.configure(preflight=[], train=["polite 143", "sleep 2"], evaluate=[], export=[])
    moments = random.Random(7)
    for run in range(1, 9):
        bench.start()
        time.sleep(moments.uniform(0.0, 1.2))
        status = bench.stop(run).status
        assert status.state in {RunState.STOPPED, RunState.SUCCEEDED}, status
        assert bench.pids(run) == []
        ends = [json.loads(line) for line in (bench.folder(run) / "stages.jsonl").read_text().splitlines()]
        assert sum(end["event"] == "begin" for end in ends) == sum(end["event"] == "end" for end in ends)
