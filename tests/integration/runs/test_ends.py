"""Runs that end badly: each end gets its own reason, and nothing of the run is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.errors import PreflightError
from orchestrator.remote.wire import source_of
from orchestrator.runs.run import EndReason, RunState

from .conftest import until

if TYPE_CHECKING:
    from .conftest import Bench


def test_the_stage_is_killed_from_outside(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 60"])
    bench.start()
    bench.await_log(1, "ready")
    os.kill(bench.stage_pid(1), signal.SIGKILL)
    status = bench.wait(1, 5)
    assert (status.reason, status.signal, status.exit_code) == (EndReason.SIGNAL, 9, 137)
    assert status.sentence("lab").startswith("run 1 ended: train was killed by SIGKILL")
    assert status.exit_like_run == 137


def test_the_stage_crashes(bench: Bench) -> None:
    bench.configure(train=[f"die {signal.SIGSEGV.value}"])
    status = bench.run()
    assert (status.reason, status.signal, status.exit_code) == (EndReason.SIGNAL, 11, 139)


def test_the_script_itself_is_killed(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 60"])
    bench.start()
    bench.await_log(1, "ready")
    script = next(pid for pid in bench.pids(1) if Path(f"/proc/{pid}/comm").read_text() == "bash\n")
    os.kill(script, signal.SIGKILL)
    status = bench.wait(1, 10)
    assert (status.state, status.reason, status.signal) == (RunState.FAILED, EndReason.SIGNAL, 9)
    assert bench.gone(1), "the stage lost its parent but not its supervisor"


def test_the_supervisor_is_killed(bench: Bench) -> None:
    bench.configure(train=["polite 143", "print ready", "sleep 60"], export=[])
    bench.start()
    bench.await_log(1, "ready")
    os.kill(bench.state(1)["supervisor"]["pid"], signal.SIGKILL)
    last_word = bench.state(1)
    status = bench.wait(1, 5)
    assert (status.state, status.reason, status.stage) == (RunState.FAILED, EndReason.SUPERVISOR_DIED, "train")
    assert status.ended is not None
    assert bench.state(1) == last_word, "nobody but the supervisor writes its file"
    until(lambda: not bench.pids(1), 5)
    assert bench.begun(1) == ["train"], "without a supervisor no further stage begins"


def test_what_outlives_its_supervisor_is_named_and_blocks_its_devices(bench: Bench) -> None:
    bench.configure(train=["stubborn", "print ready", "sleep 60"])
    bench.start()
    bench.await_log(1, "ready")
    stage = bench.stage_pid(1)
    os.kill(bench.state(1)["supervisor"]["pid"], signal.SIGKILL)
    status = bench.wait(1, 5)
    assert status.reason is EndReason.SUPERVISOR_DIED and stage in status.leftovers and status.alive
    with pytest.raises(PreflightError, match="processes of run 1 are still there") as refused:
        bench.start()
    assert refused.value.kind == "device_in_use" and stage in refused.value.details["pids"]
    stopped = bench.stop(1, grace=0.5)
    assert not stopped.already and stopped.status.leftovers == () and bench.gone(1)
    bench.configure(train=[])
    assert bench.run().state is RunState.SUCCEEDED


def test_sigterm_to_the_supervisor_is_not_a_user(bench: Bench) -> None:
    bench.configure(train=["polite 143", "print ready", "sleep 60"])
    bench.start()
    bench.await_log(1, "ready")
    os.kill(bench.state(1)["supervisor"]["pid"], signal.SIGTERM)
    status = bench.wait(1, 5)
    assert (status.state, status.reason, status.exit_code) == (RunState.STOPPED, EndReason.TERMINATED, 143)


def test_max_runtime(bench: Bench) -> None:
    bench.launch["max_runtime"] = "1s"
    bench.configure(train=["polite 143", "sleep 60"], export=[])
    status = bench.run()
    error = status.as_error("lab")
    assert (status.state, status.reason) == (RunState.STOPPED, EndReason.DEADLINE)
    assert error is not None and error.exit_code == 124 and "after 1 s" in error.why
    assert bench.begun(1) == ["train"]


def test_the_deadline_of_the_warmup(bench: Bench) -> None:
    bench.launch["warmup"] = {"timeout": "1s"}
    bench.launch["stop"] = {"grace": "1s"}
    bench.configure(warmup=["stubborn", "sleep 60"], train=[])
    status = bench.run(warmup=True)
    error = status.as_error("lab")
    assert (status.state, status.reason) == (RunState.FAILED, EndReason.WARMUP_DEADLINE)
    assert status.signal in {signal.SIGKILL, signal.SIGTERM}, "TERM suffices before it has become stubborn"
    assert error is not None and error.exit_code == 10 and "its deadline of 1 s" in error.why
    assert bench.begun(1) == ["warmup"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_the_disk_fills_up(bench: Bench, small_disk: Path) -> None:
    bench.root = small_disk / "target"
    bench.deploy()
    bench.configure(train=["print before", "chatter 20", "print never"], export=[])
    status = bench.run()
    assert (status.state, status.reason, status.stage) == (RunState.FAILED, EndReason.DISK_FULL, "train")
    assert status.details is not None and status.details["disk_free"] < 1 << 20
    log = bench.log(1, "train")
    assert "\nbefore\n" in log and "never" not in log and len(log) > 1 << 20
    assert bench.begun(1) == ["train"] and bench.gone(1)
    error = status.as_error("lab")
    assert error is not None and "disk full" in error.what


def test_a_full_disk_at_the_start(bench: Bench, small_disk: Path) -> None:
    bench.root = small_disk / "target"
    bench.deploy()
    bench.configure(train=[])
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(PreflightError) as full:
        bench.start()
    assert full.value.kind == "disk_full"
    (small_disk / "filler").unlink()
    assert bench.numbers() == []
    assert bench.run().state is RunState.SUCCEEDED
    assert [entry.name for entry in (bench.root / "runs").iterdir()] == ["1"], "no staging is left behind"


def _memory_group() -> Path | None:
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base) / f"dfo-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(60 << 20))
            return group
        except OSError:
            if group.is_dir():
                group.rmdir()
    return None


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup of 60 MB."""
    group = _memory_group()
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_out_of_memory(bench: Bench, memory_group: Path) -> None:
    bench.configure(train=[])
    bench.run()
    folder = bench.folder(1)
    spec = bench.spec(1)
    shutil.rmtree(folder)
    (folder / "logs").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(spec))
    (folder / "supervisor.py").write_bytes(source_of("supervisor"))
    hog = "x = [bytearray(b'1') * (1 << 20) for _ in range(500)]"
    (folder / "launch.sh").write_text(
        f'echo \'{{"stage":"train","event":"begin","t":1}}\' >>stages.jsonl\n{sys.executable} -c "{hog}"\nexit $?\n'
    )
    script = f'echo $$ >{memory_group}/cgroup.procs && exec {sys.executable} -I "$0/supervisor.py" "$0"'
    subprocess.run(["sh", "-c", script, str(folder)], check=True, timeout=60, env={"DFO_RUN_ID": spec["marker"]})
    status = bench.status(1)
    assert (status.state, status.reason, status.signal) == (RunState.FAILED, EndReason.OUT_OF_MEMORY, 9)
    assert "out-of-memory kills rose by 1" in status.sentence("lab")


def test_the_container_restarts(bench: Bench) -> None:
    """A pid namespace stands for the container: its first process dies, and with it everything inside."""
    can = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    if can.returncode:
        pytest.skip(f"no pid namespace here: {can.stderr.decode().strip()}")
    bench.configure(train=["print ready", "sleep 60"])
    bench.start()
    bench.await_log(1, "ready")
    bench.stop(1, grace=0)
    folder = bench.folder(1)
    for name in ("state.json", "stages.jsonl", "stop", "logs/train.log"):
        (folder / name).unlink()
    inside = f'{sys.executable} -I "$0/supervisor.py" "$0" --detach; exec sleep 60'
    boot = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", inside, str(folder)],
        env={"PATH": os.environ["PATH"], "DFO_RUN_ID": bench.spec(1)["marker"]},
    )
    bench.await_log(1, "ready")
    time.sleep(0.5)
    assert bench.state(1)["state"] == "running" and bench.state(1)["init"]["pid"] == 1
    boot.kill()
    boot.wait()
    until(lambda: not bench.pids(1), 5)
    status = bench.status(1)
    assert (status.state, status.reason, status.stage) == (RunState.FAILED, EndReason.CONTAINER_RESTARTED, "train")
    assert "`lab` was restarted" in status.sentence("lab")


def test_a_folder_that_no_supervisor_ever_touched(bench: Bench) -> None:
    bench.configure(train=[])
    bench.run()
    (bench.folder(1) / "state.json").unlink()
    assert bench.status(1).state is RunState.QUEUED
    os.utime(bench.folder(1), (0, 0))
    status = bench.status(1)
    assert (status.state, status.reason) == (RunState.FAILED, EndReason.NEVER_STARTED)


def test_without_bash_the_run_says_so(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    bench.configure(train=[])
    status = bench.run()
    assert (status.state, status.exit_code, status.stage) == (RunState.FAILED, 127, None)
    assert "cannot start bash" in status.sentence("lab")
