"""What the two kinds of worker compute, as functions the pipeline can call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflash_core.attention import AttentionBackend
from dflash_core.compile.rollback import Rollback, device_generator
from dflash_core.data.packing import PackedBatch
from dflash_core.drafter import DFlashDrafter
from dflash_core.objective import MetricSums
from dflash_core.pipeline.microstep import ItemMaker, Objective, TrainItem, block_terms
from dflash_core.pipeline.rehearsal import synthetic_item


@dataclass(frozen=True, kw_only=True)
class TargetRole:
    """One target worker: what turns a batch into an item on the device of the drafter that will take it."""

    device: str
    make_item: Callable[[PackedBatch], TrainItem]
    rehearse: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class DrafterRole:
    """One drafter worker: its replica's parameters, and what adds a micro-batch's gradient to them.

    `undo` puts gradients and random states back to where the last micro-step began, for the gate to repeat it.
    """

    device: str
    parameters: Sequence[torch.nn.Parameter]
    micro_step: Callable[[TrainItem], MetricSums]
    undo: Callable[[], None]
    rehearsal_item: Callable[[], TrainItem]


def target_role(
    device: str,
    maker: ItemMaker,
    drafters: Sequence[str],
    dtype: torch.dtype,
    synthetic: Callable[[], PackedBatch],
) -> TargetRole:
    """Items of `maker`, moved to drafter n mod D in the drafters' type; `synthetic` makes a batch to rehearse with."""

    def make_item(batch: PackedBatch) -> TrainItem:
        return maker(batch).to(drafters[batch.sequence % len(drafters)], dtype)

    return TargetRole(device=device, make_item=make_item, rehearse=lambda: maker.row_taps(synthetic()))


def drafter_role(
    device: str,
    drafter: DFlashDrafter,
    head: torch.Tensor,
    objective: Objective,
    attention: AttentionBackend,
    synthetic: Callable[[], PackedBatch],
) -> DrafterRole:
    """Forward, loss and backward of one replica; `head [V, H]` on its device and in its type."""
    parameters = list(drafter.parameters())
    rollback = Rollback(parameters, [device_generator(device)])

    def micro_step(item: TrainItem) -> MetricSums:
        rollback.note()
        terms = block_terms(drafter, head, item, objective, attention)
        terms.num.backward()
        return terms.metrics

    def rehearsal_item() -> TrainItem:
        return synthetic_item(synthetic(), drafter.config, objective, device=device, dtype=drafter.dtype)

    return DrafterRole(
        device=device,
        parameters=parameters,
        micro_step=micro_step,
        undo=rollback.restore,
        rehearsal_item=rehearsal_item,
    )
