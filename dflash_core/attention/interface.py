"""The one door to attention: checks shapes, picks a backend."""

from __future__ import annotations

import difflib
from typing import Protocol

from torch import Tensor

from dflash_core.attention.layout import BlockLayout
from dflash_core.attention.reference import reference_attention
from dflash_core.errors import ConfigError


class AttentionBackend(Protocol):
    """See `block_attention` for shapes and semantics; all backends are tested equal to "reference"."""

    def __call__(
        self,
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
    ) -> Tensor: ...


BACKENDS: dict[str, AttentionBackend] = {"reference": reference_attention}


def block_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    layout: BlockLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    causal: bool = False,
    backend: str = "reference",
) -> Tensor:
    """Attention of T = N·B block rows over their context prefix and their own block, one softmax over both.

    ``q [T, Hq, D]``; ``k_ctx, v_ctx [S, Hkv, D]``; ``k_blk, v_blk [T, Hkv, D]``; returns ``[T, Hq, D]``.
    Query head h uses key/value head h // (Hq / Hkv). Row (block b, offset j), anchor P_b = layout.hi[b], sees

    * context row p iff lo_b <= p < P_b, and with ``sliding_window`` W also p >= P_b + j - (W - 1), so that W
      positions are in view counting its own (the rule of z-lab and SpecForge);
    * row i of its own block iff i <= j when ``causal``, every i otherwise. W >= B, so the window cuts none.

    Rows of blocks that are not valid come out as zeros. Raises `ConfigError` for an unknown backend.
    """
    num_rows, num_heads, head_dim = q.shape
    assert num_rows == layout.num_rows, f"{num_rows} query rows for {layout.num_rows} block rows"
    assert k_blk.shape == v_blk.shape == (num_rows, k_ctx.shape[1], head_dim), "k_blk, v_blk are [T, Hkv, D]"
    assert k_ctx.shape == v_ctx.shape and k_ctx.shape[2] == head_dim, "k_ctx, v_ctx are [S, Hkv, D]"
    assert num_heads % k_ctx.shape[1] == 0, "query heads must be a multiple of key/value heads"
    assert sliding_window is None or sliding_window >= layout.block_size, "the window is shorter than a block"
    attend = attention_backend(backend)
    return attend(q, k_ctx, v_ctx, k_blk, v_blk, layout, scale=scale, sliding_window=sliding_window, causal=causal)


def attention_backend(name: str) -> AttentionBackend:
    """The backend called ``name``. Raises `ConfigError` that lists the known ones."""
    if name in BACKENDS:
        return BACKENDS[name]
    near = difflib.get_close_matches(name, BACKENDS, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(sorted(BACKENDS))}"
    raise ConfigError(f"train.attention: there is no backend {name!r}", "", fix, key="train.attention")
