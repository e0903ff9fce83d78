"""Adds the gradients of a step's micro-batches, one after the other, in the order of their numbers.

Floating-point addition does not commute in the last bit, so the order is fixed instead of "whoever is first":
the sum is the same for one drafter and for three. Drafters wait for their turn here, outside the compile gate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflash_core.data.packing import PackedBatch
from dflash_core.objective import MetricSums
from dflash_core.pipeline.control import Control
from dflash_core.pipeline.streams import Mark


@dataclass(frozen=True, kw_only=True)
class MicroResult:
    """What a micro-batch leaves behind beside its gradient.

    `sums` are still on the device.
    """

    batch: PackedBatch
    worker: str
    sums: MetricSums
    queue_wait_s: float = 0.0
    compute_s: float = 0.0


class GradientReducer:
    """Accumulates into `buffers` (fp32, or wider when the replicas are wider), one per parameter.

    A window is one optimizer step: `micro_batches` consecutive numbers. `add` blocks until all smaller numbers of
    the window are in; `wait_window` blocks until the window is full. On GPUs these wait for the work to be enqueued;
    marks keep its order on the devices.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], control: Control, *, first: int, micro_batches: int) -> None:
        self._buffers = list(buffers)
        self._control = control
        self._micro_batches = micro_batches
        self._next = first
        self._window_end = first + micro_batches
        self._results: list[MicroResult] = []
        self._added: list[Mark] = []
        self._opened = Mark()
        self._changed = threading.Condition()

    def wait_open(self, sequence: int) -> None:
        """Wait until the window of `sequence` is open, that is, until the weights it must be computed with are out."""
        with self._changed:
            self._control.wait(self._changed, lambda: sequence < self._window_end)
            opened = self._opened
        opened.wait()

    def add(self, gradients: Sequence[torch.Tensor | None], result: MicroResult) -> None:
        """Add one micro-batch's gradients in turn. A parameter without a gradient adds nothing."""
        assert len(gradients) == len(self._buffers)
        with self._changed:
            self._control.wait(self._changed, lambda: self._next == result.batch.sequence)
        # Only the owner of the current number reaches this line, so the sum needs no lock.
        for before in self._added[-1:]:
            before.wait()
        self._accumulate(gradients, first=not self._results)
        mark = Mark(*(tensor.device for tensor in (*self._buffers, *gradients) if tensor is not None))
        with self._changed:
            self._results.append(result)
            self._added.append(mark)
            self._next += 1
            self._changed.notify_all()

    @torch.no_grad()
    def _accumulate(self, gradients: Sequence[torch.Tensor | None], *, first: bool) -> None:
        pairs = list(zip(self._buffers, gradients, strict=True))
        buffers = [buffer for buffer, gradient in pairs if gradient is not None]
        moved = [gradient.to(buffer.device, non_blocking=True) for buffer, gradient in pairs if gradient is not None]
        if first:
            for buffer in (buffer for buffer, gradient in pairs if gradient is None):
                buffer.zero_()
        if buffers and first:
            torch._foreach_copy_(buffers, moved, non_blocking=True)
        elif buffers:
            # A bf16 gradient is promoted to the buffer's fp32 before it is added.
            torch._foreach_add_(buffers, moved)

    def wait_window(self, *, deadline_s: float, late: Callable[[int], BaseException]) -> list[MicroResult]:
        """Wait until the window is full; its sum is then in the buffers, its results are returned in order.

        Raises `late(sequence)` when nobody delivers that number within `deadline_s`.
        """
        with self._changed:
            while self._next < self._window_end:
                missing = self._next
                self._control.wait(
                    self._changed,
                    lambda: self._next > missing,  # noqa: B023 (called before the loop goes on)
                    deadline_s=deadline_s,
                    late=lambda: late(missing),  # noqa: B023
                )
            added = self._added
        for mark in added:
            mark.wait()
        return self._results

    def open_next(self, after: Mark | None = None) -> None:
        """Start the next window, whose first micro-batch overwrites the buffers; on GPUs it runs behind `after`."""
        with self._changed:
            assert self._next == self._window_end
            self._results, self._added = [], []
            self._opened = after or Mark()
            self._window_end += self._micro_batches
            self._changed.notify_all()
