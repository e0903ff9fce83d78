"""One synthetic step per worker before the real ones: strictly one after the other, on the workers' own threads.

Compiled code is partly bound to the thread that compiled it, so a warm-up on the main thread would prove less. Each
step goes through the gate with the key of the real ones; afterwards a worker's first real step compiles nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_core.compile.gate import Gate
from dflash_core.config import RunConfig
from dflash_core.data.packing import PackedBatch, StreamState
from dflash_core.drafter import DFlashConfig
from dflash_core.pipeline.control import Control
from dflash_core.pipeline.microstep import Objective, TrainItem, plan_blocks


@dataclass(frozen=True, kw_only=True)
class RehearsalEntry:
    """What one worker's synthetic step cost. `compiles` started meanwhile."""

    worker: str
    seconds: float
    compiles: int


def timed_entry(worker: str, gate: Gate, job: Callable[[], object]) -> RehearsalEntry:
    """Run `worker`'s synthetic step."""
    compiles, begin = gate.compiles, time.perf_counter()
    job()
    return RehearsalEntry(worker=worker, seconds=time.perf_counter() - begin, compiles=gate.compiles - compiles)


class Rehearsal:
    """Gives each of `workers` its turn, in that order. `on_entry` is called when a step is done."""

    def __init__(
        self,
        workers: Sequence[str],
        control: Control,
        gate: Gate,
        *,
        on_entry: Callable[[RehearsalEntry], None] = lambda entry: None,
    ) -> None:
        self._workers = list(workers)
        self._control = control
        self._gate = gate
        self._on_entry = on_entry
        self._turn = 0
        self._changed = threading.Condition()

    def perform(self, worker: str, job: Callable[[], object]) -> None:
        """Run `job` when it is `worker`'s turn."""
        with self._changed:
            self._control.wait(self._changed, lambda: self._workers[self._turn] == worker)
        self._on_entry(timed_entry(worker, self._gate, job))
        with self._changed:
            self._turn += 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until every worker has had its turn. Raises `Stopped` when one failed."""
        with self._changed:
            self._control.wait(self._changed, lambda: self._turn == len(self._workers))


def synthetic_batch(config: RunConfig, vocab_size: int) -> PackedBatch:
    """A full row of random tokens in documents of `max_length`, all supervised."""
    size, length = config.data.tokens_per_batch, config.data.max_length
    rows = np.arange(size)
    return PackedBatch(
        sequence=-1,
        epoch=0,
        input_ids=np.random.default_rng(config.seed).integers(0, vocab_size, size),
        loss_mask=np.ones(size, dtype=bool),
        document_ids=rows // length,
        position_ids=rows % length,
        sample_ids=tuple(range((size + length - 1) // length)),
        next_state=StreamState(),
    )


def synthetic_item(
    batch: PackedBatch, drafter: DFlashConfig, objective: Objective, *, device: str, dtype: torch.dtype
) -> TrainItem:
    """The item of a synthetic batch with random features, so that no target is needed."""
    plan = plan_blocks(batch, objective)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator)

    item = TrainItem(
        batch=batch,
        taps=random(len(batch.input_ids), drafter.num_taps * drafter.hidden_size),
        context_positions=torch.from_numpy(batch.position_ids),
        block_embeds=random(plan.layout.num_rows, drafter.hidden_size),
        layout=plan.layout,
        labels=plan.labels,
        supervised=plan.supervised,
    )
    return item.to(device, dtype)
