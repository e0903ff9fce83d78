"""Cross-entropy of block rows under the target's frozen head, as an additive pair, without keeping logits.

Only rows that have something to predict meet the head. Their gradient is computed in the forward pass, chunk by chunk,
while the logits exist. The head never gets a gradient, so this costs two matrix products per row and the memory of one
chunk. A chunk holds whole blocks, because D-PACE weights of an offset depend on the losses of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_core.kernels.linear_cross_entropy import FUSED_DTYPES, FrozenHead, FusedHead, TorchHead
from dflash_core.objective.metrics import MetricSums, block_metrics
from dflash_core.objective.scored_rows import ScoredRows
from dflash_core.objective.weights import decay_weights, dpace_weights

# Rows of one logits buffer: on CPU it should be touched again while pages are warm, a GPU wants a large product.
CHUNK_ROWS_CPU = 256
CHUNK_ROWS_GPU = 2048
# The kernels' chunks are filled up to whole tiles of a matrix product: few shapes, and a filler costs nothing there.
TILE_ROWS = 128
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
    fused: bool | None = None,
) -> LossTerms:
    """Weighted cross-entropy of ``hidden [N·B, H]`` against ``labels [N, B]`` where ``supervised [N, B]``.

    ``head_weight [V, H]`` in the dtype of ``hidden``. Weights: ``decay`` exp(-(k-1)/γ), ``dpace`` see
    `dpace_weights`; the denominator is the sum of weights for both. Losses are at least fp32. ``fused``: Triton
    kernels instead of torch; by default where ``hidden`` is on a GPU and they know its dtype.

    Nothing here waits for a device. ``labels`` and ``supervised`` on the CPU: the rows to score are picked there, and
    the last chunk may be short. Both on a device: all N·(B-1) rows are scored, so that shapes never change, which a
    CUDA graph needs; what is not supervised counts for nothing.
    """
    assert hidden.shape[0] == labels.numel() and labels.shape == supervised.shape
    assert hidden.dtype == head_weight.dtype, f"hidden is {hidden.dtype}, the head {head_weight.dtype}"
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weigh: Weigh = partial(dpace_weights, alpha=dpace_alpha)
    if kind == "decay":
        table = decay_weights(labels.shape[1], gamma, device=hidden.device).to(wide)
        weigh = partial(_constant_weights, table)
    limit = chunk_rows or (CHUNK_ROWS_CPU if hidden.device.type == "cpu" else CHUNK_ROWS_GPU)
    if fused is None:
        fused = hidden.is_cuda and hidden.dtype in FUSED_DTYPES
    multiple, every = TILE_ROWS if fused else 1, supervised.device.type != "cpu"
    rows = ScoredRows.of(labels, supervised, hidden.device, limit=limit, multiple=multiple, every=every)
    head: FrozenHead = (FusedHead if fused else TorchHead)(head_weight, rows.capacity)
    learns = hidden.requires_grad and torch.is_grad_enabled()
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _FrozenHeadLoss.apply
    num, den, correct = apply(hidden, head, rows, weigh, learns)
    return LossTerms(num, den, block_metrics(num, den, correct, rows.supervised))


def _constant_weights(table: Tensor, losses: Tensor, supervised: Tensor) -> Tensor:
    return table * supervised.to(losses.dtype)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: FrozenHead, rows: ScoredRows, weigh: Weigh, learns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_zeros(rows.labels.shape, dtype=wide)  # like the weights, one per block row
        weights, correct = torch.zeros_like(losses), torch.zeros_like(losses, dtype=torch.bool)
        d_hidden = torch.zeros_like(hidden) if learns else None
        for index, blocks in rows.chunks:
            labels = rows.labels.view(-1)[index]
            scores = head.score(hidden[index], labels)
            losses.view(-1)[index] = scores.losses
            correct.view(-1)[index] = scores.top_ids[:, 0] == labels
            weights[blocks, 1:] = weigh(losses[blocks, 1:], rows.supervised[blocks])
            if d_hidden is not None:
                d_hidden[index] = head.gradient(labels, weights.view(-1)[index])
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden)
        num, den, correct = (weights * losses).sum(), weights.sum(), correct[:, 1:]
        ctx.mark_non_differentiable(den, correct)
        return num, den, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_num: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        (d_hidden,) = ctx.saved_tensors
        return d_hidden * d_num.to(d_hidden.dtype), None, None, None, None
