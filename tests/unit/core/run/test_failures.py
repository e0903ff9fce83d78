"""Whatever breaks: the message says who, when and why, threads end, and a resume finds the last finished step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_core.compile.gate import Gate
from dflash_core.errors import CoreError, DataError, WorkerError
from dflash_core.events import EventLog
from dflash_core.session import open_session
from dflash_core.signals import StopSignals
from dflash_core.trainer import Trainer
from dflash_core.training_state import latest_checkpoint, list_checkpoints, read_state


class Broken:
    """A trainer with one worker's work replaced by something that fails at a given batch."""

    def __init__(self, run: Any, *, stall_s: float = 600.0) -> None:
        self.run = run
        self._gate = Gate()
        session = open_session(run.config, run.config.topology.targets)
        self.trainer = Trainer(session, self._gate, run.run_dir, EventLog(None), say=lambda line: None, stall_s=stall_s)

    def drafter(self, index: int, fault: Callable[[Any, Any], Any], at: int) -> Broken:
        """`fault(micro_step, item)` instead of the micro-step of batch `at` on drafter `index`."""
        worker = self.trainer.pipeline.drafters[index]
        micro_step = worker._role.micro_step

        def broken(item: Any) -> Any:
            return fault(micro_step, item) if item.batch.sequence == at else micro_step(item)

        worker._role = replace(worker._role, micro_step=broken)
        return self

    def target(self, index: int, fault: Callable[[Any, Any], Any], at: int) -> Broken:
        """`fault(make_item, batch)` instead of making item `at` or any later one on target `index`."""
        worker = self.trainer.pipeline.targets[index]
        make_item = worker._role.make_item

        def broken(batch: Any) -> Any:
            return fault(make_item, batch) if batch.sequence >= at else make_item(batch)

        worker._role = replace(worker._role, make_item=broken)
        return self

    def fails(self, seconds: float = 10.0) -> CoreError:
        """Run; returns the error. No worker thread may be left."""
        begin = time.monotonic()
        with self._gate, pytest.raises(CoreError) as caught:
            self.trainer.run(StopSignals())
        assert time.monotonic() - begin < seconds
        return caught.value


@pytest.fixture
def run(tiny_run: Any) -> Any:
    return tiny_run.change(
        topology={"targets": ["cpu"] * 2, "drafters": ["cpu"] * 3, "queue_size": 4},
        train={"steps": 50, "batches_per_step": 2},
    )


def threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("target-", "drafter-"))]


def saved_step(run: Any) -> int | None:
    folder = latest_checkpoint(run.run_dir)
    return None if folder is None else read_state(folder).step


def die(*_: Any) -> Any:
    raise KeyError("a lost key")


def test_a_drafter_that_dies_is_named_and_the_last_step_is_saved(run: Any) -> None:
    error = Broken(run).drafter(1, die, at=7).fails()
    assert isinstance(error, WorkerError) and error.exit_code == 8
    assert error.what == "drafter-1 (cpu), step 4: the worker died"
    assert "KeyError: 'a lost key'" in error.why and "test_failures.py" in error.why
    assert "a resume begins at step 3" in error.why
    assert saved_step(run) == 3
    assert threads_left() == []


def test_a_target_that_dies_is_named(run: Any) -> None:
    error = Broken(run).target(0, die, at=9).fails()
    assert error.what.startswith("target-0 (cpu), step ") and "KeyError" in error.why
    assert threads_left() == []
    assert saved_step(run) is not None


def test_a_failure_in_the_first_step_saves_nothing_and_says_so(run: Any) -> None:
    error = Broken(run).drafter(0, die, at=0).fails()
    assert "step 1" in error.what and "a resume begins at step 0" in error.why
    assert list_checkpoints(run.run_dir) == []


def test_a_nan_loss_names_worker_batch_and_chats(run: Any) -> None:
    def poison(micro_step: Any, item: Any) -> Any:
        item.taps[3] = float("nan")
        return micro_step(item)

    error = Broken(run).drafter(2, poison, at=5).fails()
    assert error.what == "drafter-2 (cpu), step 3: a number is not finite"
    assert "loss of batch 5 (chats " in error.why
    assert saved_step(run) == 2
    folder = latest_checkpoint(run.run_dir)
    assert folder is not None
    from safetensors.torch import load_file

    assert all(torch.isfinite(t).all() for t in load_file(folder / "train_state.safetensors").values())


def test_a_gradient_that_alone_is_not_finite_is_found(run: Any) -> None:
    def poison(micro_step: Any, item: Any) -> Any:
        sums = micro_step(item)
        broken.trainer.workforce.replicas[1].fc.weight.grad[0, 0] = float("inf")
        return sums

    broken = Broken(run)
    error = broken.drafter(1, poison, at=4).fails()
    assert "step 3" in error.what and "gradient is not finite although every loss is" in error.why


@pytest.mark.parametrize(
    "problem",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_out_of_memory_says_what_to_lower(run: Any, problem: Exception) -> None:
    def full(*_: Any) -> Any:
        raise problem

    error = Broken(run).drafter(0, full, at=3).fails()
    assert error.what == "drafter-0 (cpu), step 2: out of memory"
    assert "anchors_per_batch" in error.fix


def test_a_target_that_stalls_is_named_after_the_deadline(run: Any) -> None:
    release = threading.Event()

    def hang(make_item: Any, batch: Any) -> Any:
        release.wait(30)
        return make_item(batch)

    try:
        error = Broken(run, stall_s=1.0).target(1, hang, at=4).fails(seconds=20)
    finally:
        release.set()
    assert error.what.startswith("target-1 (cpu), step ") and error.what.endswith(": stalled")
    assert "target-1 (cpu)" in error.why and "threads that did not end" in error.why
    assert saved_step(run) is not None


def test_a_drafter_that_stalls_is_named_after_the_deadline(run: Any) -> None:
    release = threading.Event()

    def hang(micro_step: Any, item: Any) -> Any:
        release.wait(30)
        return micro_step(item)

    try:
        error = Broken(run, stall_s=1.0).drafter(2, hang, at=5).fails(seconds=20)
    finally:
        release.set()
    assert "drafter-2 (cpu)" in error.what and "stalled" in error.what


def test_a_broken_chat_keeps_its_line_and_exit_code(run: Any) -> None:
    chats = run.folder / "train.jsonl"
    lines = chats.read_text().splitlines()
    lines[4] = '{"messages": [{"role": "user", "content": "no answer"}]}'
    chats.write_text("\n".join(lines) + "\n")
    run.change(train={"epochs": 1})
    error = Broken(run).fails()
    assert isinstance(error, DataError) and error.exit_code == 3
    assert "train.jsonl:5" in error.what and error.what.startswith("target-")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_words(run: Any) -> None:
    run.change(train={"checkpoint_every": 2})
    broken = Broken(run)
    (run.run_dir / "checkpoints").mkdir(parents=True)
    (run.run_dir / "checkpoints" / ".step-000002.partial").write_text("a file where a folder must go")
    error = broken.fails()
    assert "cannot write the checkpoint" in error.what and error.exit_code == 5
    assert threads_left() == []
