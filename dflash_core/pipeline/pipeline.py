"""The running trainer: worker threads around one queue and one sum of gradients.

    targets ──items──▶ FeatureQueue ──item n──▶ drafter n mod D ──gradient──▶ GradientReducer ──▶ main thread
                                                     ▲                                              │
                                                     └────────── new weights, next window ──────────┘

The main thread owns the optimizer. Between `wait_step` and `open_next` every drafter is idle, which is when weights
are changed, evaluated and saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch

from dflash_core.compile.gate import Gate
from dflash_core.data.packing import PackedBatch
from dflash_core.pipeline.busy import Busy
from dflash_core.pipeline.control import Control, StalledError
from dflash_core.pipeline.reducer import GradientReducer, MicroResult
from dflash_core.pipeline.rehearsal import Rehearsal, RehearsalEntry
from dflash_core.pipeline.roles import DrafterRole, TargetRole
from dflash_core.pipeline.streams import Mark, adopt, settle
from dflash_core.pipeline.workers import BatchSource, DrafterWorker, ItemQueue, TargetWorker, Worker

STALL_SECONDS = 600.0
JOIN_SECONDS = 5.0


class Pipeline:
    """Starts, paces and ends the worker threads of one run.

    Batches number from `first` (the resumed position) to `end` - 1; `batches_per_step` of them make one step.
    """

    def __init__(
        self,
        *,
        control: Control,
        gate: Gate,
        batches: Iterator[PackedBatch],
        targets: Sequence[TargetRole],
        drafters: Sequence[DrafterRole],
        gradient_buffers: Sequence[torch.Tensor],
        batches_per_step: int,
        queue_size: int,
        first: int,
        end: int,
        stall_s: float = STALL_SECONDS,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._control = control
        self._gate = gate
        self._stall_s = stall_s
        self.queue = ItemQueue(queue_size, control, first=first, end=end, stall_s=stall_s)
        self._reducer = GradientReducer(gradient_buffers, control, first=first, micro_batches=batches_per_step)
        self._buffer_devices = {buffer.device for buffer in gradient_buffers}
        self._rehearsal: Rehearsal | None = None
        devices = [role.device for role in targets] + [role.device for role in drafters]
        self.busy = {device: Busy(device) for device in devices}
        source = BatchSource(batches, self.queue)
        self.targets = [
            TargetWorker(
                f"target-{index} ({role.device})",
                control,
                on_thread_start,
                source=source,
                queue=self.queue,
                role=role,
                batches_per_step=batches_per_step,
                busy=self.busy[role.device],
            )
            for index, role in enumerate(targets)
        ]
        self.drafters = [
            DrafterWorker(
                f"drafter-{index} ({role.device})",
                control,
                on_thread_start,
                gate=gate,
                queue=self.queue,
                reducer=self._reducer,
                role=role,
                sequences=_share(index, len(drafters), first, end),
                batches_per_step=batches_per_step,
                busy=self.busy[role.device],
            )
            for index, role in enumerate(drafters)
        ]

    @property
    def workers(self) -> list[Worker]:
        return [*self.targets, *self.drafters]

    def start(self, *, on_rehearsed: Callable[[RehearsalEntry], None] | None = None) -> None:
        """Start all threads; with `on_rehearsed`, each does a synthetic step first, one after the other."""
        if on_rehearsed is not None:
            names = [worker.name for worker in self.workers]
            self._rehearsal = Rehearsal(names, self._control, self._gate, on_entry=on_rehearsed)
        settle(worker.device for worker in self.workers)
        for worker in self.workers:
            worker.rehearsal = self._rehearsal
            worker.thread.start()

    def wait_rehearsed(self) -> None:
        """Wait for the synthetic steps. Raises `Stopped` when one failed."""
        if self._rehearsal is not None:
            self._rehearsal.wait()

    def wait_step(self) -> list[MicroResult]:
        """Wait until all micro-batches of a step are summed in the gradient buffers.

        Raises `Stopped` when the run ends first; `Control.failure` then says why.
        """
        # Later than a drafter's own wait for features, so that a stalled target is not taken for a stalled drafter.
        deadline_s = 1.5 * self._stall_s

        def late(sequence: int) -> StalledError:
            worker = self.drafters[sequence % len(self.drafters)]
            return StalledError(worker.name, f"the gradient of batch {sequence}", deadline_s)

        results = self._reducer.wait_window(deadline_s=deadline_s, late=late)
        for result in results:
            adopt(*result.sums.tensors)
        return results

    def open_next(self) -> None:
        """Let the drafters compute the next step, behind what this thread has enqueued: the new weights."""
        self._reducer.open_next(Mark(*(worker.device for worker in self.drafters), *self._buffer_devices))

    def close(self) -> list[str]:
        """End all threads; returns the names of those that did not end within `JOIN_SECONDS`."""
        self._control.finish()
        deadline = time.monotonic() + JOIN_SECONDS
        started = [worker.thread for worker in self.workers if worker.thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in started if thread.is_alive()]


def _share(index: int, workers: int, first: int, end: int) -> Iterator[int]:
    """Numbers n of [first, end) with n mod workers == index, in order."""
    for sequence in count(first + (index - first) % workers, workers):
        if sequence >= end:
            return
        yield sequence
