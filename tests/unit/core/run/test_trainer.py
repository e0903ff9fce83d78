"""Training on tiny models: it learns, it counts, it does not depend on the number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core import trainer
from dflash_core.events import EventLog, read_events
from dflash_core.heldout import HeldOut
from dflash_core.pipeline.pipeline import Pipeline
from dflash_core.progress import Progress
from dflash_core.trainer import train
from dflash_core.training_state import latest_checkpoint, read_state


def run_training(run: Any, quiet: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Train and return masters and moments of the last checkpoint."""
    with EventLog(run.run_dir / "events.jsonl") as events:
        train(run.config, run.run_dir, events, say=quiet, **options)
    folder = latest_checkpoint(run.run_dir)
    assert folder is not None
    tensors = load_file(folder / "train_state.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}


def events_of(run: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.run_dir / "events.jsonl") if event["event"] == name]


def test_it_learns_and_reports(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(train={"steps": 30, "lr": 1e-2, "eval_every": 10, "checkpoint_every": 10, "keep_checkpoints": 2})
    run_training(tiny_run, quiet)
    steps, evals = events_of(tiny_run, "step"), events_of(tiny_run, "eval")
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[0]["loss"] == pytest.approx(5.6, abs=0.5)  # ln 264, invariant 7
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.7
    assert [e["step"] for e in evals] == [0, 10, 20, 30]
    assert evals[-1]["loss"] < evals[0]["loss"] - 0.7
    assert len(evals[0]["acceptance_by_offset"]) == 3
    assert [e["step"] for e in events_of(tiny_run, "checkpoint")] == [10, 20, 30]
    names = sorted(path.name for path in (tiny_run.run_dir / "checkpoints").iterdir())
    assert names == ["latest", "step-000020", "step-000030"]
    for key in ("lr", "grad_norm", "tokens_per_s", "samples_per_s", "queue_wait_s", "drafter_busy", "accept_length"):
        assert key in steps[-1], key


TOPOLOGIES = [(1, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_the_number_of_workers_does_not_matter(tiny_run: Any, quiet: Any, dtype: str, tolerance: float) -> None:
    tiny_run.change(train={"steps": 10, "dtype": dtype, "batches_per_step": 3}, target={"dtype": dtype})
    results = []
    for targets, drafters in TOPOLOGIES:
        run = tiny_run.in_dir(f"{targets}-{drafters}")
        run.change(topology={"targets": ["cpu"] * targets, "drafters": ["cpu"] * drafters, "queue_size": 3})
        results.append(run_training(run, quiet))
    first = results[0]
    for other in results[1:]:
        for name, tensor in first.items():
            assert (other[name] - tensor).norm() <= tolerance * tensor.norm(), name
    assert first["master.fc.weight"].dtype == getattr(torch, dtype)


def test_five_targets_and_three_drafters_run(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(train={"steps": 4, "batches_per_step": 6, "dtype": "float64"}, target={"dtype": "float64"})
    single = run_training(tiny_run.in_dir("1-1"), quiet)
    crowd = tiny_run.in_dir("5-3").change(topology={"targets": ["cpu"] * 5, "drafters": ["cpu"] * 3})
    for name, tensor in run_training(crowd, quiet).items():
        assert (tensor - single[name]).norm() <= 1e-10 * single[name].norm(), name
    (end,) = events_of(crowd, "compiles")
    assert (end["after_warm"], end["refused"]) == (0, 0)


def test_a_feature_store_changes_nothing_and_is_used_again(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(train={"steps": None, "epochs": 3})
    plain = run_training(tiny_run.in_dir("plain"), quiet)
    stored = tiny_run.in_dir("stored").change(data={"feature_store": str(tiny_run.folder / "features")})
    first = run_training(stored, quiet)
    files = sorted((tiny_run.folder / "features").rglob("*.safetensors"))
    assert len(files) == 12 + 3  # every training chat and the held-out ones that are measured
    stamps = [path.stat().st_mtime_ns for path in files]
    again = tiny_run.in_dir("again").change(data={"feature_store": str(tiny_run.folder / "features")})
    second = run_training(again, quiet)
    assert [path.stat().st_mtime_ns for path in files] == stamps
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-5, check_dtype=True)
        assert torch.equal(tensor, second[name]), name


def test_time_ends_a_run_and_the_rate_follows_it(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(train={"steps": 1_000_000, "max_seconds": 1.5, "min_lr_ratio": 0.1})
    run_training(tiny_run, quiet)
    steps = events_of(tiny_run, "step")
    assert 1 < len(steps) < 5000
    assert steps[-1]["progress"] > 0.9
    assert steps[-1]["lr"] < 0.5 * max(step["lr"] for step in steps)
    folder = latest_checkpoint(tiny_run.run_dir)
    assert folder is not None and read_state(folder).elapsed_s >= 1.5


def test_epochs_set_the_number_of_steps(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(train={"steps": None, "epochs": 2, "batches_per_step": 2})
    run_training(tiny_run, quiet)
    folder = latest_checkpoint(tiny_run.run_dir)
    assert folder is not None
    state = read_state(folder)
    assert state.samples_seen >= 24 and state.stream["epoch"] == 2
    assert state.step == state.total_steps == (state.stream["sequence"] + 1) // 2


def test_drafters_go_on_at_once_unless_they_must_be_idle(
    tiny_run: Any, quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are let go before the norm is read; an evaluation or a checkpoint of that step comes first."""
    done: list[str] = []

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    note(Pipeline, "wait_step")
    note(Pipeline, "open_next")
    note(HeldOut, "measure")
    note(trainer, "write_checkpoint")
    note(Progress, "add")  # the step has been accepted
    tiny_run.change(train={"steps": 4, "eval_every": 2, "checkpoint_every": 3})
    run_training(tiny_run, quiet)
    first, second, third, fourth = " ".join(done).split("wait_step ")[1:]
    assert first == "open_next add "
    assert second == "add measure open_next "
    assert third == "add write_checkpoint open_next "
    assert fourth.startswith("add measure open_next")


def test_untrained_evaluation_is_the_seeded_start(tiny_run: Any, quiet: Any) -> None:
    losses = []
    for name in ("a", "b"):
        run = tiny_run.in_dir(name).change(train={"steps": 1})
        run_training(run, quiet)
        losses.append(events_of(run, "eval")[0])
    for key in ("loss", "accept_length", "acceptance_by_offset"):
        assert losses[0][key] == losses[1][key]


def test_warm_start_begins_from_the_given_drafter(tiny_run: Any, quiet: Any) -> None:
    run_training(tiny_run.in_dir("first"), quiet)
    start: Path = latest_checkpoint(tiny_run.folder / "first" / "run")  # type: ignore[assignment]
    second = tiny_run.in_dir("second").change(drafter={"init_from": str(start / "drafter")}, train={"steps": 1})
    run_training(second, quiet)
    last = events_of(TinyRunEvents(tiny_run.folder / "first" / "run"), "eval")[-1]
    first = events_of(second, "eval")[0]
    assert first["loss"] == pytest.approx(last["loss"], rel=1e-5)


class TinyRunEvents:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
