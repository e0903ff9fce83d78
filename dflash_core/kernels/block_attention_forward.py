"""Forward kernel of block attention; `dflash_core.kernels.block_attention` says what it computes.

A program owns BLOCK_M query rows of one key/value head: the G query heads that share it are rows of one tile, so
keys and values stream once for all of them. Row r of a head is query head r % G of token r // G.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The running maximum before any key was seen: finite, so that "minus infinity minus itself" never happens.
NOTHING_SEEN = tl.constexpr(-1e30)


@triton.jit
def row_tile(pid, num_tokens, kv_heads, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tile of program ``pid``: key/value head, token [BLOCK_M] and query head [BLOCK_M]; late tokens first.

    Anchors ascend, so late blocks see the most: the longest programs start first.
    """
    tile = tl.cdiv(num_tokens * G, BLOCK_M) - 1 - pid // kv_heads
    kv_head = pid % kv_heads
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return kv_head, row // G, kv_head * G + row % G


@triton.jit
def visible_rows(token, num_tokens, lo_ptr, hi_ptr, window, B: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Context rows [first, hi) that each token sees, and whether its block is valid (``hi`` is -1 if not)."""
    inside = token < num_tokens
    first = tl.load(lo_ptr + token // B, mask=inside, other=0)
    hi = tl.load(hi_ptr + token // B, mask=inside, other=-1)
    if HAS_WINDOW:
        first = tl.maximum(first, hi + token % B - window + 1)
    return first, hi, hi >= 0


@triton.jit
def context_tiles(first, hi, valid, context_rows, BLOCK_N: tl.constexpr):
    """Tiles of BLOCK_N context rows from ``begin`` on: all, and those [lead, tail) that every valid row sees fully."""
    sees = first < hi
    begin = tl.min(tl.where(sees, first, context_rows))
    end = tl.max(tl.where(sees, hi, 0))
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    lead = tl.cdiv(tl.maximum(tl.max(tl.where(valid, first, 0)) - begin, 0), BLOCK_N)
    lead = tl.minimum(lead, tiles)
    tail = tl.maximum(tl.min(tl.where(valid, hi, context_rows)) - begin, 0) // BLOCK_N
    tail = tl.maximum(tl.minimum(tail, tiles), lead)
    return begin, tiles, lead, tail


@triton.jit
def own_tokens(token, num_tokens, B: tl.constexpr):
    """The tokens [begin, end) of the blocks that a tile's rows belong to."""
    begin = tl.min(token) // B * B
    end = tl.minimum((tl.max(token) // B + 1) * B, num_tokens)
    return begin, end


@triton.jit
def in_block(token, key, B: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether a token sees the block row ``key``; the two broadcast."""
    sees = token // B == key // B
    if CAUSAL:
        sees = sees & (key <= token)
    return sees


@triton.jit
def load_rows(pointer, token, offset, stride, keep, D: tl.constexpr):
    """Rows ``pointer[token * stride + offset + 0..D]``, zeros where not ``keep``; ``offset`` is a scalar or [rows]."""
    at = token.to(tl.int64) * stride + offset
    return tl.load(pointer + at[:, None] + tl.arange(0, D)[None, :], mask=keep[:, None], other=0.0)


@triton.jit
def _update(scores, v, acc, peak, total, scale, PRECISION: tl.constexpr):
    """One tile of keys joins the running softmax of every row (arXiv 2205.14135); ``scale`` includes log2(e)."""
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    probs = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(probs, 1)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def forward_kernel(
    q_ptr,
    k_ctx,
    v_ctx,
    k_blk_ptr,
    v_blk_ptr,
    lo_ptr,
    hi_ptr,
    out_ptr,
    lse_ptr,
    num_tokens,
    context_rows,
    kv_heads,
    q_stride,
    k_blk_stride,
    v_blk_stride,
    window,
    scale,
    B: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
):
    """``k_ctx, v_ctx``: descriptors of [S, Hkv * D] in tiles [BLOCK_N, D]. ``lse [Hq, T]`` is in base 2."""
    kv_head, token, head = row_tile(tl.program_id(0), num_tokens, kv_heads, G, BLOCK_M)
    first, hi, valid = visible_rows(token, num_tokens, lo_ptr, hi_ptr, window, B, HAS_WINDOW)
    q = load_rows(q_ptr, token, head * D, q_stride, valid, D)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], NOTHING_SEEN, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)

    own_begin, own_end = own_tokens(token, num_tokens, B)
    for start in range(own_begin, own_end, BLOCK_OWN):
        key = start + tl.arange(0, BLOCK_OWN)
        keep = (key < own_end) & (tl.load(hi_ptr + key // B, mask=key < own_end, other=-1) >= 0)
        k = load_rows(k_blk_ptr, key, kv_head * D, k_blk_stride, keep, D)
        v = load_rows(v_blk_ptr, key, kv_head * D, v_blk_stride, keep, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(in_block(token[:, None], key[None, :], B, CAUSAL), scores, float("-inf"))
        acc, peak, total = _update(scores, v, acc, peak, total, scale, PRECISION)

    begin, tiles, lead, tail = context_tiles(first, hi, valid, context_rows, BLOCK_N)
    for i in range(0, tiles):
        start = begin + i * BLOCK_N
        k = k_ctx.load([start, kv_head * D])
        v = v_ctx.load([start, kv_head * D])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if (i < lead) | (i >= tail):
            key = start + tl.arange(0, BLOCK_N)[None, :]
            scores = tl.where((key >= first[:, None]) & (key < hi[:, None]), scores, float("-inf"))
        acc, peak, total = _update(scores, v, acc, peak, total, scale, PRECISION)

    total = tl.where(valid, total, 1.0)
    out = tl.where(valid[:, None], acc / total[:, None], 0.0).to(out_ptr.dtype.element_ty)
    inside = token < num_tokens
    at = (token.to(tl.int64) * (kv_heads * G) + head) * D
    tl.store(out_ptr + at[:, None] + tl.arange(0, D)[None, :], out, mask=inside[:, None])
    tl.store(lse_ptr + head.to(tl.int64) * num_tokens + token, peak + tl.log2(total), mask=inside)
