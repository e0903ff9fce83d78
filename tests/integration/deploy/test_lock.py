"""The lock: two deploys at once, holders that die, and people who take it by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.deploy import lock, release
from orchestrator.errors import LockError
from orchestrator.remote.wire import source_of

from .bench import REMOTE_DIES, Bench, before


@contextmanager
def slow_deploy(bench: Bench, *, seconds: float = 4.0) -> Iterator[subprocess.Popen[str]]:
    """A deploy that is in the middle of its transaction while the block runs."""
    argv = bench.dfo("deploy", program="apply", trick=before("check_hashes", f"time.sleep({seconds})"))
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 20
        while not (bench.root / "lock").exists():
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.02)
        yield process


def test_two_deploys_at_once(bench: Bench) -> None:
    with slow_deploy(bench) as first:
        started = time.monotonic()
        done = subprocess.run(bench.dfo("deploy"), capture_output=True, text=True, timeout=60)
        assert done.returncode == 6
        assert "error: another deploy to `lab` is running" in done.stderr
        assert "`dfo deploy`, started" in done.stderr and "--lock-wait 5m" in done.stderr
        assert first.poll() is None, "the second deploy must not wait"
        assert time.monotonic() - started < 20
        # The lock is no obstacle for looking.
        assert bench.plan().lock_error is not None
        argv = bench.dfo("deploy", "--lock-wait", "30s", "--json")
        waited = json.loads(subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout)
    assert first.returncode == 0 and waited["result"]["changed"] is False
    assert bench.current_content() == bench.content and bench.traces() == []


def test_a_lock_broken_under_a_deploy_stops_it_before_the_switch(bench: Bench) -> None:
    with slow_deploy(bench) as process:
        broken = lock.break_lock(bench.session())
        assert broken.lock.command == "dfo deploy" and broken.lock.alive
        assert bench.deploy().release == bench.current
        error = process.communicate()[1]
    assert process.returncode == 6 and "somebody broke this command's lock" in error
    assert bench.current_content() == bench.content
    assert bench.traces() == []


def test_the_lock_of_a_dead_command_is_taken_over_at_once(deployed: Bench) -> None:
    deployed.broken_deploy("check_hashes", REMOTE_DIES)
    held = lock.show(deployed.session())
    assert held is not None and not held.alive and held.command == "dfo deploy"
    notes: list[str] = []
    plan = deployed.plan()
    release.apply(deployed.session(), plan, on_record=lambda record: notes.append(str(record.fields.get("text", ""))))
    assert any("took over the lock of" in note for note in notes)
    assert any(".partial`, left by a command that died" in note for note in notes)


def test_of_many_that_want_the_lock_of_a_dead_command_one_at_a_time_gets_it(bench: Bench, tmp_path: Path) -> None:
    """Every third holder dies with the lock in hand, so that the others meet a dead holder at the same moment."""
    counter, number = tmp_path / "counter", 9
    counter.write_text("0")
    library = source_of("lock").decode().replace("\n_main(work)", "")
    work = (
        f"with held_lock({str(bench.root)!r}, {{'user': 'u', 'host': 'h', 'command': 'c'}}, 60):\n"
        f"    count = int(open({str(counter)!r}).read())\n"
        "    time.sleep(0.05)\n"
        f"    open({str(counter)!r}, 'w').write(str(count + 1))\n"
        "    if count % 3 == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    everybody = [
        subprocess.Popen([sys.executable, "-I", "-c", library + work], stdout=subprocess.DEVNULL) for _ in range(number)
    ]
    codes = sorted(process.wait(60) for process in everybody)
    assert codes == [-signal.SIGKILL] * 3 + [0] * 6
    assert counter.read_text() == str(number)


def test_a_lock_taken_by_hand_stops_everybody_and_is_not_waited_for(bench: Bench) -> None:
    lock.take(bench.session(), message="measuring", seconds=3600)
    started = time.monotonic()
    with pytest.raises(LockError) as caught:
        bench.deploy(lock_wait=30.0)
    assert time.monotonic() - started < 10
    assert "measuring" in caught.value.why and "dfo lock release lab" in caught.value.fix
    with pytest.raises(LockError):
        lock.take(bench.session(), message="again", seconds=None)
    with pytest.raises(LockError):
        release.prune(bench.session(), keep=1)
    assert lock.release(bench.session()).lock.message == "measuring"
    bench.deploy()
    with pytest.raises(LockError) as caught:
        lock.release(bench.session())
    assert caught.value.kind == "lock_not_held"


def test_a_lock_taken_by_hand_ends_by_itself(bench: Bench) -> None:
    lock.take(bench.session(), message="short", seconds=0.01)
    time.sleep(0.05)
    bench.deploy()
    assert bench.traces() == []


def test_somebody_elses_lock_is_broken_never_released(bench: Bench) -> None:
    lock.take(bench.session(), message="mine", seconds=None)
    owner = bench.root / "lock/owner.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "user": "anna", "host": "mbp"}))
    with pytest.raises(LockError) as caught:
        lock.release(bench.session())
    assert caught.value.kind == "lock_held" and "anna@mbp" in caught.value.why
    assert lock.break_lock(bench.session()).lock.holder == "anna@mbp"
    assert lock.show(bench.session()) is None


@pytest.mark.parametrize(
    ("fields", "beat_age", "alive"),
    [
        ({"namespace": "another boot pid:[1]"}, 10, True),
        ({"namespace": "another boot pid:[1]"}, 120, False),
        ({"process": {"pid": 1, "start_ticks": 1, "boot_id": "x"}}, 1, False),
        ({"namespace": None}, 1, True),
    ],
)
def test_who_counts_as_alive(bench: Bench, fields: dict[str, object], beat_age: float, alive: bool) -> None:
    """Pids decide where they mean something; on another boot or in another container, the heartbeat does."""
    lock.take(bench.session(), message="", seconds=None)
    owner = bench.root / "lock/owner.json"
    here = {**json.loads(owner.read_text()), "manual": False, "command": "dfo deploy", **fields}
    owner.write_text(json.dumps(here))
    then = time.time() - beat_age
    os.utime(bench.root / "lock/beat", (then, then))
    held = lock.show(bench.session())
    assert held is not None and held.alive is alive


def test_a_lock_folder_without_an_owner_is_held_only_while_fresh(bench: Bench) -> None:
    (bench.root / "lock").mkdir(parents=True)
    held = lock.show(bench.session())
    assert held is not None and held.alive
    os.utime(bench.root / "lock", (1, 1))
    bench.deploy()
    assert bench.traces() == []
