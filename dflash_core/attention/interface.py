"""The one door to attention: checks shapes, makes backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_core.attention.layout import BlockLayout
from dflash_core.attention.reference import reference_attention
from dflash_core.compile.environment import require_compiling
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
    backend: AttentionBackend = reference_attention,
) -> Tensor:
    """Attention of T = N·B block rows over their context prefix and their own block, one softmax over both.

    ``q [T, Hq, D]``; ``k_ctx, v_ctx [S, Hkv, D]``; ``k_blk, v_blk [T, Hkv, D]``; returns ``[T, Hq, D]``.
    Query head h uses key/value head h // (Hq / Hkv). Row (block b, offset j), anchor P_b = layout.hi[b], sees

    * context row p iff lo_b <= p < P_b, and with ``sliding_window`` W also p >= P_b + j - (W - 1), so that W
      positions are in view counting its own (the rule of z-lab and SpecForge);
    * row i of its own block iff i <= j when ``causal``, every i otherwise. W >= B, so the window cuts none.

    Rows of blocks that are not valid come out as zeros. ``backend`` is one of `make_backend`.
    """
    num_rows, num_heads, head_dim = q.shape
    assert num_rows == layout.num_rows, f"{num_rows} query rows for {layout.num_rows} block rows"
    assert k_blk.shape == v_blk.shape == (num_rows, k_ctx.shape[1], head_dim), "k_blk, v_blk are [T, Hkv, D]"
    assert k_ctx.shape == v_ctx.shape and k_ctx.shape[2] == head_dim, "k_ctx, v_ctx are [S, Hkv, D]"
    assert num_heads % k_ctx.shape[1] == 0, "query heads must be a multiple of key/value heads"
    assert sliding_window is None or sliding_window >= layout.block_size, "the window is shorter than a block"
    return backend(q, k_ctx, v_ctx, k_blk, v_blk, layout, scale=scale, sliding_window=sliding_window, causal=causal)


@dataclass(frozen=True, kw_only=True)
class BackendKind:
    """How a backend is made, and on which device types it can train.

    `make` is called once per worker: compiled graphs and the recompile limit hang on the code object, so workers
    that shared one would depend on each other (see `compile.environment.clone_code`).
    """

    make: Callable[[], AttentionBackend]
    devices: tuple[str, ...]
    elsewhere: str = ""
    """Why it cannot train on other devices, for the error."""
    check: Callable[[], None] = lambda: None
    """Raises `ConfigError` when this process is not set up for it."""


def _flex() -> AttentionBackend:
    from dflash_core.attention.flex import FlexAttention  # imports Dynamo, which nothing else here needs

    return FlexAttention()


def _triton() -> AttentionBackend:
    from dflash_core.attention.triton import TritonAttention  # Triton is there only where GPUs are

    return TritonAttention()


BACKENDS: dict[str, BackendKind] = {
    "reference": BackendKind(make=lambda: reference_attention, devices=("cpu", "cuda")),
    "flex": BackendKind(
        make=_flex,
        devices=("cuda",),
        elsewhere="torch's flex_attention has no backward pass outside a GPU",
        check=require_compiling,
    ),
    "triton": BackendKind(make=_triton, devices=("cuda",), elsewhere="Triton's kernels run on GPUs only"),
}
AUTO = "auto"
_AUTO_ORDER = ("triton", "reference")


def backend_name(name: str, device: str) -> str:
    """What ``name`` stands for on ``device``: "auto" is the fastest backend that can train there."""
    if name != AUTO:
        return name
    able = (kind for kind in _AUTO_ORDER if kind in BACKENDS and _type(device) in BACKENDS[kind].devices)
    return next(able)


def check_backend(name: str, device: str) -> None:
    """Raise `ConfigError` when the backend ``name`` cannot train on ``device`` of this process."""
    if (resolved := backend_name(name, device)) not in BACKENDS:
        raise ConfigError(
            f"train.attention: there is no backend {name!r}",
            "",
            f"use one of: {', '.join(sorted([AUTO, *BACKENDS]))}",
            key="train.attention",
        )
    kind = BACKENDS[resolved]
    if _type(device) not in kind.devices:
        raise ConfigError(
            f"train.attention: {name} cannot train on {device}",
            kind.elsewhere,
            "set train.attention to auto or reference, or topology.drafters to GPUs",
            key="train.attention",
        )
    kind.check()


def make_backend(name: str, device: str) -> AttentionBackend:
    """A backend for one worker on ``device``. Raises `ConfigError` when it cannot train there."""
    check_backend(name, device)
    return BACKENDS[backend_name(name, device)].make()


def _type(device: str) -> str:
    return torch.device(device).type
