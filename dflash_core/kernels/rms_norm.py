"""RMSNorm of the residual stream (arXiv 1910.07467), fused with the addition before it.

The backward pass writes the normed rows again, so that a caller need not keep them for its weight gradient. Statistics
are fp32. Gradients of the weight are summed per program in a fixed order, then over programs: same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs of the backward kernel: eight on each of 132 multiprocessors. A constant, so sums do not depend on the GPU.
PROGRAMS = 1056


def add_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """total = x + branch (``branch`` None: x itself) and y = weight · total / rms(total).

    ``x, branch [R, W]`` contiguous, ``weight [W]``. Returns total, y (both ``[R, W]``) and 1/rms ``[R]`` in fp32.
    """
    assert x.is_contiguous() and (branch is None or branch.is_contiguous())
    rows, width = x.shape
    total = x if branch is None else torch.empty_like(x)
    y = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _forward[(rows,)](
        x,
        branch,
        total,
        weight,
        y,
        rstd,
        width,
        eps,
        HAS_BRANCH=branch is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return total, y, rstd


def rms_norm_backward(
    d_y: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, d_total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """From ``d_y [R, W]``: the gradient of total, of the weight ``[W]``, and y again.

    ``d_total``: a gradient that reaches total by another way, added to the first result.
    """
    assert d_y.is_contiguous() and (d_total is None or d_total.is_contiguous())
    rows, width = total.shape
    d_x, y = torch.empty_like(total), torch.empty_like(total)
    programs = min(PROGRAMS, rows)
    partial = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    _backward[(programs,)](
        d_y,
        total,
        weight,
        rstd,
        d_total,
        d_x,
        y,
        partial,
        rows,
        width,
        HAS_OTHER=d_total is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return d_x, partial.sum(0).to(weight.dtype), y


def reference_add_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `add_rms_norm` computes, differentiable and without kernels: total and y."""
    total = x if branch is None else x + branch
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    return total, (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit
def _forward(
    x_ptr, branch_ptr, total_ptr, weight_ptr, y_ptr, rstd_ptr, width, eps, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = row * width + cols
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)  # what the backward pass will read
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward(
    d_y_ptr,
    total_ptr,
    weight_ptr,
    rstd_ptr,
    d_total_ptr,
    d_x_ptr,
    y_ptr,
    partial_ptr,
    rows,
    width,
    HAS_OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # and with it every row number
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * width + cols
        rstd = tl.load(rstd_ptr + row)
        unit = tl.load(total_ptr + at, mask=inside, other=0.0).to(tl.float32) * rstd
        d_y = tl.load(d_y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (unit * weight).to(y_ptr.dtype.element_ty), mask=inside)
        d_weight += d_y * unit
        d_unit = d_y * weight
        d_x = (d_unit - unit * (tl.sum(d_unit * unit, axis=0) / width)) * rstd
        if HAS_OTHER:
            d_x += tl.load(d_total_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + program * width + cols, d_weight, mask=inside)
