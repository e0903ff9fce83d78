"""Cross-entropy of hidden rows under a frozen head, and its gradient, while one chunk of logits exists.

A head scores a chunk (`score`: X·Wᵀ, then cross-entropies and the largest logits) and then, with the weight of every
row known, turns the same buffer into w · (softmax - onehot) and multiplies it by W (`gradient`). Nothing is computed
twice, W gets no gradient, and between the two the weights may depend on the losses. `TorchHead` says it in torch for
every device and dtype. `FusedHead` leaves the two products to cuBLAS and does the rest in two Triton kernels that move
the fewest bytes: the logits are read once by the first, read and overwritten once by the second.

Rows with a negative label count for nothing: loss 0 and gradient 0, whatever they hold. So a caller can fill a chunk up
to a size that is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE, WARPS = 2048, 8  # 8 logits a thread: loads of 16 bytes in bf16
LOWEST = tl.constexpr(-3.4e38)  # under every logit, yet finite: -inf - -inf would be NaN


@dataclass(frozen=True)
class RowScores:
    """``losses [R]``, at least fp32; ``top_ids, top_logits [R, K]``: the K largest logits of a row, best first, and of
    equal ones the lowest id first. Where the label is negative, the loss is 0 and the rest has no meaning.
    """

    losses: Tensor
    top_ids: Tensor
    top_logits: Tensor


class FrozenHead(Protocol):
    """``W [V, H]`` and the buffers for up to R rows; `gradient` belongs to the rows that `score` saw last."""

    def score(self, hidden_RH: Tensor, labels_R: Tensor, *, top_k: int = 1) -> RowScores:
        """``labels_R`` int64, below V; a row with a negative one is not scored. Logits have to be finite."""

    def gradient(self, labels_R: Tensor, weights_R: Tensor) -> Tensor:
        """Σ w·CE by the hidden rows: ``[R, H]``, in their dtype. May be called once per `score`."""


class TorchHead:
    """In torch: one buffer in the dtype of the head and one that is at least fp32."""

    def __init__(self, weight_VH: Tensor, rows: int) -> None:
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        self._weight = weight_VH
        self._narrow = weight_VH.new_empty(rows, weight_VH.shape[0])
        self._wide = self._narrow if wide == weight_VH.dtype else torch.empty_like(self._narrow, dtype=wide)

    def score(self, hidden_RH: Tensor, labels_R: Tensor, *, top_k: int = 1) -> RowScores:
        logits = torch.mm(hidden_RH, self._weight.t(), out=self._narrow[: len(labels_R)])
        # An explicit copy: softmax with a dtype argument converts through a fresh buffer and is far slower on CPU.
        wide = logits if self._wide is self._narrow else self._wide[: len(labels_R)].copy_(logits)
        of_label = wide.gather(1, labels_R.clamp(min=0)[:, None])[:, 0]
        top_logits, top_ids = wide.max(dim=1, keepdim=True) if top_k == 1 else _largest(wide, top_k)
        probs = torch.softmax(wide, -1, out=wide)
        # log-sum-exp from the largest probability, which is at least 1/V: exact where p(label) underflows.
        losses = (top_logits[:, 0] - of_label) - probs.gather(1, top_ids[:, :1])[:, 0].log()
        return RowScores(losses.masked_fill_(labels_R < 0, 0.0), top_ids, top_logits)

    def gradient(self, labels_R: Tensor, weights_R: Tensor) -> Tensor:
        probs, ignored = self._wide[: len(labels_R)], (labels_R < 0)[:, None]
        probs.scatter_add_(1, labels_R.clamp(min=0)[:, None], probs.new_full((len(labels_R), 1), -1.0))
        if self._wide is not self._narrow:
            probs = self._narrow[: len(labels_R)].copy_(probs)
        return (probs @ self._weight).mul_(weights_R[:, None].to(self._weight.dtype)).masked_fill_(ignored, 0.0)


def _largest(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=1, descending=True, stable=True)  # `topk` does not say which of equals it takes
    return values[:, :top_k], ids[:, :top_k]


class FusedHead:
    """In Triton: one buffer, in the dtype of the head. Statistics, losses and probabilities are fp32.

    On a GPU, or anywhere under Triton's interpreter. No kernel is compiled anew for another number of rows: the first
    chunk compiles everything, which matters where other threads must not meet a kernel that is half loaded.
    """

    def __init__(self, weight_VH: Tensor, rows: int, *, tile: int = TILE) -> None:
        assert weight_VH.dtype in FUSED_DTYPES, f"the kernels cannot hold {weight_VH.dtype}"
        vocab = weight_VH.shape[0]
        self._weight = weight_VH
        self._logits = weight_VH.new_empty(rows, -(-vocab // 64) * 64)[:, :vocab]  # rows begin at 128-byte lines
        self._lse = weight_VH.new_empty(rows, dtype=torch.float32)
        self._tile = tile

    def score(self, hidden_RH: Tensor, labels_R: Tensor, *, top_k: int = 1) -> RowScores:
        rows, (vocab, _) = len(labels_R), self._weight.shape
        assert 1 <= top_k <= vocab
        logits = torch.mm(hidden_RH, self._weight.t(), out=self._logits[:rows])
        scores = RowScores(
            losses=self._lse.new_empty(rows),
            top_ids=labels_R.new_empty(rows, top_k),
            top_logits=self._lse.new_empty(rows, top_k),
        )
        with torch.cuda.device_of(logits):
            _score_kernel[(rows,)](
                logits,
                labels_R,
                scores.losses,
                self._lse,
                scores.top_ids,
                scores.top_logits,
                logits.stride(0),
                vocab,
                TOP_K=top_k,
                TILE=self._tile,
                TILES=triton.next_power_of_2(triton.cdiv(vocab, self._tile)),
                num_warps=WARPS,
            )
        return scores

    def gradient(self, labels_R: Tensor, weights_R: Tensor) -> Tensor:
        logits, vocab = self._logits[: len(labels_R)], self._weight.shape[0]
        with torch.cuda.device_of(logits):
            _d_logits_kernel[(triton.cdiv(vocab, 2 * self._tile), len(labels_R))](
                logits,
                labels_R,
                weights_R,
                self._lse,
                logits.stride(0),
                vocab,
                TILE=2 * self._tile,
                num_warps=WARPS,
            )
        return logits @ self._weight


@triton.jit
def _score_kernel(
    logits,
    labels,
    losses,
    lse,
    top_ids,
    top_logits,
    stride,
    vocab,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per row. Lane l sees columns l, l + TILE, …, and keeps its own maximum and sum to the end."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label < 0:
        tl.store(losses + row, 0.0)
        for rank in range(TOP_K):
            tl.store(top_ids + row * TOP_K + rank, 0)
            tl.store(top_logits + row * TOP_K + rank, 0.0)
    else:
        line = logits + row * stride
        lanes = tl.arange(0, TILE)
        peak = tl.full([TILE], LOWEST, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        found = tl.zeros([TILE], tl.int32)  # where the tile with the lane's maximum begins
        for start in tl.range(0, vocab, TILE):
            columns = start + lanes
            x = _load(line, columns, vocab)
            gap = x - peak
            shrunk = tl.exp(-tl.abs(gap))  # one exponential serves both cases; a NaN stays in the sum
            total = tl.where(gap > 0, total * shrunk + 1.0, total + shrunk)
            found = tl.where(gap > 0, start, found)
            peak = tl.where(gap > 0, x, peak)
        best = tl.max(peak, 0)
        log_total = tl.log(tl.sum(total * tl.exp(peak - best), 0))
        tl.store(lse + row, best + log_total)
        # Not lse - logit: that would lose the digits of a small loss.
        tl.store(losses + row, best - tl.load(line + label).to(tl.float32) + log_total)
        for rank in range(TOP_K):
            best = tl.max(peak, 0)
            first = tl.min(tl.where(peak == best, found + lanes, vocab), 0)
            tl.store(top_ids + row * TOP_K + rank, first.to(tl.int64))
            tl.store(top_logits + row * TOP_K + rank, best)
            if TOP_K > 1:  # the lane that won moves on to its next largest: only its own columns are read again
                columns = first % TILE + tl.arange(0, TILES) * TILE
                x = _load(line, columns, vocab)
                x = tl.where((x < best) | ((x == best) & (columns > first)), x, float("-inf"))
                following = tl.max(x, 0)
                won = lanes == first % TILE
                found = tl.where(won, tl.min(tl.where(x == following, columns, vocab), 0) - lanes, found)
                peak = tl.where(won, following, peak)


@triton.jit
def _load(line, columns, vocab):
    return tl.load(line + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _d_logits_kernel(logits, labels, weights, lse, stride, vocab, TILE: tl.constexpr):
    """One program per tile of a row: w · (softmax - onehot) in place of the logits."""
    row = tl.program_id(1).to(tl.int64)
    label = tl.load(labels + row)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    line = logits + row * stride
    slope = tl.zeros([TILE], tl.float32)
    if label >= 0:
        probs = tl.exp(_load(line, columns, vocab) - tl.load(lse + row))
        slope = tl.load(weights + row) * tl.where(columns == label, probs - 1.0, probs)
    tl.store(line + columns, slope.to(logits.dtype.element_ty), mask=columns < vocab)
