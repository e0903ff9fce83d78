"""Additive sums behind every reported number: sums from any split of the blocks add up to the same result."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MetricSums:
    """Scalars and ``[B-1]`` vectors (entry k-1 for offset k), kept on the device until somebody asks.

    ``loss_num / loss_den``: weighted mean cross-entropy. ``correct, count``: supervised offsets. ``accepted``: per
    offset, the full blocks whose offsets 1 … k are all correct. A block is full when all its B-1 offsets are
    supervised. ``strict_length``: 1 + leading correct offsets over all ``blocks`` with at least one supervised
    offset, where an unsupervised offset counts as a miss.
    """

    loss_num: Tensor
    loss_den: Tensor
    correct: Tensor
    count: Tensor
    accepted: Tensor
    full_blocks: Tensor
    strict_length: Tensor
    blocks: Tensor

    def __add__(self, other: MetricSums) -> MetricSums:
        return MetricSums(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})

    def to(self, device: torch.device | str) -> MetricSums:
        return MetricSums(**{item.name: getattr(self, item.name).to(device) for item in fields(self)})

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return tuple(getattr(self, item.name) for item in fields(self))

    @property
    def loss(self) -> float:
        """Weighted mean cross-entropy per token, in nats; NaN without a supervised offset."""
        return _ratio(self.loss_num, self.loss_den)

    @property
    def accuracy(self) -> float:
        """Correct over supervised offsets."""
        return _ratio(self.correct.sum(), self.count.sum())

    @property
    def accept_length(self) -> float:
        """Teacher-forced, over full blocks: 1 (the bonus token) + the leading correct offsets; in [1, B]."""
        return 1 + _ratio(self.accepted.sum(), self.full_blocks)

    @property
    def strict_accept_length(self) -> float:
        """The same over all blocks, a missing label counting as a miss."""
        return _ratio(self.strict_length, self.blocks)

    @property
    def acceptance_by_offset(self) -> list[float]:
        """Entry k-1: the share of full blocks with offsets 1 … k all correct; `accept_length` is their sum + 1."""
        return [_ratio(accepted, self.full_blocks) for accepted in self.accepted]


def block_metrics(loss_num: Tensor, loss_den: Tensor, correct: Tensor, supervised: Tensor) -> MetricSums:
    """Sums over n blocks: ``correct, supervised [n, B-1]`` bool; ``loss_num, loss_den`` scalars."""
    hits = correct & supervised
    leading = hits.cumprod(dim=1)
    full = supervised.all(dim=1)
    used = supervised.any(dim=1)
    return MetricSums(
        loss_num=loss_num.detach(),
        loss_den=loss_den.detach(),
        correct=hits.sum(dim=0),
        count=supervised.sum(dim=0),
        accepted=(leading * full[:, None]).sum(dim=0),
        full_blocks=full.sum(),
        strict_length=((1 + leading.sum(dim=1)) * used).sum(),
        blocks=used.sum(),
    )


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator) / float(denominator) if float(denominator) > 0 else float("nan")
