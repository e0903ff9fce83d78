"""The "flex" backend: torch's compiled flex_attention over context rows and block rows, concatenated.

Shape letters: T = N·B query rows, S context rows; keys and values are the S context rows, then the T block rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash_core.attention.layout import BlockLayout
from dflash_core.compile.environment import clone_code

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class DenseFallback(RuntimeError):
    """A function that must run compiled was about to run eagerly, with all T x (S + T) scores in memory."""


class FlexAttention:
    """Forward and backward for one worker: the compiled functions have code objects of their own.

    Layers with the same window share a block mask; it is made anew when the layout changes. Call it on the
    worker's thread, inside a step of the gate, with `compile.environment.configure_thread` done.

    Neither `fullgraph=True` (its bookkeeping is shared by all threads in 2.13 and 2.14) nor any mode (some record
    CUDA graphs, whose pools belong to one thread) is used: docs/compile-race.md.
    """

    def __init__(self, *, compiler: str = "inductor") -> None:
        """``compiler``: torch's name of what compiles; on a CPU only "aot_eager" has a backward pass."""
        self._block_mask = torch.compile(clone_code(_block_mask), backend=compiler, dynamic=False)
        self._attend = torch.compile(clone_code(_attend), backend=compiler, dynamic=False)
        self._layout: BlockLayout | None = None
        self._masks: dict[tuple[int, int | None, bool], BlockMask] = {}

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
        """Shapes and semantics as in `block_attention`. Raises `DenseFallback` when nothing was compiled."""
        if layout is not self._layout:
            self._layout, self._masks = layout, {}
        rule = (k_ctx.shape[0], sliding_window, causal)
        if rule not in self._masks:
            self._masks[rule] = self._block_mask(layout.lo, layout.hi, layout.valid, layout.block_size, *rule)
        keys, values = torch.cat([k_ctx, k_blk]), torch.cat([v_ctx, v_blk])
        out: Tensor = self._attend(_heads_first(q), _heads_first(keys), _heads_first(values), self._masks[rule], scale)
        return out[0].transpose(0, 1)


def mask_rule(
    lo: Tensor,
    hi: Tensor,
    valid: Tensor,
    block_size: int,
    context_rows: int,
    sliding_window: int | None,
    causal: bool,
) -> MaskMod:
    """Which key each query sees, as `block_attention` defines it; ``lo, hi, valid [N]`` of a layout.

    Key index < ``context_rows``: that context row. Beyond: block row ``index - context_rows``.
    """

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block, offset = row // block_size, row % block_size
        anchor, own = hi[block], key - context_rows
        in_context = (key >= lo[block]) & (key < anchor)
        if sliding_window is not None:
            in_context = in_context & (key >= anchor + offset - (sliding_window - 1))
        in_block = own // block_size == block
        if causal:
            in_block = in_block & (own % block_size <= offset)
        return valid[block] & torch.where(key < context_rows, in_context, in_block)

    return sees


def _block_mask(
    lo: Tensor, hi: Tensor, valid: Tensor, block_size: int, context_rows: int, sliding_window: int | None, causal: bool
) -> BlockMask:
    _require_tracing("create_block_mask")
    with torch._dynamo.error_on_graph_break(True):
        sees = mask_rule(lo, hi, valid, block_size, context_rows, sliding_window, causal)
        rows = lo.shape[0] * block_size
        return create_block_mask(sees, 1, 1, rows, context_rows + rows, device=lo.device)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, scale: float) -> Tensor:
    _require_tracing("flex_attention")
    with torch._dynamo.error_on_graph_break(True):
        return flex_attention(q, keys, values, block_mask=mask, scale=scale, enable_gqa=True)


def _heads_first(rows_RHD: Tensor) -> Tensor:
    """[R, H, D] → [1, H, R, D], a view."""
    return rows_RHD.transpose(0, 1)[None]


def _require_tracing(name: str) -> None:
    """Nothing when traced by Dynamo, an error when run by the interpreter."""
    if not torch.compiler.is_dynamo_compiling():
        raise DenseFallback(
            f"{name} was not compiled and would hold all scores in memory; is TORCH_COMPILE_DISABLE or "
            "TORCHDYNAMO_DISABLE set, or set_stance in use?"
        )
