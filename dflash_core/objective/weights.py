"""How much each offset of a block counts. Offset k is column k-1: the given offset 0 has no weight."""

from __future__ import annotations

import torch
from torch import Tensor


def decay_weights(block_size: int, gamma: float, *, device: torch.device | str = "cpu") -> Tensor:
    """``[B-1]`` fp64: exp(-(k-1)/γ) for k = 1 … B-1 (arXiv 2602.06036)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float64, device=device) / gamma)


def dpace_weights(losses: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """``[n, B-1]``, detached: D-PACE (arXiv 2605.18810), the gradient weights of the expected accept length.

    With q_k = exp(-CE_k) and q̃_k = (1-α) q_k + α: F_k = q̃_1 ⋯ q̃_k and w_k = Σ_{m ≥ k} F_m over supervised
    offsets m. ``losses [n, B-1]`` (any value where unsupervised), ``supervised [n, B-1]`` bool, a prefix per block.
    """
    confidence = (1 - alpha) * torch.exp(-losses.detach()) + alpha
    survival = confidence.masked_fill(~supervised, 0.0).cumprod(dim=1)
    return survival.flip(1).cumsum(dim=1).flip(1)
