"""A run from launch to its end, when nobody interferes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.runs.run import EndReason, RunState

if TYPE_CHECKING:
    from .conftest import Bench

STAGES = ["preflight", "warmup", "train", "evaluate", "export"]


def test_all_stages_run_in_order_in_the_release(bench: Bench) -> None:
    bench.configure(preflight=[], warmup=[], train=["events 3"], evaluate=[], export=[])
    status = bench.run(warmup=True)
    assert (status.state, status.reason, status.exit_code) == (RunState.SUCCEEDED, EndReason.FINISHED, 0)
    assert bench.begun(1) == STAGES
    for stage in STAGES:
        assert bench.log(1, stage) == f"{stage} of 20261130-1612-9f3c1a in 20261130-1612-9f3c1a\n"
    assert status.step is not None and status.step["step"] == 3
    assert status.exit_like_run == 0 and status.as_error("lab") is None
    assert bench.gone(1)


def test_without_warmup_first_there_is_no_warmup(bench: Bench) -> None:
    bench.configure(preflight=[], train=[])
    assert bench.run().state is RunState.SUCCEEDED
    assert bench.begun(1) == ["preflight", "train"]


def test_a_release_stays_as_it_was_verified(bench: Bench) -> None:
    def listing() -> list[str]:
        return sorted(str(path) for path in (bench.root / "releases").rglob("*"))

    before = listing()
    bench.configure(train=[])
    bench.run()
    assert listing() == before
    assert list((bench.root / "shared" / "cache" / "pycache").rglob("*.pyc"))


def test_the_first_failing_stage_ends_the_run_with_its_code(bench: Bench) -> None:
    bench.configure(train=["print about to fail", "exit 3"], evaluate=[])
    status = bench.run()
    assert (status.state, status.reason, status.exit_code) == (RunState.FAILED, EndReason.EXIT_CODE, 3)
    assert (status.stage, status.signal) == ("train", None)
    assert bench.begun(1) == ["train"]
    error = status.as_error("lab")
    assert error is not None
    assert (error.exit_code, error.kind, status.exit_like_run) == (8, "run_failed", 3)
    assert error.what == "run 1 ended: train failed"
    assert error.why == "exit code 3: about to fail"
    assert "dfo logs 1 --stage train" in error.fix


@pytest.mark.parametrize(
    ("stages", "reason", "exit_code"),
    [
        ({"preflight": ["exit 5"], "train": []}, EndReason.PREFLIGHT_FAILED, 5),
        ({"warmup": ["exit 1"], "train": []}, EndReason.WARMUP_FAILED, 10),
        ({"train": ["exit 10"]}, EndReason.WARMUP_FAILED, 10),
    ],
)
def test_training_that_was_not_started_says_so(
    bench: Bench, stages: dict[str, list[str]], reason: EndReason, exit_code: int
) -> None:
    bench.configure(**stages)
    status = bench.run(warmup=True)
    error = status.as_error("lab")
    assert error is not None and "training was not started" in error.what
    assert (status.state, status.reason, error.exit_code) == (RunState.FAILED, reason, exit_code)


def test_a_warmup_that_is_not_required_may_fail(bench: Bench) -> None:
    bench.launch["warmup"] = {"require": False}
    bench.configure(warmup=["exit 1"], train=[])
    assert bench.run(warmup=True).state is RunState.SUCCEEDED
    assert bench.begun(1) == ["warmup", "train"]
    assert "warm-up failed with 1; going on" in bench.log(1, "launch")


def test_the_environment_reaches_the_stages_and_secrets_touch_no_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    nasty = 'it\'s $(id) "`x`"\n%s \\ !'
    monkeypatch.setenv("LAPTOP_TOKEN", "s3cr3t-value")
    bench.env = {"GREETING": nasty, "TOKEN": {"env": "LAPTOP_TOKEN"}, "TRITON_CACHE_DIR": "/elsewhere"}
    names = ["GREETING", "TRITON_CACHE_DIR", "DFLASH_CACHE_DIR", "LAPTOP_TOKEN"]
    # The stage proves that it has the secret without printing it.
    bench.configure(train=[f"environ {name}" for name in names], export=["environ TOKEN"])
    bench.run()
    log = bench.log(1, "train")
    assert f"GREETING={nasty}\n" in log
    assert "TRITON_CACHE_DIR=/elsewhere\n" in log
    assert f"DFLASH_CACHE_DIR={bench.root}/shared/cache\n" in log
    assert "LAPTOP_TOKEN=None\n" in log, "the laptop's own variables stay on the laptop"
    assert bench.log(1, "export").endswith("TOKEN=s3cr3t-value\n")
    (bench.folder(1) / "logs" / "export.log").unlink()
    holders = [path for path in bench.root.rglob("*") if path.is_file() and b"s3cr3t-value" in path.read_bytes()]
    assert holders == []


def test_a_secret_that_did_not_arrive_fails_before_the_first_stage(bench: Bench) -> None:
    """launch.sh run by hand, without the supervisor's environment."""
    bench.env = {"TOKEN": {"command": ["echo", "x"]}}
    bench.configure(train=[])
    bench.run()
    done = subprocess.run(
        ["bash", str(bench.folder(1) / "launch.sh")], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (5, "the secret TOKEN did not arrive with the environment\n")


def test_a_run_of_nothing_still_ends_properly(bench: Bench) -> None:
    """The script is over before the supervisor looks for the first time."""
    bench.configure(train=[])
    (bench.project / "templates").mkdir()
    (bench.project / "templates" / "launch.sh.j2").write_text("exit 0\n")
    status = bench.run()
    assert (status.state, status.reason, status.stage) == (RunState.SUCCEEDED, EndReason.FINISHED, None)


def test_the_log_index_maps_moments_to_sizes(bench: Bench) -> None:
    bench.configure(train=["print one", "sleep 1.5", "print two", "sleep 1.5", "print three"])
    bench.run()
    lines = [json.loads(line) for line in (bench.folder(1) / "logs" / "index.jsonl").read_text().splitlines()]
    sizes = [line["sizes"].get("train", 0) for line in lines]
    assert sizes == sorted(sizes) and len(set(sizes)) >= 3
    assert sizes[-1] == len(bench.log(1, "train"))
    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)


def test_state_has_a_heartbeat(bench: Bench) -> None:
    bench.configure(train=["sleep 5"])
    bench.start()
    first = bench.state(1)["updated"]
    time.sleep(4)
    assert first < bench.state(1)["updated"] <= time.time()


def test_the_supervisor_is_a_process_of_its_own(bench: Bench) -> None:
    bench.configure(train=["sleep 20"])
    bench.start()
    pid = bench.state(1)["supervisor"]["pid"]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent, group, session = (int(field) for field in fields[1:4])
    assert parent != os.getpid() and session != os.getsid(0) and group != os.getpgid(0)
    opened = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert opened == {"/dev/null", str(bench.folder(1) / "logs" / "launch.log")}, "no stream of the caller is left"


def test_run_files_are_what_was_sent(bench: Bench) -> None:
    bench.configure(train=[])
    bench.run()
    spec = bench.spec(1)
    assert spec["run"] == 1 and spec["release"] == "20261130-1612-9f3c1a" and spec["devices"] == ["cpu"]
    for name, sha in spec["files"].items():
        assert hashlib.sha256((bench.folder(1) / name).read_bytes()).hexdigest() == sha
    audit = [json.loads(line) for line in (bench.root / "audit.jsonl").read_text().splitlines()]
    assert [(line["event"], line["run"]) for line in audit] == [("launch", 1)]


def test_a_grandchild_that_holds_the_output_open_delays_nothing(bench: Bench) -> None:
    bench.configure(train=["daemon 60"])
    begun = time.monotonic()
    status = bench.run()
    assert status.state is RunState.SUCCEEDED
    # It ignores TERM, so it is given its grace and then killed.
    assert time.monotonic() - begun < 15
    assert bench.gone(1)


def test_status_of_the_foreground_is_the_same(bench: Bench) -> None:
    """As a systemd unit would run it: no --detach, and SIGTERM from outside."""
    bench.configure(train=["polite 143", "print ready", "sleep 60"])
    bench.start()
    bench.await_log(1, "ready")
    folder = bench.folder(1)
    bench.stop(1)
    for name in ("state.json", "stages.jsonl", "stop"):
        (folder / name).unlink(missing_ok=True)
    (folder / "logs" / "train.log").unlink()
    foreground = subprocess.Popen(
        [sys.executable, "-I", str(folder / "supervisor.py"), str(folder)],
        env={"PATH": os.environ["PATH"], "DFO_RUN_ID": bench.spec(1)["marker"]},
    )
    bench.await_log(1, "ready")
    foreground.send_signal(signal.SIGTERM)
    assert foreground.wait(10) == 0
    status = bench.status(1)
    assert (status.state, status.reason, status.exit_code) == (RunState.STOPPED, EndReason.TERMINATED, 143)
