"""What a run tells about itself: an event for programs and a line for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

from dflash_core.budget import Budget
from dflash_core.compile.gate import Gate
from dflash_core.data.packing import BatchStream
from dflash_core.events import EventLog, progress_line
from dflash_core.objective import MetricSums
from dflash_core.pipeline.feature_store import FeatureStore
from dflash_core.pipeline.pipeline import Pipeline
from dflash_core.pipeline.reducer import MicroResult
from dflash_core.training_state import TrainState


class Progress:
    """Collects steps until `report`: reading a metric waits for the device, collecting does not."""

    def __init__(self, pipeline: Pipeline, budget: Budget, events: EventLog, say: Callable[[str], None]) -> None:
        self._pipeline = pipeline
        self._budget = budget
        self._events = events
        self._say = say
        self.begin()

    def begin(self) -> None:
        """Start a new window now."""
        self._begin = time.perf_counter()
        self._paused_s = 0.0
        self._sums: MetricSums | None = None
        self._results: list[MicroResult] = []
        self._steps = 0
        self._last: dict[str, float] = {}
        self._targets_before = self._targets_so_far()
        for busy in self._pipeline.busy.values():
            busy.take()

    def _targets_so_far(self) -> tuple[float, int]:
        """Seconds in which target workers computed, and tokens of the batches they have delivered."""
        targets = self._pipeline.targets
        return sum(worker.busy_s for worker in targets), sum(worker.tokens for worker in targets)

    def add(self, results: Sequence[MicroResult], sums: MetricSums, *, lr: float, grad_norm: float) -> None:
        """Take one step: its micro-batches, their total `sums`, its learning rate and gradient norm."""
        self._sums = sums if self._sums is None else reduce(add, (self._sums, sums))
        self._results += results
        self._last = {"lr": lr, "grad_norm": grad_norm}
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the rates: an evaluation, a checkpoint."""
        begin = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - begin

    def report(self, state: TrainState, elapsed_s: float, *, compiles: int) -> None:
        """Tell the steps since the last report, if any. `compiles`: since the warm-up; 0 unless something is wrong."""
        if self._sums is None:
            return
        summary = self._summary(self._sums)
        self._events.emit(
            "step", step=state.step, progress=state.progress, elapsed_s=elapsed_s, compiles=compiles, **summary
        )
        last_step = self._budget.expected_steps(state.step, elapsed_s, summary["step_s"])
        line = progress_line(
            step=state.step,
            last_step=last_step,
            estimated=last_step < self._budget.total_steps,
            loss=summary["loss"],
            accept_length=summary["accept_length"],
            lr=summary["lr"],
            tokens_per_s=summary["tokens_per_s"],
            eta_s=self._budget.remaining_s(state.step, elapsed_s, summary["step_s"]),
        )
        self._say(line)
        self.begin()

    def _summary(self, sums: MetricSums) -> dict[str, Any]:
        """Metrics and rates of the window.

        Rates leave evaluations and checkpoints out. `queue_wait_s`: mean seconds a drafter waited for features per
        micro-batch. `drafter_busy`, `target_busy`: share of the time that the workers of a role computed.
        `device_idle`: share of the time in which nobody computed on a device.
        """
        seconds = max(time.perf_counter() - self._begin - self._paused_s, 1e-9)
        results, pipeline = self._results, self._pipeline
        tokens = sum(result.batch.num_tokens for result in results)
        target_busy_s, target_tokens = (
            now - before for now, before in zip(self._targets_so_far(), self._targets_before, strict=True)
        )
        return {
            **self._last,
            "epoch": results[-1].batch.epoch,
            "loss": sums.loss,
            "accuracy": sums.accuracy,
            "accept_length": sums.accept_length,
            "strict_accept_length": sums.strict_accept_length,
            "tokens_per_s": tokens / seconds,
            "targets_tokens_per_s": target_tokens / seconds,
            "drafters_tokens_per_s": tokens / seconds,
            "samples_per_s": sum(len(result.batch.sample_ids) for result in results) / seconds,
            "step_s": seconds / self._steps,
            "queue_wait_s": sum(result.queue_wait_s for result in results) / len(results),
            "drafter_busy": sum(r.compute_s for r in results) / seconds / len(pipeline.drafters),
            "target_busy": target_busy_s / seconds / len(pipeline.targets),
            "device_idle": {name: max(0.0, 1 - busy.take() / seconds) for name, busy in pipeline.busy.items()},
        }

    def report_held_out(self, step: int, sums: MetricSums) -> None:
        """Tell a teacher-forced evaluation."""
        self._events.emit(
            "eval",
            step=step,
            loss=sums.loss,
            accuracy=sums.accuracy,
            accept_length=sums.accept_length,
            strict_accept_length=sums.strict_accept_length,
            acceptance_by_offset=sums.acceptance_by_offset,
            blocks=int(sums.full_blocks),
        )
        self._say(f"held-out at step {step}  loss {sums.loss:.3f}  accept {sums.accept_length:.3f}")

    def report_data(self, stream: BatchStream, store: FeatureStore | None) -> None:
        """Tell which chats were left out and how the feature store fared, if there is anything to tell."""
        if stream.dropped:
            counts = ", ".join(f"{count} {reason}" for reason, count in stream.dropped.most_common())
            self._say(f"chats left out: {counts}")
        self._events.emit("data", chats=len(stream.index), dropped=dict(stream.dropped))
        if store is None:
            return
        self._events.emit("feature_store", hits=store.hits, misses=store.misses, damaged=store.damaged)
        if store.write_error is not None:
            self._say(f"the feature store could not be written and was kept in memory only: {store.write_error}")

    def report_compiles(self, gate: Gate) -> None:
        """Tell what was compiled after the warm-up; anything but 0 is a shape that it has not covered."""
        if gate.compiles_at_barrier is None:
            return
        self._events.emit("compiles", after_warm=gate.compiles_since_warm, refused=gate.refused)
        if gate.compiles_since_warm:
            self._say(f"{gate.compiles_since_warm} compiles after the warm-up: some shape was not warmed up")
