"""Block attention: rows of T = N·B block tokens over a context prefix and over their own block, one softmax over both.

It computes what `dflash_core.attention.reference_attention` does, for blocks given as two integers each, not as a mask.
Nothing is added by two programs, so equal inputs give equal bits.

Shape letters: T block tokens in N blocks of B, S context rows, Hq query heads, Hkv key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_core.kernels.block_attention_backward import (
    delta_kernel,
    kept_query_gradient_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from dflash_core.kernels.block_attention_forward import forward_kernel
from dflash_core.kernels.block_attention_tiles import Tile, tiles_for

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = math.log2(math.e)
# Memory for gradients of scores, of as many key/value heads at a time as fit. With it the queries' gradients are one
# product more; heads that do not fit alone compute their scores again instead, which is three.
KEPT_BYTES = 0
# Programs that share the context's keys, about: few key tiles leave multiprocessors idle, and the first one is seen by
# every block. A constant rather than a count of multiprocessors, so that sums do not depend on the GPU.
KEY_PROGRAMS = 512


class Blocks(NamedTuple):
    """Block b sees context rows [lo[b], hi[b]); ``lo, hi [N]`` are int32, ``hi`` is -1 for an unused slot."""

    lo: Tensor
    hi: Tensor
    size: int


class Rule(NamedTuple):
    """How rows score keys; `dflash_core.attention.block_attention` says what the options mean."""

    scale: float
    window: int | None
    causal: bool


class _Inputs(NamedTuple):
    q: Tensor
    k_ctx: Tensor
    v_ctx: Tensor
    k_blk: Tensor
    v_blk: Tensor

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k_blk.shape[1]

    def sizes(self) -> tuple[int, int, int]:
        """Block tokens, context rows, key/value heads."""
        return self.q.shape[0], self.k_ctx.shape[0], self.k_blk.shape[1]

    def context(self, count: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Descriptors of the context in tiles of ``count`` rows; of rows that nobody reads if it is empty."""
        if not self.k_ctx.shape[0]:
            return _tiled(self.k_blk, count), _tiled(self.v_blk, count)
        return _tiled(self.k_ctx, count), _tiled(self.v_ctx, count)

    def grid(self, tile: Tile) -> tuple[int]:
        """A program for each ``tile.rows`` rows of a key/value head; each of its query heads has a row per token."""
        tokens, _, kv_heads = self.sizes()
        return (triton.cdiv(tokens * self.group, tile.rows) * kv_heads,)


def block_attention(
    q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, blocks: Blocks, rule: Rule
) -> Tensor:
    """``q [T, Hq, D]``; ``k_ctx, v_ctx [S, Hkv, D]``; ``k_blk, v_blk [T, Hkv, D]``; returns ``[T, Hq, D]``.

    D is a power of two from 16 to 256. bf16, fp16 or fp32; fp32 is multiplied in IEEE precision. Rows of unused slots
    come out as zeros and get zero gradients; they may hold anything finite. Any order of blocks gives the right
    result; ascending ``hi`` within each document makes it fast.
    """
    assert q.dtype in DTYPES and 16 <= q.shape[2] <= 256 and q.shape[2] & (q.shape[2] - 1) == 0
    assert q.is_cuda or q.dtype != torch.bfloat16, (
        "Triton's interpreter multiplies the bits of bf16 numbers as integers"
    )
    assert rule.scale > 0 and blocks.lo.dtype == blocks.hi.dtype == torch.int32
    apply: Callable[..., Tensor] = _BlockAttention.apply
    return apply(*(_heads_together(rows) for rows in (q, k_ctx, v_ctx, k_blk, v_blk)), blocks, rule)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor, blocks: Blocks, rule: Rule
    ) -> Tensor:
        rows, tile = _Inputs(q, k_ctx, v_ctx, k_blk, v_blk), tiles_for(q).forward
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        forward_kernel[rows.grid(tile)](
            q,
            *rows.context(tile.keys),
            k_blk,
            v_blk,
            blocks.lo,
            blocks.hi,
            out,
            lse,
            *rows.sizes(),
            q.stride(0),
            k_blk.stride(0),
            v_blk.stride(0),
            rule.window or 0,
            rule.scale * LOG2_E,
            CAUSAL=rule.causal,
            BLOCK_OWN=_own_keys(tile, rows.group),
            **_constants(rows, blocks, rule),
            **tile.options(),
        )
        ctx.save_for_backward(q, k_ctx, v_ctx, k_blk, v_blk, blocks.lo, blocks.hi, out, lse)
        ctx.rule, ctx.block_size = rule, blocks.size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, lo, hi, out, lse = ctx.saved_tensors
        backward = _Backward(_Inputs(*inputs), Blocks(lo, hi, ctx.block_size), ctx.rule, out, lse, d_out.contiguous())
        return *backward.gradients(), None, None


class _Backward:
    """One backward pass over ``out, d_out [T, Hq, D]`` and ``lse [Hq, T]``."""

    def __init__(self, rows: _Inputs, blocks: Blocks, rule: Rule, out: Tensor, lse: Tensor, d_out: Tensor) -> None:
        self.rows, self.blocks, self.rule = rows, blocks, rule
        self.out, self.lse, self.d_out = out, lse, _heads_together(d_out)
        self.delta = torch.empty_like(lse)
        self.d_q = torch.empty_like(out)
        self.tiles = tiles_for(rows.q)
        tokens, context_rows, self.kv_heads = rows.sizes()
        side = self.tiles.key.keys
        self.row_tiles, self.key_tiles = triton.cdiv(tokens, side), triton.cdiv(context_rows, side)
        # Blocks that straddle tiles of tokens reach into neighbouring ones.
        self.reach = 0 if side % blocks.size == 0 else triton.cdiv(blocks.size - 1, side)
        self.slots = self.key_tiles + 2 * self.reach + 1
        self.kept_shape = (self.row_tiles * self.slots * side, rows.group * side)  # of one key/value head

    def gradients(self) -> tuple[Tensor, ...]:
        """Of q, k_ctx, v_ctx, k_blk, v_blk."""
        rows = self.rows
        at_once = KEPT_BYTES // (math.prod(self.kept_shape) * rows.q.element_size())
        heads = triton.cdiv(self.kv_heads, triton.cdiv(self.kv_heads, at_once)) if at_once else self.kv_heads
        kept = rows.q.new_empty(heads * self.kept_shape[0], self.kept_shape[1]) if at_once else None
        splits = _splits(self.key_tiles * heads, self.row_tiles)
        dtype = rows.q.dtype if splits == 1 else torch.float32
        d_context = torch.empty((2, splits, *rows.k_ctx.shape), dtype=dtype, device=rows.q.device)
        d_block = torch.empty((2, 1, *rows.k_blk.shape), dtype=rows.q.dtype, device=rows.q.device)
        self._sum_delta()
        for begin in range(0, self.kv_heads, heads):
            some = range(begin, min(begin + heads, self.kv_heads))
            self._key_gradients(rows.k_ctx, rows.v_ctx, d_context, kept, some, own=False)
            self._key_gradients(rows.k_blk, rows.v_blk, d_block, kept, some, own=True)
            if kept is not None:
                self._kept_query_gradients(kept, some)
        if kept is None:
            self._query_gradients()
        if splits > 1:
            d_context = d_context.sum(1, keepdim=True).to(rows.q.dtype)
        return self.d_q, *d_context[:, 0].unbind(), *d_block[:, 0].unbind()

    def _sum_delta(self) -> None:
        tokens, heads, width = self.rows.q.shape
        count = 32
        grid = (triton.cdiv(tokens * heads, count),)
        delta_kernel[grid](self.out, self.d_out, self.delta, tokens, heads, D=width, ROWS=count)

    def _key_gradients(
        self, k: Tensor, v: Tensor, sums: Tensor, kept: Tensor | None, heads: range, *, own: bool
    ) -> None:
        """Into ``sums [2, splits, keys, Hkv, D]``: of keys and of values."""
        tile, splits = self.tiles.key, sums.shape[1]
        key_gradient_kernel[(triton.cdiv(k.shape[0], tile.keys) * len(heads) * splits,)](
            _tiled(self.rows.q, tile.rows),
            _tiled(self.d_out, tile.rows),
            self.lse,
            self.delta,
            k,
            v,
            self.blocks.lo,
            self.blocks.hi,
            sums[0],
            sums[1],
            None if kept is None else TensorDescriptor(kept, kept.shape, kept.stride(), [tile.keys, tile.rows]),
            self.rows.q.shape[0],
            k.shape[0],
            self.kv_heads,
            heads.start,
            len(heads),
            self.slots,
            k.stride(0),
            v.stride(0),
            splits,
            self.rule.window or 0,
            self.rule.scale * LOG2_E,
            self.rule.scale,
            OWN=own,
            KEEP=kept is not None,
            REACH=self.reach,
            CAUSAL=self.rule.causal,
            NUM_TILES=triton.next_power_of_2(self.row_tiles),
            **_constants(self.rows, self.blocks, self.rule),
            **tile.options(),
        )

    def _query_gradients(self) -> None:
        rows, tile = self.rows, self.tiles.query
        query_gradient_kernel[rows.grid(tile)](
            rows.q,
            *rows.context(tile.keys),
            rows.k_blk,
            rows.v_blk,
            self.blocks.lo,
            self.blocks.hi,
            self.d_out,
            self.lse,
            self.delta,
            self.d_q,
            *rows.sizes(),
            rows.q.stride(0),
            rows.k_blk.stride(0),
            rows.v_blk.stride(0),
            self.rule.window or 0,
            self.rule.scale * LOG2_E,
            self.rule.scale,
            CAUSAL=self.rule.causal,
            BLOCK_OWN=_own_keys(tile, rows.group),
            **_constants(rows, self.blocks, self.rule),
            **tile.options(),
        )

    def _kept_query_gradients(self, kept: Tensor, heads: range) -> None:
        rows, tile = self.rows, self.tiles.kept
        together = math.gcd(rows.group, self.tiles.heads)
        kept_query_gradient_kernel[(self.row_tiles * len(heads) * (rows.group // together),)](
            TensorDescriptor(kept, kept.shape, kept.stride(), [tile.keys, together * tile.rows]),
            rows.context(tile.keys)[0],
            rows.k_blk,
            self.blocks.lo,
            self.blocks.hi,
            self.d_q,
            *rows.sizes(),
            heads.start,
            len(heads),
            self.slots,
            rows.k_blk.stride(0),
            self.rule.window or 0,
            self.rule.scale,
            REACH=self.reach,
            HEADS=together,
            **_constants(rows, self.blocks, self.rule),
            **tile.options(),
        )


def _splits(programs: int, row_tiles: int) -> int:
    """In how many parts the rows of a key tile are summed: a power of two, so few that every part can have a tile."""
    splits = 1
    while programs * splits < KEY_PROGRAMS and splits * 2 <= row_tiles:
        splits *= 2
    return splits


def _heads_together(rows: Tensor) -> Tensor:
    """``[R, H, D]`` with each row's heads side by side and 16-byte aligned; a copy only if it is not so already."""
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return rows if aligned and rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


def _tiled(rows: Tensor, count: int) -> TensorDescriptor:
    """A descriptor of ``rows [R, H, D]`` in tiles of ``count`` rows of one head."""
    size, heads, width = rows.shape
    return TensorDescriptor(rows, [size, heads * width], [rows.stride(0), 1], [count, width])


def _own_keys(tile: Tile, group: int) -> int:
    """Block rows of a step: as many as a tile of rows has tokens, if that many fit."""
    return min(max(triton.next_power_of_2(triton.cdiv(tile.rows, group)), 16), tile.keys)


def _constants(rows: _Inputs, blocks: Blocks, rule: Rule) -> dict[str, Any]:
    return {
        "B": blocks.size,
        "G": rows.group,
        "D": rows.q.shape[2],
        "HAS_WINDOW": rule.window is not None,
        "PRECISION": "ieee" if rows.q.dtype == torch.float32 else "tf32",
    }
