"""Backward kernels of block attention; `dflash_core.kernels.block_attention` says what they compute.

Probabilities are computed again from the saved log-sum-exp. Keys' and values' gradients are summed by programs that own
keys, queries' by programs that own rows: no two programs add to the same number, so no atomics are needed and equal
inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_core.kernels.block_attention_forward import (
    context_tiles,
    in_block,
    load_rows,
    own_tokens,
    row_tile,
    visible_rows,
)


@triton.jit
def delta_kernel(out_ptr, d_out_ptr, delta_ptr, num_tokens, heads, D: tl.constexpr, ROWS: tl.constexpr):
    """``delta [Hq, T]`` = rowsum(d_out * out), which is also rowsum(probabilities * their gradients)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_tokens * heads
    out = load_rows(out_ptr, row, 0, D, inside, D).to(tl.float32)
    d_out = load_rows(d_out_ptr, row, 0, D, inside, D).to(tl.float32)
    tl.store(delta_ptr + (row % heads).to(tl.int64) * num_tokens + row // heads, tl.sum(out * d_out, 1), mask=inside)


@triton.jit
def query_gradient_kernel(
    q_ptr,
    k_ctx,
    v_ctx,
    k_blk_ptr,
    v_blk_ptr,
    lo_ptr,
    hi_ptr,
    d_out_ptr,
    lse_ptr,
    delta_ptr,
    d_q_ptr,
    num_tokens,
    context_rows,
    kv_heads,
    q_stride,
    k_blk_stride,
    v_blk_stride,
    window,
    scale,
    softmax_scale,
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
    """Gradients of the queries. Rows, tiles and their order as in `forward_kernel`."""
    kv_head, token, head = row_tile(tl.program_id(0), num_tokens, kv_heads, G, BLOCK_M)
    first, hi, valid = visible_rows(token, num_tokens, lo_ptr, hi_ptr, window, B, HAS_WINDOW)
    q = load_rows(q_ptr, token, head * D, q_stride, valid, D)
    d_out = load_rows(d_out_ptr, token, head * D, kv_heads * G * D, valid, D)
    inside = token < num_tokens
    row = head.to(tl.int64) * num_tokens + token
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
    d_q = tl.zeros([BLOCK_M, D], dtype=tl.float32)

    own_begin, own_end = own_tokens(token, num_tokens, B)
    for start in range(own_begin, own_end, BLOCK_OWN):
        key = start + tl.arange(0, BLOCK_OWN)
        keep = (key < own_end) & (tl.load(hi_ptr + key // B, mask=key < own_end, other=-1) >= 0)
        k = load_rows(k_blk_ptr, key, kv_head * D, k_blk_stride, keep, D)
        v = load_rows(v_blk_ptr, key, kv_head * D, v_blk_stride, keep, D)
        probs = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        probs = tl.where(in_block(token[:, None], key[None, :], B, CAUSAL), probs, 0.0)
        d_probs = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        d_scores = probs * (d_probs - delta[:, None])
        d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision=PRECISION)

    begin, tiles, lead, tail = context_tiles(first, hi, valid, context_rows, BLOCK_N)
    for i in range(0, tiles):
        start = begin + i * BLOCK_N
        k = k_ctx.load([start, kv_head * D])
        v = v_ctx.load([start, kv_head * D])
        probs = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        if (i < lead) | (i >= tail):
            key = start + tl.arange(0, BLOCK_N)[None, :]
            probs = tl.where((key >= first[:, None]) & (key < hi[:, None]), probs, 0.0)
        d_probs = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        d_scores = probs * (d_probs - delta[:, None])
        d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision=PRECISION)

    d_q = tl.where(valid[:, None], d_q * softmax_scale, 0.0).to(d_q_ptr.dtype.element_ty)
    at = (token.to(tl.int64) * (kv_heads * G) + head) * D
    tl.store(d_q_ptr + at[:, None] + tl.arange(0, D)[None, :], d_q, mask=inside[:, None])


@triton.jit
def _row_tiles(lo_ptr, hi_ptr, num_tokens, begin, window, B: tl.constexpr, HAS_WINDOW: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_TILES: tl.constexpr):  # fmt: skip
    """Tiles [first, last) of BLOCK_M tokens, outside of which none sees the keys [begin, begin + BLOCK_N), and a run
    [full, empty) of tiles whose tokens see all of these keys; with ascending anchors of a document there are no others.

    A tile counts as seeing every key between the first and the last one that it sees.
    """
    tile = tl.arange(0, NUM_TILES)
    sees_before, sees_after = tile < 0, tile < 0
    whole = (tile + 1) * BLOCK_M <= num_tokens
    for i in tl.static_range((BLOCK_M - 1) // B + 2):
        block = tile * BLOCK_M // B + i
        inside = (block * B < (tile + 1) * BLOCK_M) & (block * B < num_tokens)
        lo = tl.load(lo_ptr + block, mask=inside, other=0)
        hi = tl.load(hi_ptr + block, mask=inside, other=-1)
        lo_last = lo
        if HAS_WINDOW:
            lo_last = tl.maximum(lo, hi + (B - window))
            lo = tl.maximum(lo, hi + (1 - window))
        sees_before = sees_before | ((lo < hi) & (lo < begin + BLOCK_N))
        sees_after = sees_after | ((lo < hi) & (hi > begin))
        whole = whole & (~inside | ((hi >= begin + BLOCK_N) & (lo_last <= begin)))
    sees = sees_before & sees_after
    first = tl.min(tl.where(sees, tile, NUM_TILES))
    last = tl.maximum(tl.max(tl.where(sees, tile + 1, 0)), first)
    full = tl.min(tl.where(whole, tile, last))
    empty = tl.min(tl.where((tile > full) & ~whole, tile, last))
    return first, last, full, tl.maximum(empty, full)


@triton.jit(do_not_specialize=["head_begin", "heads"])
def key_gradient_kernel(
    q_rows,
    d_out_rows,
    lse_ptr,
    delta_ptr,
    k_ptr,
    v_ptr,
    lo_ptr,
    hi_ptr,
    d_k_ptr,
    d_v_ptr,
    kept,
    num_tokens,
    num_keys,
    kv_heads,
    head_begin,
    heads,
    slots,
    k_stride,
    v_stride,
    splits,
    window,
    scale,
    softmax_scale,
    OWN: tl.constexpr,
    KEEP: tl.constexpr,
    REACH: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Gradients of BLOCK_N keys of one of ``heads`` heads from ``head_begin``: context rows, or with OWN block rows.

    ``q_rows, d_out_rows``: descriptors of [T, Hq * D] in tiles [BLOCK_M, D]. ``splits`` programs share the query
    rows of a tile; program s of them writes ``d_k[s], d_v[s]``, each [num_keys, Hkv, D]. With KEEP the gradients of
    the scores go to ``kept``, for `kept_query_gradient_kernel`.
    """
    head_in_buffer = tl.program_id(0) % heads
    kv_head = head_begin + head_in_buffer
    split = tl.program_id(0) // heads % splits
    key_tile = tl.program_id(0) // (heads * splits)
    begin = key_tile * BLOCK_N
    key = begin + tl.arange(0, BLOCK_N)
    keep = key < num_keys
    row_tiles = tl.cdiv(num_tokens, BLOCK_M)
    if OWN:
        keep = keep & (tl.load(hi_ptr + key // B, mask=keep, other=-1) >= 0)
        first = begin // B * B // BLOCK_M
        last = tl.minimum(tl.cdiv(((begin + BLOCK_N - 1) // B + 1) * B, BLOCK_M), row_tiles)
        full, empty = first, first
    else:
        first, last, full, empty = _row_tiles(
            lo_ptr, hi_ptr, num_tokens, begin, window, B, HAS_WINDOW, BLOCK_M, BLOCK_N, NUM_TILES
        )
    k = load_rows(k_ptr, key, kv_head * D, k_stride, keep, D)
    v = load_rows(v_ptr, key, kv_head * D, v_stride, keep, D)
    d_k = tl.zeros([BLOCK_N, D], dtype=tl.float32)
    d_v = tl.zeros([BLOCK_N, D], dtype=tl.float32)
    share = tl.cdiv(last - first, splits)
    mine = first + split * share
    end = tl.maximum(tl.minimum(mine + share, last), mine)

    # All G heads of a tile of tokens follow each other; tiles outside of [full, empty) need the mask.
    for i in range(mine * G, end * G):
        tile = i // G
        head = kv_head * G + i % G
        token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q = q_rows.load([tile * BLOCK_M, head * D])
        d_out = d_out_rows.load([tile * BLOCK_M, head * D])
        row = head.to(tl.int64) * num_tokens + token
        lse = tl.load(lse_ptr + row, mask=token < num_tokens, other=0.0)
        delta = tl.load(delta_ptr + row, mask=token < num_tokens, other=0.0)
        probs = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
        if (i < full * G) | (i >= empty * G):
            first_row, hi, valid = visible_rows(token, num_tokens, lo_ptr, hi_ptr, window, B, HAS_WINDOW)
            if OWN:
                sees = in_block(token[None, :], key[:, None], B, CAUSAL) & valid[None, :]
            else:
                sees = (key[:, None] >= first_row[None, :]) & (key[:, None] < hi[None, :])
            probs = tl.where(sees, probs, 0.0)
        d_v = tl.dot(probs.to(q.dtype), d_out, d_v, input_precision=PRECISION)
        d_probs = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
        d_scores = (probs * (d_probs - delta[None, :])).to(q.dtype)
        if KEEP:
            slot = slots - 1 - REACH + key_tile - tile if OWN else key_tile
            kept.store([((head_in_buffer * row_tiles + tile) * slots + slot) * BLOCK_N, i % G * BLOCK_M], d_scores)
        d_k = tl.dot(d_scores, q, d_k, input_precision=PRECISION)

    row = (split.to(tl.int64) * num_keys + key) * kv_heads + kv_head
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    inside = (key < num_keys)[:, None]
    tl.store(d_k_ptr + at, (d_k * softmax_scale).to(d_k_ptr.dtype.element_ty), mask=inside)
    tl.store(d_v_ptr + at, d_v.to(d_v_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["head_begin", "heads"])
def kept_query_gradient_kernel(
    kept,
    k_ctx,
    k_blk_ptr,
    lo_ptr,
    hi_ptr,
    d_q_ptr,
    num_tokens,
    context_rows,
    kv_heads,
    head_begin,
    heads,
    slots,
    k_blk_stride,
    window,
    softmax_scale,
    REACH: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Gradients of the queries of BLOCK_M tokens of HEADS heads: kept gradients of the scores, times keys.

    ``kept [heads, row tiles, slots, BLOCK_N, G * BLOCK_M]``, read in tiles [BLOCK_N, HEADS * BLOCK_M]: slot s of a
    row tile has the scores against context rows from s * BLOCK_N on, the last 2 * REACH + 1 those against block rows
    of this and the neighbouring row tiles. Only what a row sees was written, in the same tiles.
    """
    groups: tl.constexpr = G // HEADS
    row_tiles = tl.cdiv(num_tokens, BLOCK_M)
    tile = row_tiles - 1 - tl.program_id(0) // (heads * groups)
    head_in_buffer = tl.program_id(0) // groups % heads
    group = tl.program_id(0) % groups
    kv_head = head_begin + head_in_buffer
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first, hi, _ = visible_rows(token, num_tokens, lo_ptr, hi_ptr, window, B, HAS_WINDOW)
    sees = first < hi
    begin = tl.min(tl.where(sees, first, context_rows)) // BLOCK_N
    end = tl.cdiv(tl.max(tl.where(sees, hi, 0)), BLOCK_N)
    slot = (head_in_buffer * row_tiles + tile) * slots
    d_q = tl.zeros([HEADS * BLOCK_M, D], dtype=tl.float32)
    for i in range(begin, end):
        d_scores = kept.load([(slot + i) * BLOCK_N, group * HEADS * BLOCK_M])
        k = k_ctx.load([i * BLOCK_N, kv_head * D])
        d_q = tl.dot(tl.trans(d_scores), k, d_q, input_precision=PRECISION)
    own_begin = tile * BLOCK_M // B * B // BLOCK_N
    own_end = tl.cdiv(tl.minimum(((tile * BLOCK_M + BLOCK_M - 1) // B + 1) * B, num_tokens), BLOCK_N)
    for i in range(own_begin, own_end):
        key = i * BLOCK_N + tl.arange(0, BLOCK_N)
        keep = key < num_tokens
        keep = keep & (tl.load(hi_ptr + key // B, mask=keep, other=-1) >= 0)
        k = load_rows(k_blk_ptr, key, kv_head * D, k_blk_stride, keep, D)
        d_scores = kept.load([(slot + slots - 1 - REACH + i - tile) * BLOCK_N, group * HEADS * BLOCK_M])
        d_q = tl.dot(tl.trans(d_scores), k, d_q, input_precision=PRECISION)

    row = tl.arange(0, HEADS * BLOCK_M)
    token = tile * BLOCK_M + row % BLOCK_M
    inside = token < num_tokens
    head = kv_head * G + group * HEADS + row // BLOCK_M
    at = ((token.to(tl.int64) * (kv_heads * G) + head) * D)[:, None] + tl.arange(0, D)[None, :]
    tl.store(d_q_ptr + at, (d_q * softmax_scale).to(d_q_ptr.dtype.element_ty), mask=inside[:, None])
