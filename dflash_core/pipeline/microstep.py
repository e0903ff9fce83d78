"""From a packed batch to a loss: what one micro-batch computes, on whichever threads it runs.

`ItemMaker` runs on target threads (features, blocks, labels), `block_terms` on drafter threads (forward and loss).
Training, warm-up and the teacher-forced evaluation share both, so they cannot disagree about what a block is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from dflash_core.attention import AttentionBackend, BlockLayout
from dflash_core.compile.gate import Gate
from dflash_core.data.packing import PackedBatch
from dflash_core.drafter import DFlashDrafter
from dflash_core.objective import LossTerms, block_input_ids, block_labels, block_loss, sample_anchors
from dflash_core.pipeline.feature_store import FeatureStore
from dflash_core.target import Target
from dflash_core.target.documents import document_spans
from dflash_core.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is constant over a run: how blocks are drawn, labelled and weighted."""

    seed: int
    block_size: int
    mask_token_id: int
    anchors_per_batch: int
    loss: Literal["decay", "dpace"] = "decay"
    gamma: float = 7.0
    dpace_alpha: float = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainItem:
    """One micro-batch ready for a drafter. S context rows, N blocks of B rows, T = N*B, n taps of width H.

    `taps [S, n*H]`, `context_positions [S]`, `block_embeds [T, H]`, `layout` (N blocks); `labels [N, B]` and
    `supervised [N, B]` stay on the CPU, where the loss reads which rows to score without waiting for a device.
    """

    batch: PackedBatch
    taps: torch.Tensor
    context_positions: torch.Tensor
    block_embeds: torch.Tensor
    layout: BlockLayout
    labels: torch.Tensor
    supervised: torch.Tensor

    @property
    def shape_key(self) -> Hashable:
        """Everything that compiled code could be specialised on."""
        return ("block", tuple(self.taps.shape), tuple(self.labels.shape), self.taps.dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TrainItem:
        """The item on `device`, taps and embeddings in `dtype`; what is there already is not copied."""
        return replace(
            self,
            taps=to_device(self.taps, device, dtype),
            context_positions=to_device(self.context_positions, device),
            block_embeds=to_device(self.block_embeds, device, dtype),
            layout=self.layout.to(device),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a drafter computes with."""
        layout = self.layout
        return self.taps, self.context_positions, self.block_embeds, layout.lo, layout.hi, layout.valid

    def padded(self, rows: int) -> TrainItem:
        """The item with its context padded to `rows` rows that no block sees, for a shape that is always the same."""
        missing = rows - self.taps.shape[0]
        assert missing >= 0
        taps = torch.nn.functional.pad(self.taps, (0, 0, 0, missing))
        positions = torch.nn.functional.pad(self.context_positions, (0, missing))
        return replace(self, taps=taps, context_positions=positions)


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Where the blocks of a row are, what goes into them (`ids [T]`) and what they must predict (`[N, B]`)."""

    layout: BlockLayout
    ids: torch.Tensor
    labels: torch.Tensor
    supervised: torch.Tensor


def plan_blocks(batch: PackedBatch, objective: Objective) -> BlockPlan:
    """Draw the anchors of a row; depends on the seed, the epoch and the samples only."""
    anchors = sample_anchors(
        batch.loss_mask,
        batch.document_ids,
        capacity=objective.anchors_per_batch,
        seed_key=(objective.seed, batch.epoch, batch.sample_ids),
    )
    input_ids = torch.from_numpy(batch.input_ids)
    labels, supervised = block_labels(
        input_ids,
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.document_ids),
        anchors,
        objective.block_size,
    )
    return BlockPlan(
        layout=anchors.layout(objective.block_size),
        ids=block_input_ids(input_ids, anchors, objective.block_size, objective.mask_token_id),
        labels=labels,
        supervised=supervised,
    )


class ItemMaker:
    """Makes items with one target. Steps through the gate for every computation of the target.

    With a `store`, features are computed sample by sample rather than row by row: alone they do not depend in any bit
    on their neighbours in the row, so a stored feature is what a later epoch or a resumed run would compute.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        objective: Objective,
        gate: Gate,
        *,
        store: FeatureStore | None = None,
    ) -> None:
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._objective = objective
        self._gate = gate
        self._store = store

    def __call__(self, batch: PackedBatch) -> TrainItem:
        plan = plan_blocks(batch, self._objective)
        embed = partial(self._target.embed, to_device(plan.ids, self._target.device))
        return TrainItem(
            batch=batch,
            taps=self._stored_taps(batch, self._store) if self._store is not None else self.row_taps(batch),
            context_positions=torch.from_numpy(batch.position_ids),
            block_embeds=self._gate.run(("embed", tuple(plan.ids.shape)), embed),
            layout=plan.layout,
            labels=plan.labels,
            supervised=plan.supervised,
        )

    def row_taps(self, batch: PackedBatch) -> torch.Tensor:
        """Features of a whole row, `[S, n*H]`, past any store."""
        compute = partial(
            self._target.features, batch.input_ids, batch.position_ids, batch.document_ids, self._layer_ids
        )
        return self._gate.run(("features", len(batch.input_ids)), compute)

    def _stored_taps(self, batch: PackedBatch, store: FeatureStore) -> torch.Tensor:
        width = len(self._layer_ids) * self._target.hidden_size
        pinned = self._target.device.type == "cuda"
        taps = torch.zeros(len(batch.input_ids), width, dtype=self._target.dtype, pin_memory=pinned)
        for start, length in zip(*document_spans(batch.document_ids), strict=True):
            rows = slice(int(start), int(start + length))
            features = store.get(batch.input_ids[rows])
            if features is None:
                compute = partial(
                    self._target.features,
                    batch.input_ids[rows],
                    batch.position_ids[rows],
                    batch.document_ids[rows],
                    self._layer_ids,
                )
                features = self._gate.run(("features", "sample"), compute).cpu()
                store.put(batch.input_ids[rows], features)
            taps[rows] = features
        return taps


def block_terms(
    drafter: DFlashDrafter,
    head_weight: torch.Tensor,
    item: TrainItem,
    objective: Objective,
    attention: AttentionBackend,
) -> LossTerms:
    """Forward of all blocks and the loss over them; `head_weight [V, H]` is the target's frozen head."""
    hidden = drafter(
        item.block_embeds,
        drafter.context_features(item.taps),
        layout=item.layout,
        block_positions=item.layout.positions(),
        context_positions=item.context_positions,
        attention=attention,
    )
    return block_loss(
        hidden,
        head_weight,
        item.labels,
        item.supervised,
        kind=objective.loss,
        gamma=objective.gamma,
        dpace_alpha=objective.dpace_alpha,
    )
