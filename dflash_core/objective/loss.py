"""Cross-entropy of block rows under the target's frozen head, as an additive pair, without keeping logits.

Only supervised rows meet the head. Their gradient is computed in the forward pass, chunk by chunk, while the
logits exist: dX = w · (softmax(X·Wᵀ) - onehot) · W. The head never gets a gradient, so this costs two matrix
products per row and the memory of one chunk. A chunk holds whole blocks, because D-PACE weights of an offset depend
on the losses of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_core.objective.metrics import MetricSums, block_metrics
from dflash_core.objective.weights import decay_weights, dpace_weights

# Rows of one logits buffer: on CPU it should be touched again while pages are warm, a GPU wants a large product.
CHUNK_ROWS_CPU = 256
CHUNK_ROWS_GPU = 1024
Weigh = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossTerms:
    """``num`` (differentiable) and ``den`` scalars: Σ w·CE and Σ w. Add them over micro-batches, then divide."""

    num: Tensor
    den: Tensor
    metrics: MetricSums


def block_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    supervised: Tensor,
    *,
    kind: Literal["decay", "dpace"] = "decay",
    gamma: float = 7.0,
    dpace_alpha: float = 0.5,
    chunk_rows: int | None = None,
) -> LossTerms:
    """Weighted cross-entropy of ``hidden [N·B, H]`` against ``labels [N, B]`` where ``supervised [N, B]``.

    ``head_weight [V, H]`` in the dtype of ``hidden``. Weights: ``decay`` exp(-(k-1)/γ), ``dpace`` see
    `dpace_weights`; the denominator is the sum of weights for both. ``labels`` and ``supervised`` may stay on the
    CPU while ``hidden`` is elsewhere: then nothing here waits for the device. Losses are at least fp32.
    """
    size = labels.shape[1]
    assert hidden.shape[0] == labels.numel() and labels.shape == supervised.shape
    assert hidden.dtype == head_weight.dtype, f"hidden is {hidden.dtype}, the head {head_weight.dtype}"
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weigh: Weigh = partial(dpace_weights, alpha=dpace_alpha)
    if kind == "decay":
        table = decay_weights(size, gamma, device=hidden.device).to(wide)
        weigh = partial(_constant_weights, table)
    limit = chunk_rows or (CHUNK_ROWS_CPU if hidden.device.type == "cpu" else CHUNK_ROWS_GPU)
    rows = _ScoredRows.of(labels, supervised, limit, hidden.device)
    learns = hidden.requires_grad and torch.is_grad_enabled()
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _FrozenHeadLoss.apply
    num, den, correct = apply(hidden, head_weight, rows, weigh, learns)
    return LossTerms(num, den, block_metrics(num, den, correct, rows.supervised))


def _constant_weights(table: Tensor, losses: Tensor, supervised: Tensor) -> Tensor:
    return table * supervised.to(losses.dtype)


@dataclass(frozen=True)
class _ScoredRows:
    """The R supervised rows, in order, and how they are cut into chunks of whole blocks."""

    index: Tensor  # [R], into the N·B block rows
    labels: Tensor  # [R]
    cells: Tensor  # [R], into the N·(B-1) predicted offsets
    supervised: Tensor  # [N, B-1]
    chunks: list[tuple[slice, slice]]  # rows of the chunk, blocks of the chunk

    @staticmethod
    def of(labels: Tensor, supervised: Tensor, limit: int, device: torch.device) -> _ScoredRows:
        host = supervised.cpu()
        index = host.flatten().nonzero()[:, 0]
        assert not host[:, 0].any(), "offset 0 is given, not predicted"
        return _ScoredRows(
            index=index.to(device, non_blocking=True),
            labels=labels.flatten()[index.to(labels.device)].to(device, non_blocking=True),
            cells=(index - index // labels.shape[1] - 1).to(device, non_blocking=True),
            supervised=supervised[:, 1:].to(device, non_blocking=True),
            chunks=_cut(host.sum(dim=1).tolist(), limit),
        )


def _cut(rows_per_block: list[int], limit: int) -> list[tuple[slice, slice]]:
    """Cut into runs of whole blocks with at most ``limit`` rows each (or one block, if that has more)."""
    chunks: list[tuple[slice, slice]] = []
    row = block = rows = 0
    for b, count in enumerate(rows_per_block):
        if rows and rows + count > limit:
            chunks.append((slice(row, row + rows), slice(block, b)))
            row, block, rows = row + rows, b, 0
        rows += count
    if rows:
        chunks.append((slice(row, row + rows), slice(block, len(rows_per_block))))
    return chunks


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_VH: Tensor, rows: _ScoredRows, weigh: Weigh, learns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        num, den = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide)
        correct = torch.zeros_like(rows.supervised)
        d_hidden = torch.zeros_like(hidden) if learns else None
        head = _ChunkedHead(head_VH, max((span.stop - span.start for span, _ in rows.chunks), default=0), wide)
        for span, blocks in rows.chunks:
            index, labels, supervised = rows.index[span], rows.labels[span], rows.supervised[blocks]
            cells = rows.cells[span] - blocks.start * supervised.shape[1]
            losses, guesses = head.losses(hidden[index], labels)
            correct[blocks].view(-1)[cells] = guesses == labels
            by_block = losses.new_zeros(supervised.shape)
            by_block.view(-1)[cells] = losses
            weights = weigh(by_block, supervised)
            num += (weights * by_block).sum()
            den += weights.sum()
            if d_hidden is not None:
                d_hidden[index] = head.gradient(labels, weights.view(-1)[cells])
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden)
        ctx.mark_non_differentiable(den, correct)
        return num, den, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_num: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        (d_hidden,) = ctx.saved_tensors
        return d_hidden * d_num.to(d_hidden.dtype), None, None, None, None


class _ChunkedHead:
    """The frozen head, with logits buffers that all chunks reuse: one in its own dtype, one at least fp32."""

    def __init__(self, weight_VH: Tensor, rows: int, wide: torch.dtype) -> None:
        self._weight = weight_VH
        self._narrow = weight_VH.new_empty(rows, weight_VH.shape[0])
        self._wide = self._narrow if wide == weight_VH.dtype else torch.empty_like(self._narrow, dtype=wide)

    def losses(self, hidden_RH: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropies and arg-max tokens, ``[R]`` each; leaves the probabilities for `gradient`."""
        logits = torch.mm(hidden_RH, self._weight.t(), out=self._narrow[: len(labels)])
        # An explicit copy: softmax with a dtype argument converts through a fresh buffer and is far slower on CPU.
        wide = logits if self._wide is self._narrow else self._wide[: len(labels)].copy_(logits)
        of_label = wide.gather(1, labels[:, None])[:, 0]
        peak, guesses = wide.max(dim=-1)
        probs = torch.softmax(wide, -1, out=wide)
        # log-sum-exp from the largest probability, which is at least 1/V: exact where p(label) underflows.
        return peak - probs.gather(1, guesses[:, None])[:, 0].log() - of_label, guesses

    def gradient(self, labels: Tensor, scale: Tensor) -> Tensor:
        """scale · (probs - onehot) · W of the chunk that `losses` saw last: ``[R, H]``."""
        probs = self._wide[: len(labels)]
        probs.scatter_add_(1, labels[:, None], probs.new_full((len(labels), 1), -1.0))
        if self._wide is not self._narrow:
            probs = self._narrow[: len(labels)].copy_(probs)
        return (probs @ self._weight).mul_(scale[:, None].to(self._weight.dtype))
