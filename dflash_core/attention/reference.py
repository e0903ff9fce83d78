"""Dense attention in chunks of blocks: the meaning of block attention, on any device and in any dtype.

Scores exist for one chunk of neighbouring blocks at a time, over the union of their visible context rows.
The backward pass computes them again, as FlashAttention does (arXiv 2205.14135), so memory is O(T + S) plus
one chunk. Scores and sums are at least fp32, whatever the inputs are.

Shape letters: K key/value heads, G query heads per key/value head, T block rows, S context rows, D head
width, n blocks in a chunk, B block size, L context rows of a chunk, R = n·B·G query rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_core.attention.layout import BlockLayout

# Scores per chunk. On CPU 2^18 fp32 values (1 MB) stay in cache; a GPU wants fewer and larger kernels.
CHUNK_SCORES_CPU = 1 << 18
CHUNK_SCORES_GPU = 1 << 26


def reference_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    layout: BlockLayout,
    *,
    scale: float,
    sliding_window: int | None,
    causal: bool,
) -> Tensor:
    """The "reference" backend; shapes and semantics as in `block_attention`."""
    rule = _Rule(layout, scale, sliding_window, causal)
    apply: Callable[..., Tensor] = _ReferenceAttention.apply
    return apply(q, k_ctx, v_ctx, k_blk, v_blk, rule)


@dataclass(frozen=True)
class _Rule:
    layout: BlockLayout
    scale: float
    sliding_window: int | None
    causal: bool


@dataclass(frozen=True)
class Chunk:
    """Blocks [first, last) and the context rows [lo, hi) that at least one of their rows may see."""

    first: int
    last: int
    lo: int
    hi: int


def plan_chunks(layout: BlockLayout, *, sliding_window: int | None, num_heads: int, limit: int) -> list[Chunk]:
    """Group neighbouring valid blocks of a document while their Hq·n·B·(L + B) scores are within ``limit``."""
    chunks: list[Chunk] = []
    document = -1
    for b, span in enumerate(layout.spans):
        if span is None:
            continue
        doc_lo, hi = span
        lo = doc_lo if sliding_window is None else max(doc_lo, hi - sliding_window + 1)
        chunk = Chunk(b, b + 1, min(lo, hi), hi)
        if chunks and chunks[-1].last == b and document == doc_lo:
            before = chunks[-1]
            merged = Chunk(before.first, b + 1, min(before.lo, chunk.lo), max(before.hi, hi))
            rows = (merged.last - merged.first) * layout.block_size
            if num_heads * rows * (merged.hi - merged.lo + layout.block_size) <= limit:
                chunks[-1] = merged
                continue
        chunks.append(chunk)
        document = doc_lo
    return chunks


class _HeadMajor(NamedTuple):
    """The five inputs (or their gradients) with heads first, in the dtype that sums are kept in."""

    q: Tensor  # [K, T, G, D], contiguous
    k_ctx: Tensor  # [K, S, D]
    v_ctx: Tensor
    k_blk: Tensor  # [K, T, D]
    v_blk: Tensor

    def part(self, chunk: Chunk, block_size: int) -> _HeadMajor:
        """Views of one chunk: q [K, R, D], context [K, L, D], block [K, n, B, D]."""
        rows = slice(chunk.first * block_size, chunk.last * block_size)
        keys = slice(chunk.lo, chunk.hi)
        q = self.q[:, rows]
        return _HeadMajor(
            q.view(q.shape[0], -1, q.shape[3]),
            self.k_ctx[:, keys],
            self.v_ctx[:, keys],
            _split(self.k_blk[:, rows], 1, block_size),
            _split(self.v_blk[:, rows], 1, block_size),
        )


class _ReferenceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, rule: _Rule) -> Tensor:
        size = rule.layout.block_size
        inputs = _head_major(q, k_ctx, v_ctx, k_blk, v_blk, rule.scale)
        out_KTGD = torch.zeros_like(inputs.q)
        for chunk in _chunks(rule, q):
            part = inputs.part(chunk, size)
            probs = _scores(part, chunk, rule).softmax(-1)
            _rows(out_KTGD, chunk, size).copy_(_over_values(probs, part.v_ctx, part.v_blk))
        out = _row_major(out_KTGD).to(q.dtype)
        ctx.save_for_backward(q, k_ctx, v_ctx, k_blk, v_blk, out)
        ctx.rule = rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k_ctx, v_ctx, k_blk, v_blk, out = ctx.saved_tensors
        rule: _Rule = ctx.rule
        size = rule.layout.block_size
        inputs = _head_major(q, k_ctx, v_ctx, k_blk, v_blk, rule.scale)
        grads = _HeadMajor(*(torch.zeros_like(tensor) for tensor in inputs))
        grad_out_KTGD = _query_major(grad_out, inputs.k_ctx.shape[0])
        # Softmax backward needs rowsum(P * dP), and that equals rowsum(dO * O).
        delta_KTG = (grad_out_KTGD * _query_major(out, inputs.k_ctx.shape[0])).sum(-1)
        for chunk in _chunks(rule, q):
            part, into = inputs.part(chunk, size), grads.part(chunk, size)
            d_out = _rows(grad_out_KTGD, chunk, size)
            probs = _scores(part, chunk, rule).softmax(-1)
            _add(into.v_ctx, into.v_blk, probs, d_out)
            d_scores = _against_keys(d_out, part.v_ctx, part.v_blk)
            d_scores.sub_(_rows(delta_KTG, chunk, size).view(*probs.shape[:3], 1)).mul_(probs)
            into.q.copy_(_over_values(d_scores, part.k_ctx, part.k_blk))
            _add(into.k_ctx, into.k_blk, d_scores, part.q)
        rows = (_row_major(grads.q.mul_(rule.scale)), *(grad.transpose(0, 1) for grad in grads[1:]))
        return (*(grad.to(grad_out.dtype) for grad in rows), None)


def _chunks(rule: _Rule, q: Tensor) -> list[Chunk]:
    limit = CHUNK_SCORES_CPU if q.device.type == "cpu" else CHUNK_SCORES_GPU
    return plan_chunks(rule.layout, sliding_window=rule.sliding_window, num_heads=q.shape[1], limit=limit)


def _head_major(q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, scale: float) -> _HeadMajor:
    """The inputs heads first; the queries are already multiplied with ``scale``."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = (tensor.transpose(0, 1).to(dtype) for tensor in (k_ctx, v_ctx, k_blk, v_blk))
    return _HeadMajor(_query_major(q, k_ctx.shape[1]) * scale, *keys)


def _split(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A view with dimension ``dim`` split in two, the second of ``size``."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])


def _query_major(rows_THD: Tensor, kv_heads: int) -> Tensor:
    """[T, Hq, D] → [K, T, G, D], contiguous."""
    dtype = torch.promote_types(rows_THD.dtype, torch.float32)
    return _split(rows_THD, 1, rows_THD.shape[1] // kv_heads).transpose(0, 1).to(dtype).contiguous()


def _row_major(rows_KTGD: Tensor) -> Tensor:
    """[K, T, G, D] → [T, Hq, D]."""
    return rows_KTGD.transpose(0, 1).flatten(1, 2)


def _rows(tensor_KTG: Tensor, chunk: Chunk, block_size: int) -> Tensor:
    """A view of the chunk's rows: [K, T, G, …] → [K, R, …]."""
    return tensor_KTG[:, chunk.first * block_size : chunk.last * block_size].flatten(1, 2)


def _scores(part: _HeadMajor, chunk: Chunk, rule: _Rule) -> Tensor:
    """Scores [K, n, B·G, L + B], -inf where the row must not look."""
    scores = _against_keys(part.q, part.k_ctx, part.k_blk)
    size, length = rule.layout.block_size, chunk.hi - chunk.lo
    by_offset = _split(scores, 2, scores.shape[2] // size)  # [K, n, B, G, L + B]
    if rule.sliding_window is not None or chunk.last - chunk.first > 1:
        hidden = _hidden_context(chunk, rule, scores.device)
        by_offset[..., :length].masked_fill_(hidden, -torch.inf)
    if rule.causal:
        later = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu_(1)
        by_offset[..., length:].masked_fill_(later[:, None, :], -torch.inf)
    return scores


def _hidden_context(chunk: Chunk, rule: _Rule, device: torch.device) -> Tensor:
    """True where context row p is out of sight: [n, 1, 1, L], or [n, B, 1, L] with a sliding window."""
    anchors = rule.layout.hi[chunk.first : chunk.last].to(device)[:, None, None, None]
    p = torch.arange(chunk.lo, chunk.hi, device=device)
    hidden = p >= anchors
    if rule.sliding_window is not None:
        offsets = torch.arange(rule.layout.block_size, device=device)[:, None, None]
        hidden = hidden | (p < anchors + offsets - (rule.sliding_window - 1))
    return hidden


def _against_keys(rows_KRD: Tensor, ctx_KLD: Tensor, blk_KnBD: Tensor) -> Tensor:
    """Dot products of every row with the context rows and with its own block: [K, n, B·G, L + B]."""
    rows = rows_KRD.shape[1] // blk_KnBD.shape[1]
    with_context = _split(rows_KRD @ ctx_KLD.transpose(1, 2), 1, rows)
    with_block = _split(rows_KRD, 1, rows) @ blk_KnBD.transpose(2, 3)
    return torch.cat([with_context, with_block], dim=-1)


def _over_values(weights: Tensor, ctx_KLD: Tensor, blk_KnBD: Tensor) -> Tensor:
    """Sums of context and block rows with ``weights [K, n, B·G, L + B]``: [K, R, D]."""
    length = ctx_KLD.shape[1]
    from_context = weights[..., :length].flatten(1, 2) @ ctx_KLD
    from_block = weights[..., length:] @ blk_KnBD
    return from_context.add_(from_block.flatten(1, 2))


def _add(into_ctx_KLD: Tensor, into_blk_KnBD: Tensor, weights: Tensor, rows_KRD: Tensor) -> None:
    """The transpose of `_over_values`: weightsᵀ · rows is added to context rows, written to block rows."""
    length = into_ctx_KLD.shape[1]
    into_ctx_KLD.add_(weights[..., :length].flatten(1, 2).transpose(1, 2) @ rows_KRD)
    by_block = _split(rows_KRD, 1, weights.shape[2])
    into_blk_KnBD.copy_(weights[..., length:].transpose(2, 3) @ by_block)
