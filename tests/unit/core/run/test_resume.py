"""A resumed run ends with the very bytes of one that was never interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.errors import CheckpointError
from dflash_core.events import EventLog, read_events
from dflash_core.trainer import train
from dflash_core.training_state import latest_checkpoint, list_checkpoints, read_state

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def go(run: Any, quiet: Any, *, resume: bool = False) -> Path:
    with EventLog(run.run_dir / "events.jsonl") as events:
        train(run.config, run.run_dir, events, resume=resume, say=quiet)
    folder = latest_checkpoint(run.run_dir)
    assert folder is not None
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, moments, counters, data position and the served drafter are equal to the last bit."""
    first, second = (load_file(folder / "train_state.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    for name in first:
        if not name.startswith("rng."):
            assert torch.equal(first[name], second[name]), name
    weights = [(folder / "drafter" / "model.safetensors").read_bytes() for folder in (one, other)]
    assert weights[0] == weights[1]
    states = [read_state(folder) for folder in (one, other)]
    for field in ("step", "stream", "progress", "samples_seen", "tokens_seen"):
        assert getattr(states[0], field) == getattr(states[1], field), field


def spawn(run: Any, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dflash_core", "train", "--config", str(run.config_path)]
    return subprocess.Popen(
        [*command, "--run-dir", str(run.run_dir), *options],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("topology", [(1, 1), (2, 3)])
def test_three_and_three_steps_are_six(tiny_run: Any, quiet: Any, topology: tuple[int, int], store: bool) -> None:
    targets, drafters = topology
    tiny_run.change(
        topology={"targets": ["cpu"] * targets, "drafters": ["cpu"] * drafters, "queue_size": 3},
        train={"batches_per_step": 2, "checkpoint_every": 3, "keep_checkpoints": 9},
        data={"feature_store": str(tiny_run.folder / "features") if store else None},
    )
    straight = go(tiny_run.in_dir("straight"), quiet)
    broken = tiny_run.in_dir("broken")
    go(broken, quiet)
    # What a crash at step 5 leaves behind: the checkpoint of step 3 and nothing of what came later.
    shutil.rmtree(broken.run_dir / "checkpoints" / "step-000006")
    (broken.run_dir / "checkpoints" / "latest").write_text("step-000003\n")
    shutil.rmtree(tiny_run.folder / "features", ignore_errors=True)
    assert_same_run(straight, go(broken, quiet, resume=True))


def test_another_number_of_workers_may_go_on(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(train={"batches_per_step": 3, "checkpoint_every": 3, "keep_checkpoints": 9})
    straight = go(tiny_run.in_dir("straight"), quiet)
    other = tiny_run.in_dir("other")
    go(other, quiet)
    shutil.rmtree(other.run_dir / "checkpoints" / "step-000006")
    (other.run_dir / "checkpoints" / "latest").unlink()
    other.change(topology={"targets": ["cpu"] * 2, "drafters": ["cpu"] * 3})
    assert_same_run(straight, go(other, quiet, resume=True))


def test_sigkill_in_the_middle_loses_only_the_steps_since_the_checkpoint(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(
        train={"steps": 400, "checkpoint_every": 7, "keep_checkpoints": 3},
        topology={"targets": ["cpu"] * 2, "drafters": ["cpu"] * 3},
    )
    killed = tiny_run.in_dir("killed")
    process = spawn(killed)
    wait_for(lambda: len(list_checkpoints(killed.run_dir)) >= 2, process)
    process.kill()
    process.communicate()
    reached = latest_checkpoint(killed.run_dir)
    assert reached is not None
    end = read_state(reached).step + 20
    # The schedule of 400 steps stays; the run only ends earlier, so that the test is short.
    for run in (killed, straight := tiny_run.in_dir("straight")):
        run.change(train={"checkpoint_every": end, "keep_checkpoints": 9})
        stop_at(run, end, resume=run is killed)
    assert_same_run(
        straight.run_dir / "checkpoints" / f"step-{end:06d}", killed.run_dir / "checkpoints" / f"step-{end:06d}"
    )
    assert [e["event"] for e in read_events(killed.run_dir / "events.jsonl")].count("resume") == 1


def stop_at(run: Any, step: int, *, resume: bool) -> None:
    """Run until the checkpoint of `step` is there, then SIGKILL."""
    process = spawn(run, *(["--resume"] if resume else []))
    wait_for(lambda: (run.run_dir / "checkpoints" / f"step-{step:06d}").is_dir(), process)
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_checkpoint_of_the_last_step(
    tiny_run: Any, quiet: Any, number: signal.Signals, code: int
) -> None:
    tiny_run.change(train={"steps": 100_000})
    process = spawn(tiny_run)
    events = tiny_run.run_dir / "events.jsonl"
    wait_for(lambda: events.exists() and sum(e["event"] == "step" for e in read_events(events)) >= 5, process)
    begin = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert time.monotonic() - begin < 10
    assert f"stopped by {number.name}" in errors
    folder = latest_checkpoint(tiny_run.run_dir)
    assert folder is not None
    reached = read_state(folder).step
    assert max(e["step"] for e in read_events(events) if e["event"] == "step") in (reached, reached - 1)
    assert list(read_events(events))[-1]["exit_code"] == code
    tiny_run.change(train={"steps": reached + 2})
    assert read_state(go(tiny_run, quiet, resume=True)).step == reached + 2


def test_a_second_start_needs_resume(tiny_run: Any, quiet: Any) -> None:
    go(tiny_run, quiet)
    with pytest.raises(CheckpointError, match="already holds checkpoints"):
        go(tiny_run, quiet)


def test_resume_without_a_checkpoint_begins(tiny_run: Any, quiet: Any) -> None:
    assert read_state(go(tiny_run, quiet, resume=True)).step == 6


def test_a_finished_run_resumes_to_nothing(tiny_run: Any, quiet: Any) -> None:
    first = go(tiny_run, quiet)
    stamp = (first / "train_state.json").stat().st_mtime_ns
    assert go(tiny_run, quiet, resume=True) == first
    assert (first / "train_state.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("drafter", "num_hidden_layers", 3), ("train", "batches_per_step", 2), ("data", "tokens_per_batch", 256)],
)
def test_settings_that_a_checkpoint_depends_on_may_not_change(
    tiny_run: Any, quiet: Any, section: str, key: str, value: int
) -> None:
    go(tiny_run, quiet)
    tiny_run.change(**{section: {key: value}})
    with pytest.raises(CheckpointError) as caught:
        go(tiny_run, quiet, resume=True)
    assert f"{section}.{key} was" in caught.value.why


def test_other_data_and_another_target_are_refused(tiny_run: Any, quiet: Any) -> None:
    go(tiny_run, quiet)
    chats = tiny_run.folder / "train.jsonl"
    lines = chats.read_text()
    chats.write_text(lines + lines.splitlines()[0] + "\n")
    with pytest.raises(CheckpointError, match="cannot be continued") as caught:
        go(tiny_run, quiet, resume=True)
    assert "training files" in caught.value.why
    chats.write_text(lines)
    weights = load_file(tiny_run.folder / "target" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
    from safetensors.torch import save_file

    save_file(weights, tiny_run.folder / "target" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        go(tiny_run, quiet, resume=True)
    assert "target's weights" in caught.value.why


def test_a_longer_budget_makes_a_new_schedule_and_is_recorded(tiny_run: Any, quiet: Any) -> None:
    go(tiny_run, quiet)
    tiny_run.change(train={"steps": 12})
    folder = go(tiny_run, quiet, resume=True)
    events = list(read_events(tiny_run.run_dir / "events.jsonl"))
    [resumed] = [event for event in events if event["event"] == "resume"]
    assert resumed["changed"] == {"train.steps": [6, 12]} and resumed["total_steps"] == 12
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    assert steps[7]["lr"] > steps[6]["lr"]
    assert steps[12]["lr"] < steps[7]["lr"]
    assert json.loads((folder / "train_state.json").read_text())["total_steps"] == 12
