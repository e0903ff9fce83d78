"""The drafter's forward and backward on a GPU: the meaning of `model.py`, in fewer passes over memory.

Same parameters, same result up to rounding. The autograd functions cut a layer where a tensor has to be kept anyway:
the residual stream, q, k, v, the mixed heads, gate and up stay; normed rows and silu(gate)·up are computed again.
Weights of q, k and v lie behind each other in memory, so that one product serves them all. Nothing here waits for the
device, and every shape depends on the inputs' shapes only.

Shape letters as in `model.py`; K key/value heads, Q query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dflash_core.attention import AttentionBackend, BlockLayout, block_attention
from dflash_core.kernels.norm_rotate import norm_rotate, norm_rotate_backward
from dflash_core.kernels.rms_norm import add_rms_norm, rms_norm_backward
from dflash_core.kernels.swiglu import swiglu, swiglu_backward

if TYPE_CHECKING:
    from dflash_core.drafter.model import DraftLayer, RMSNorm, Rotary

Grads = tuple[Tensor | None, ...]


def can_fuse(rows: Tensor, *, biased: bool) -> bool:
    """Whether the kernels cover these rows: on a GPU, at most fp32, and no projection with a bias."""
    return rows.is_cuda and rows.dtype != torch.float64 and not biased


def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [R, H]``, differentiable."""
    return _apply(_AddNorm, x, None, weight, eps)


def fused_layers(
    layers: Sequence[DraftLayer],
    norm_weight: Tensor,
    block_embeds: Tensor,
    context: Tensor,
    block_rotary: Rotary,
    context_rotary: Rotary,
    layout: BlockLayout,
    attention: AttentionBackend,
) -> Tensor:
    """All layers and the final norm: ``block_embeds [T, H]``, ``context [S, H]`` → ``[T, H]``.

    The rows 1 … B-1 of all blocks must be one row, the mask token's; no gradient flows into ``block_embeds``.
    """
    eps = layers[0].input_layernorm.eps
    x, branch = block_embeds.detach(), None
    for index, layer in enumerate(layers):
        part, mlp = layer.self_attn, layer.mlp
        settle(part.q_proj, part.k_proj, part.v_proj)
        weights = _weights(layer.input_layernorm, part.q_proj, part.k_proj, part.v_proj, part.q_norm, part.k_norm)
        masked = layout.block_size if index == 0 else 0
        x, q, k_ctx, v_ctx, k_blk, v_blk = _apply(
            _AttentionInput, x, branch, context, *weights, *block_rotary, *context_rotary, eps, masked
        )
        mixed = block_attention(
            q,
            k_ctx,
            v_ctx,
            k_blk,
            v_blk,
            layout,
            scale=part.head_dim**-0.5,
            sliding_window=part.window,
            causal=part.causal,
            backend=attention,
        )
        branch = F.linear(mixed.flatten(1), part.o_proj.weight)
        weights = _weights(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        x, branch = _apply(_FeedForward, x, branch, *weights, eps)
    return _apply(_AddNorm, x, branch, norm_weight, eps)


# -- weights behind each other -----------------------------------------------------------------------------------------


def settle(*linears: nn.Linear) -> None:
    """Let the weights ``[·, H]`` lie behind each other in one storage, unless they do already.

    Only `.data` moves: the parameters stay the same objects with the same names and values.
    """
    weights = _weights(*linears)
    if _adjacent(weights):
        return
    together = torch.cat([weight.detach() for weight in weights])
    for weight, rows in zip(weights, together.split([len(weight) for weight in weights]), strict=True):
        weight.data = rows


def _adjacent(weights: Sequence[Tensor]) -> bool:
    """One storage, rows in order. Addresses would not tell: an allocator may place strangers side by side."""
    storage, end = weights[0].untyped_storage().data_ptr(), weights[0].storage_offset()
    for weight in weights:
        if (
            weight.untyped_storage().data_ptr() != storage
            or weight.storage_offset() != end
            or not weight.is_contiguous()
        ):
            return False
        end += weight.numel()
    return True


def _stacked(*weights: Tensor) -> Tensor:
    """Settled matrices ``[·, H]`` as one."""
    assert _adjacent(weights), "settle the weights before they are used"
    return weights[0].as_strided((sum(len(weight) for weight in weights), weights[0].shape[1]), weights[0].stride())


def _weights(*modules: nn.Linear | RMSNorm) -> list[Tensor]:
    return [module.weight for module in modules]


# -- the three functions -----------------------------------------------------------------------------------------------


class _AddNorm(torch.autograd.Function):
    """norm(x + branch)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        total, y, rstd = add_rms_norm(x, branch, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Grads:
        d_x, d_weight, _ = rms_norm_backward(d_y.contiguous(), *ctx.saved_tensors)
        return d_x, d_x if ctx.needs_input_grad[1] else None, d_weight, None


class _AttentionInput(torch.autograd.Function):
    """x + branch, and what attention takes.

    From the norm of the sum: queries ``[T, Q, D]``; from the context rows and from that norm: keys and values
    ``[S, K, D]`` and ``[T, K, D]``. Returned in the order of `block_attention`.

    ``masked``: the block size where rows 1 … B-1 of all blocks are the same row, as in front of the first layer (and
    ``branch`` is None); else 0. Then only N + 1 different rows are normed and projected, and the gradients of the equal
    ones are summed before they meet a matrix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        context: Tensor,
        norm: Tensor,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        context_cos: Tensor,
        context_sin: Tensor,
        eps: float,
        masked: int,
    ) -> tuple[Tensor, ...]:
        source = _sources(len(x), masked, x.device) if masked else None
        total, h, rstd = add_rms_norm(_different(x, masked) if masked else x, branch, norm, eps)
        width = len(q_norm)
        rows = (h @ _stacked(w_q, w_k, w_v).t()).view(len(h), -1, width)
        context_rows = (context @ _stacked(w_k, w_v).t()).view(len(context), -1, width)
        tables = (cos, sin, context_cos, context_sin)
        saved = (total, rstd, context, rows, context_rows, norm, w_q, w_k, w_v, q_norm, k_norm, source, *tables)
        ctx.save_for_backward(*saved)
        ctx.eps, ctx.masked = eps, masked
        q, k, v, k_ctx, v_ctx = _parts(rows, context_rows)
        return (
            x if masked else total,
            norm_rotate(q, q_norm, cos, sin, eps, source),
            norm_rotate(k_ctx, k_norm, context_cos, context_sin, eps),
            v_ctx,
            norm_rotate(k, k_norm, cos, sin, eps, source),
            v if source is None else v[source],
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, *d_heads: Tensor) -> Grads:
        total, rstd, context, rows, context_rows, norm, w_q, w_k, w_v, q_norm, k_norm, source, *tables = (
            ctx.saved_tensors
        )
        d_q, d_k_ctx, d_v_ctx, d_k, d_v = (d_head.contiguous() for d_head in d_heads)
        d_rows, d_context_rows = rows.new_empty(len(d_q), *rows.shape[1:]), torch.empty_like(context_rows)
        q, k, _, k_ctx, _ = _parts(rows, context_rows)
        into_q, into_k, into_v, into_k_ctx, into_v_ctx = _parts(d_rows, d_context_rows)
        cos, sin, context_cos, context_sin = tables
        d_q_norm = norm_rotate_backward(d_q, q, q_norm, cos, sin, ctx.eps, source, into=into_q)
        d_k_norm = norm_rotate_backward(d_k, k, k_norm, cos, sin, ctx.eps, source, into=into_k)
        d_k_norm += norm_rotate_backward(d_k_ctx, k_ctx, k_norm, context_cos, context_sin, ctx.eps, into=into_k_ctx)
        into_v.copy_(d_v)
        into_v_ctx.copy_(d_v_ctx)

        d_rows, d_context_rows = d_rows.flatten(1), d_context_rows.flatten(1)
        if ctx.masked:
            d_rows = _summed(d_rows, ctx.masked)
        d_h, d_other = d_rows @ _stacked(w_q, w_k, w_v), None if ctx.masked else d_total
        d_x, d_norm, h = rms_norm_backward(d_h, total, norm, rstd, d_other)
        d_weights = d_rows.t() @ h
        d_weights[len(w_q) :].addmm_(d_context_rows.t(), context)
        d_context = d_context_rows @ _stacked(w_k, w_v)
        d_w = d_weights.split([len(w_q), len(w_k), len(w_v)])
        d_stream = None if ctx.masked else d_x
        return d_stream, d_stream, d_context, d_norm, *d_w, d_q_norm, d_k_norm, None, None, None, None, None, None


def _parts(rows: Tensor, context_rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v of ``[T, Q + 2·K, D]`` and k, v of ``[S, 2·K, D]``, as views."""
    keys = context_rows.shape[1] // 2
    q, k, v = rows.split([rows.shape[1] - 2 * keys, keys, keys], dim=1)
    return q, k, v, context_rows[:, :keys], context_rows[:, keys:]


def _different(rows: Tensor, size: int) -> Tensor:
    """The rows of N blocks that differ: every block's first, then the one that all others are."""
    return torch.cat([rows[::size], rows[1:2]])


def _sources(rows: int, size: int, device: torch.device) -> Tensor:
    """Where every row is among `_different`."""
    row = torch.arange(rows, device=device)
    return torch.where(row % size == 0, row // size, rows // size)


def _summed(d_rows: Tensor, size: int) -> Tensor:
    """The transpose of taking rows from `_different`: sums of gradients, ``[N + 1, ·]``."""
    blocks = d_rows.view(-1, size, d_rows.shape[1])
    others = blocks[:, 1:].sum((0, 1), dtype=torch.float32).to(d_rows.dtype)
    return torch.cat([blocks[:, 0], others[None]])


class _FeedForward(torch.autograd.Function):
    """x + branch, and down(silu(gate) · up) of its norm: both ``[T, H]``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, h, rstd = add_rms_norm(x, branch, norm, eps)
        gate, up = h @ w_gate.t(), h @ w_up.t()
        ctx.save_for_backward(total, rstd, gate, up, norm, w_gate, w_up, w_down)
        ctx.spent = False
        return total, swiglu(gate, up) @ w_down.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, d_out: Tensor) -> Grads:
        assert not ctx.spent, "the first backward pass overwrote gate and up; a second one needs a new forward"
        ctx.spent = True
        total, rstd, gate, up, norm, w_gate, w_up, w_down = ctx.saved_tensors
        d_gate, d_up, inner = swiglu_backward(d_out @ w_down, gate, up)
        d_w_down = d_out.t() @ inner
        del inner
        d_h = (d_gate @ w_gate).addmm_(d_up, w_up)
        d_x, d_norm, h = rms_norm_backward(d_h, total, norm, rstd, d_total)
        return d_x, d_x, d_norm, d_gate.t() @ h, d_up.t() @ h, d_w_down, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    apply: Callable[..., Any] = function.apply
    return apply(*arguments)
