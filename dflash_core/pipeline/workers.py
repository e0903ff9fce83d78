"""The two kinds of worker thread: targets make features, drafters make gradients.

A worker computes only inside `gate.run` and waits only outside of it, so a thread that holds the gate never waits
for another worker. Whatever a worker raises ends the run and is reported with the worker's name and step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from dflash_core.compile.gate import Gate
from dflash_core.data.packing import PackedBatch
from dflash_core.objective import MetricSums
from dflash_core.pipeline.busy import Busy
from dflash_core.pipeline.control import Control, Stopped
from dflash_core.pipeline.microstep import TrainItem
from dflash_core.pipeline.queue import FeatureQueue
from dflash_core.pipeline.reducer import GradientReducer, MicroResult
from dflash_core.pipeline.rehearsal import Rehearsal
from dflash_core.pipeline.roles import DrafterRole, TargetRole
from dflash_core.pipeline.streams import LEAST, URGENT, Mark, adopt, settle, use_own_stream

ItemQueue = FeatureQueue[tuple[TrainItem, Mark]]
"""Items, each with the mark behind which it is ready on its device."""


class Worker:
    """A daemon thread that reports its failure to the `Control` and never dies silently.

    `on_start` runs first in the new thread (some settings of torch are per thread), then the `rehearsal`, if any.
    """

    rehearsal: Rehearsal | None = None
    priority = LEAST

    def __init__(self, name: str, device: str, control: Control, on_start: Callable[[], None]) -> None:
        self.name = name
        self.device = device
        self.control = control
        self._on_start = on_start
        self.step: int | None = None
        self.thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def work(self) -> None:
        """What the worker does until the data end."""
        raise NotImplementedError

    def rehearse(self) -> None:
        """One synthetic step with the shapes of the real ones."""
        raise NotImplementedError

    def _rehearse_to_the_end(self) -> None:
        """Until the device is done: a first step may move weights, and the next worker must find them in place."""
        self.rehearse()
        settle([self.device])

    def _guarded(self) -> None:
        try:
            use_own_stream(self.device, priority=self.priority)
            self._on_start()
            if self.rehearsal is not None:
                self.rehearsal.perform(self.name, self._rehearse_to_the_end)
            self.work()
        except Stopped:
            return
        except BaseException as error:
            self.control.fail(self.name, error, step=self.step)


class BatchSource:
    """Hands out numbered batches to several target workers, each number once and in order."""

    def __init__(self, batches: Iterator[PackedBatch], queue: ItemQueue) -> None:
        self._batches = batches
        self._queue = queue
        self._lock = threading.Lock()

    def next(self, worker: str) -> PackedBatch | None:
        # Whoever holds the lock while the queue is full polls the control, so the others get their turn.
        with self._lock:
            sequence = self._queue.claim(worker)
            if sequence is None:
                return None
            batch = next(self._batches)
            assert batch.sequence == sequence, (batch.sequence, sequence)
            return batch


class TargetWorker(Worker):
    """Takes batches, computes features, hands them on.

    The role steps through the gate by itself, because with a feature store only some batches need the target at all.
    """

    def __init__(
        self,
        name: str,
        control: Control,
        on_start: Callable[[], None],
        *,
        source: BatchSource,
        queue: ItemQueue,
        role: TargetRole,
        batches_per_step: int,
        busy: Busy,
    ) -> None:
        super().__init__(name, role.device, control, on_start)
        self._source = source
        self._queue = queue
        self._role = role
        self._batches_per_step = batches_per_step
        self._busy = busy
        self.busy_s = 0.0
        self.tokens = 0

    def work(self) -> None:
        while (batch := self._source.next(self.name)) is not None:
            self.step = batch.sequence // self._batches_per_step + 1
            begin = time.perf_counter()
            with self._busy.span():
                item = self._role.make_item(batch)
            self.busy_s += time.perf_counter() - begin
            self.tokens += batch.num_tokens
            self._queue.put(batch.sequence, (item, Mark(self.device, item.taps.device)))
            self.control.check()

    def rehearse(self) -> None:
        self._role.rehearse()


class DrafterWorker(Worker):
    """Takes every D-th item, computes its gradient, adds it to the step's sum in turn."""

    priority = URGENT

    def __init__(
        self,
        name: str,
        control: Control,
        on_start: Callable[[], None],
        *,
        gate: Gate,
        queue: ItemQueue,
        reducer: GradientReducer,
        role: DrafterRole,
        sequences: Iterator[int],
        batches_per_step: int,
        busy: Busy,
    ) -> None:
        super().__init__(name, role.device, control, on_start)
        self._gate = gate
        self._queue = queue
        self._reducer = reducer
        self._role = role
        self._sequences = sequences
        self._batches_per_step = batches_per_step
        self._busy = busy

    def work(self) -> None:
        for sequence in self._sequences:
            self.step = sequence // self._batches_per_step + 1
            self._reducer.wait_open(sequence)
            (item, made), waited = self._queue.take(sequence)
            made.wait()
            adopt(*item.tensors)
            begin = time.perf_counter()
            sums = self._micro_step(item)
            result = MicroResult(
                batch=item.batch,
                worker=self.name,
                sums=sums,
                queue_wait_s=waited,
                compute_s=time.perf_counter() - begin,
            )
            self._reducer.add([parameter.grad for parameter in self._role.parameters], result)
            self._drop_gradients()

    def _micro_step(self, item: TrainItem) -> MetricSums:
        step = self._busy.timed(partial(self._role.micro_step, item))
        return self._gate.run(item.shape_key, step, on_refused=self._role.undo)

    def _drop_gradients(self) -> None:
        for parameter in self._role.parameters:
            parameter.grad = None

    def rehearse(self) -> None:
        self._micro_step(self._role.rehearsal_item())
        self._drop_gradients()
