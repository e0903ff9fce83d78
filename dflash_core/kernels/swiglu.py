"""silu(gate) · up (arXiv 2002.05202); the product is computed again in the backward pass instead of being kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 2048


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``gate, up [R, I]``, contiguous → silu(gate) · up, ``[R, I]``."""
    out = torch.empty_like(gate)
    _forward[_grid(gate, up)](gate, up, out, gate.shape[1], BLOCK=_BLOCK, num_warps=8)
    return out


def swiglu_backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and silu(gate) · up again, ``[R, I]`` each.

    They are written over ``gate``, ``up`` and ``d_out``: at Qwen3-8B's shape 0.6 GB less at the peak of a step.
    """
    assert d_out.is_contiguous()
    _backward[_grid(gate, up)](d_out, gate, up, gate.shape[1], BLOCK=_BLOCK, num_warps=8)
    return gate, up, d_out


def reference_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """What `swiglu` computes, differentiable and without kernels."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _grid(gate: Tensor, up: Tensor) -> tuple[int, int]:
    assert gate.shape == up.shape and gate.is_contiguous() and up.is_contiguous()
    return gate.shape[0], triton.cdiv(gate.shape[1], _BLOCK)


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < inner
    at = tl.program_id(0).to(tl.int64) * inner + cols
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(d_out_ptr, gate_ptr, up_ptr, inner, BLOCK: tl.constexpr):
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < inner
    at = tl.program_id(0).to(tl.int64) * inner + cols
    kind = d_out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(gate_ptr + at, (d_out * up * (sigmoid + silu * (1.0 - sigmoid))).to(kind), mask=inside)
    tl.store(up_ptr + at, (d_out * silu).to(kind), mask=inside)
    tl.store(d_out_ptr + at, (silu * up).to(kind), mask=inside)
