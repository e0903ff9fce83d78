"""RMSNorm over each head, then rotary positions (arXiv 2104.09864), in one pass from the projection's output.

Reads the rows of a projection where they lie (a slice of a wider product is fine) and writes heads as attention wants
them. The backward pass reads the projection again instead of the normed heads. fp32 inside; weight gradients are summed
in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# As in `rms_norm`: constant, so that the order of the sums does not depend on the GPU.
PROGRAMS = 1056


def norm_rotate(
    heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, source: Tensor | None = None
) -> Tensor:
    """``heads [U, N, D]`` (any stride between rows) → normed, weighted and rotated, ``[R, N, D]`` contiguous.

    ``weight [D]`` is shared by the N heads; ``cos, sin [R, 1, D/2]`` fp32 as `drafter.model.rotary` makes them. The two
    halves of a head are one pair ("neox"). ``source [R]``: which row of ``heads`` each row takes (None: its own).
    """
    rows = cos.shape[0]
    out = torch.empty(rows, *heads.shape[1:], dtype=heads.dtype, device=heads.device)
    _forward[(rows,)](heads, source, weight, cos, sin, out, heads.stride(0), eps, source is not None, **_shape(heads))
    return out


def norm_rotate_backward(
    d_out: Tensor,
    heads: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    source: Tensor | None = None,
    *,
    into: Tensor,
) -> Tensor:
    """From ``d_out [R, N, D]``, contiguous: returns the gradient of the weight ``[D]``.

    Writes the gradient of what each row took from ``heads`` into ``into [R, N, D]`` (any stride between rows).
    """
    assert d_out.is_contiguous() and into.shape == d_out.shape and _rows_of_heads(into)
    rows, _, width = d_out.shape
    programs = min(PROGRAMS, rows)
    partial = torch.empty(programs, width, dtype=torch.float32, device=heads.device)
    _backward[(programs,)](
        d_out,
        heads,
        source,
        weight,
        cos,
        sin,
        into,
        partial,
        heads.stride(0),
        into.stride(0),
        eps,
        rows,
        source is not None,
        **_shape(heads),
    )
    return partial.sum(0).to(weight.dtype)


def reference_norm_rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """What `norm_rotate` computes, differentiable and without kernels."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    normed = weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    first, second = normed.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def _rows_of_heads(tensor: Tensor) -> bool:
    return tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]


def _shape(heads: Tensor) -> dict[str, int]:
    assert _rows_of_heads(heads) and heads.shape[2] % 2 == 0
    number, half = heads.shape[1], heads.shape[2] // 2
    block_n, block_h = triton.next_power_of_2(number), triton.next_power_of_2(half)
    return {
        "N": number,
        "HALF": half,
        "BLOCK_N": block_n,
        "BLOCK_H": block_h,
        "num_warps": min(max(block_n * block_h // 256, 1), 8),
    }


@triton.jit
def _taken(source_ptr, row, HAS_SOURCE: tl.constexpr):
    if HAS_SOURCE:
        row = tl.load(source_ptr + row)
    return row


@triton.jit
def _normed(heads_ptr, at, inside, HALF: tl.constexpr, eps):
    """Both halves of every head over its root mean square, and one over that."""
    first = tl.load(heads_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)
    return first * rstd[:, None], second * rstd[:, None], rstd


@triton.jit
def _forward(
    heads_ptr,
    source_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    stride,
    eps,
    HAS_SOURCE: tl.constexpr,
    N: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n, h = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_H)[None, :]
    inside = (n < N) & (h < HALF)
    of_head = n * (2 * HALF) + h
    taken = _taken(source_ptr, row, HAS_SOURCE)
    first, second, _ = _normed(heads_ptr, taken * stride + of_head, inside, HALF, eps)
    first *= tl.load(weight_ptr + h, mask=h < HALF, other=0.0).to(tl.float32)
    second *= tl.load(weight_ptr + HALF + h, mask=h < HALF, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * HALF + h, mask=h < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + h, mask=h < HALF, other=0.0)
    at = out_ptr + row * (N * 2 * HALF) + of_head
    tl.store(at, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_out_ptr,
    heads_ptr,
    source_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    into_ptr,
    partial_ptr,
    stride,
    into_stride,
    eps,
    rows,
    HAS_SOURCE: tl.constexpr,
    N: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # and with it every row number
    n, h = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_H)[None, :]
    inside = (n < N) & (h < HALF)
    of_head = n * (2 * HALF) + h
    weight_1 = tl.load(weight_ptr + h, mask=h < HALF, other=0.0).to(tl.float32)
    weight_2 = tl.load(weight_ptr + HALF + h, mask=h < HALF, other=0.0).to(tl.float32)
    d_weight_1 = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    d_weight_2 = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        taken = _taken(source_ptr, row, HAS_SOURCE)
        unit_1, unit_2, rstd = _normed(heads_ptr, taken * stride + of_head, inside, HALF, eps)
        cos = tl.load(cos_ptr + row * HALF + h, mask=h < HALF, other=0.0)
        sin = tl.load(sin_ptr + row * HALF + h, mask=h < HALF, other=0.0)
        at = row * (N * 2 * HALF) + of_head
        d_out_1 = tl.load(d_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
        d_out_2 = tl.load(d_out_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        d_normed_1 = d_out_1 * cos + d_out_2 * sin
        d_normed_2 = d_out_2 * cos - d_out_1 * sin
        d_weight_1 += d_normed_1 * unit_1
        d_weight_2 += d_normed_2 * unit_2
        d_unit_1, d_unit_2 = d_normed_1 * weight_1, d_normed_2 * weight_2
        along = (tl.sum(d_unit_1 * unit_1 + d_unit_2 * unit_2, axis=1) / (2 * HALF))[:, None]
        to = into_ptr + row * into_stride + of_head
        tl.store(to, ((d_unit_1 - unit_1 * along) * rstd[:, None]).to(into_ptr.dtype.element_ty), mask=inside)
        tl.store(to + HALF, ((d_unit_2 - unit_2 * along) * rstd[:, None]).to(into_ptr.dtype.element_ty), mask=inside)
    columns = tl.arange(0, BLOCK_H)
    to = partial_ptr + program * (2 * HALF) + columns
    tl.store(to, tl.sum(d_weight_1, axis=0), mask=columns < HALF)
    tl.store(to + HALF, tl.sum(d_weight_2, axis=0), mask=columns < HALF)
