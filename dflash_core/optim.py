"""fp32 master weights, AdamW, global-norm clipping and the learning-rate schedule.

The drafters compute in a narrow type (bf16 by default); updates of 6e-4 would vanish in its 8 bits, so the
optimizer owns a wide copy of every parameter, steps on it, and copies the result back to the replicas.
AdamW is arXiv 1711.05101; warm-up 4 %, cosine and clip 1.0 are the recipe of DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch


class MasterAdamW:
    """AdamW on master copies of named parameters.

    Masters are fp32, or `compute_dtype` where that is wider. Weight decay applies to matrices only; norm
    weights and biases have fewer than two dimensions and are never decayed.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        device: torch.device | str,
        compute_dtype: torch.dtype = torch.float32,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        wide = torch.promote_types(compute_dtype, torch.float32)
        self.masters: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(value.detach().to(device, wide, copy=True)) for name, value in named_parameters
        }
        groups = [
            {"params": [p for p in self.masters.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.masters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        # The fused step takes one code path whether or not another thread is compiling; the looped one does not.
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True
        )

    def gradient_buffers(self) -> list[torch.Tensor]:
        """Fresh buffers, one per parameter in order, that `step` reads after they were filled."""
        return [torch.zeros_like(master, requires_grad=False) for master in self.masters.values()]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], *, divisor: torch.Tensor, lr: float, clip: float) -> torch.Tensor:
        """One update with `gradients / divisor`, clipped to global norm `clip`; nothing here waits for the device.

        Scales `gradients` in place. Returns the norm before clipping, a scalar tensor on the masters' device. A
        norm that is not finite leaves masters and moments untouched, so the caller, who has to look at it, can still
        save them. Dividing, clipping and refusing happen inside the fused kernel, through the two tensors with which
        `torch.amp.GradScaler` drives it: one pass over the gradients less, and no decision on the host.
        """
        norm = torch.nn.utils.get_total_norm(gradients) / divisor
        scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
        self._adamw.grad_scale = (divisor / scale).float()  # type: ignore[attr-defined]
        self._adamw.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        for master, gradient in zip(self.masters.values(), gradients, strict=True):
            master.grad = gradient
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for master in self.masters.values():
            master.grad = None
        return norm

    @torch.no_grad()
    def publish(self, replica: torch.nn.Module) -> None:
        """Copy the masters into a replica, rounding to its type."""
        named = dict(replica.named_parameters())
        torch._foreach_copy_(list(named.values()), [self.masters[name] for name in named], non_blocking=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a resume needs, by name: `master.*`, `exp_avg.*`, `exp_avg_sq.*`, `adam_step.*`."""
        tensors: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            state = self._adamw.state.get(master, {})
            tensors[f"master.{name}"] = master.detach()
            tensors[f"exp_avg.{name}"] = state.get("exp_avg", torch.zeros_like(master)).detach()
            tensors[f"exp_avg_sq.{name}"] = state.get("exp_avg_sq", torch.zeros_like(master)).detach()
            tensors[f"adam_step.{name}"] = state.get("step", torch.zeros((), dtype=torch.float32))
        return tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of `state_tensors`, without making them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, master in self.masters.items():
            for prefix in ("master", "exp_avg", "exp_avg_sq"):
                shapes[f"{prefix}.{name}"] = tuple(master.shape)
            shapes[f"adam_step.{name}"] = ()
        return shapes

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_tensors` returned; the caller has checked names and shapes."""
        for name, master in self.masters.items():
            master.copy_(tensors[f"master.{name}"])
            self._adamw.state[master] = {
                "step": tensors[f"adam_step.{name}"].to(master.device, torch.float32, copy=True),
                "exp_avg": tensors[f"exp_avg.{name}"].to(master, copy=True),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(master, copy=True),
            }


def lr_at(progress: float, *, peak: float, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Linear warm-up over `warmup_ratio` of the run, then cosine down to `peak * min_lr_ratio`.

    `progress` in [0, 1] is the middle of the update as a fraction of the run, so neither the first nor the last
    update has rate zero.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_ratio:
        return peak * progress / warmup_ratio
    fraction = (progress - warmup_ratio) / (1.0 - warmup_ratio) if warmup_ratio < 1.0 else 1.0
    return peak * (min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * fraction)))
