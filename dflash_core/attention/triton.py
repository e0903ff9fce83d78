"""The "triton" backend: kernels written for blocks; nothing is traced or compiled by torch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from dflash_core.attention.layout import BlockLayout
from dflash_core.kernels.block_attention import Blocks, Rule, block_attention


class TritonAttention:
    """Forward and backward for one worker. Layers share the layout's two integers per block, made once per layout."""

    def __init__(self) -> None:
        self._layout: BlockLayout | None = None
        self._blocks: Blocks | None = None

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
    ) -> Tensor:
        """Shapes and semantics as in `block_attention`."""
        width = q.shape[2]
        padding = max(triton.next_power_of_2(width), 16) - width
        rows = (q, k_ctx, v_ctx, k_blk, v_blk)
        if padding:  # a column of zeros changes no score and no sum
            q, k_ctx, v_ctx, k_blk, v_blk = (F.pad(tensor, (0, padding)) for tensor in rows)
        rule = Rule(scale, sliding_window, causal)
        return block_attention(q, k_ctx, v_ctx, k_blk, v_blk, self._blocks_of(layout), rule)[..., :width]

    def _blocks_of(self, layout: BlockLayout) -> Blocks:
        if layout is not self._layout or self._blocks is None:
            lo, hi = layout.lo.to(torch.int32), layout.hi.to(torch.int32)
            self._layout, self._blocks = layout, Blocks(lo, hi.where(layout.valid, -1), layout.block_size)
        return self._blocks
