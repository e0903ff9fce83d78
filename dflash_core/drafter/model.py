"""The DFlash drafter (arXiv 2602.06036): Qwen3-style layers whose keys and values also come from target features.

Shape letters: T block rows (N blocks of B), S context rows, H hidden size, n taps, D head width. There is no
batch dimension: documents are packed into one row. The embedding and the head are the target's, so the model
takes embeddings in and gives final hidden states out. Module names are the tensor names of z-lab's checkpoints.

This file is the meaning, in plain torch: what runs on a CPU, in fp64 and when decoding. Training on a GPU takes the
same steps in `fused.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.attention import AttentionBackend, BlockLayout, block_attention, reference_attention
from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.fused import can_fuse, fused_layers, fused_norm

INIT_STD = 0.02
Rotary = tuple[Tensor, Tensor]  # cos and sin, each [R, 1, D/2]


class DFlashDrafter(nn.Module):
    """`forward` drafts all blocks of a packed row, `decode` one block behind a cache; both agree."""

    def __init__(self, config: DFlashConfig, *, generator: torch.Generator | None = None) -> None:
        """Linear weights ~ N(0, 0.02), norms 1, biases 0, fp32. ``generator``: a CPU generator (None: torch's)."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def context_features(self, taps_SnH: Tensor) -> Tensor:
        """c = hidden_norm(fc(taps)): ``[S, n·H]`` → ``[S, H]``, once for all layers."""
        features: Tensor = self.fc(taps_SnH.to(self.dtype))
        if can_fuse(features, biased=False):
            return fused_norm(features, self.hidden_norm.weight, self.hidden_norm.eps)
        normed: Tensor = self.hidden_norm(features)
        return normed

    def forward(
        self,
        block_embeds: Tensor,
        context: Tensor,
        *,
        layout: BlockLayout,
        block_positions: Tensor,
        context_positions: Tensor,
        attention: AttentionBackend = reference_attention,
    ) -> Tensor:
        """All blocks of a packed row at once.

        ``block_embeds [T, H]``: target embeddings of [x_P, mask, …, mask] per block. ``context [S, H]`` from
        `context_features`. ``block_positions [T]`` and ``context_positions [S]`` count within each document.
        Returns the hidden states ``[T, H]`` after the final norm; row (b, k) predicts token P_b + k.
        """
        block_rotary = rotary(block_positions, self.config, self.dtype)
        context_rotary = rotary(context_positions, self.config, self.dtype)
        layers = list(self._draft_layers())
        if can_fuse(block_embeds, biased=self.config.attention_bias) and not block_embeds.requires_grad:
            rotaries = (block_rotary, context_rotary)
            return fused_layers(layers, self.norm.weight, block_embeds, context, *rotaries, layout, attention)
        x = block_embeds
        for layer in layers:
            k_ctx, v_ctx = layer.self_attn.keys_values(context, context_rotary)
            x = layer(x, block_rotary, k_ctx, v_ctx, layout, attention)
        hidden: Tensor = self.norm(x)
        return hidden

    @torch.no_grad()
    def decode(
        self,
        block_embeds: Tensor,
        new_context: Tensor,
        cache: DraftCache,
        *,
        block_positions: Tensor,
        context_positions: Tensor,
    ) -> Tensor:
        """One block behind a cached context: the same hidden states as `forward` gives that block.

        ``block_embeds [B, H]``; ``new_context [C, H]``: features of the rows that the cache does not hold yet
        (``context_positions [C]``). Their keys and values stay in ``cache``; the block's do not. Returns ``[B, H]``.
        """
        block_rotary = rotary(block_positions, self.config, self.dtype)
        context_rotary = rotary(context_positions, self.config, self.dtype)
        prefix = cache.length + new_context.shape[0]
        layout = BlockLayout.single(prefix, block_embeds.shape[0], block_embeds.device)
        x = block_embeds
        for index, layer in enumerate(self._draft_layers()):
            cache.append(index, *layer.self_attn.keys_values(new_context, context_rotary))
            x = layer(x, block_rotary, *cache.rows(index), layout, reference_attention)
        hidden: Tensor = self.norm(x)
        return hidden

    def _draft_layers(self) -> Iterator[DraftLayer]:
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            yield layer


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU over block rows; the context enters through the keys and values only."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        block_rotary: Rotary,
        k_ctx: Tensor,
        v_ctx: Tensor,
        layout: BlockLayout,
        attention: AttentionBackend,
    ) -> Tensor:
        """``x [T, H]`` → ``[T, H]``; ``k_ctx, v_ctx [S, Hkv, D]``."""
        x = x + self.self_attn(self.input_layernorm(x), block_rotary, k_ctx, v_ctx, layout, attention)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftAttention(nn.Module):
    """Grouped-query attention with normed queries and keys; context and block rows share W_k, W_v and k_norm."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.layer_window(index)
        self.causal = config.layer_is_causal(index)
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, rows: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        """``rows [R, H]`` → keys (normed, rotated) and values (as projected), each ``[R, Hkv, D]``."""
        keys = self.k_norm(self._heads(self.k_proj(rows)))
        return rotate(keys, positions), self._heads(self.v_proj(rows))

    def forward(
        self,
        h: Tensor,
        block_rotary: Rotary,
        k_ctx: Tensor,
        v_ctx: Tensor,
        layout: BlockLayout,
        attention: AttentionBackend,
    ) -> Tensor:
        """``h [T, H]`` (normed block rows) → ``[T, H]``."""
        q = rotate(self.q_norm(self._heads(self.q_proj(h))), block_rotary)
        k_blk, v_blk = self.keys_values(h, block_rotary)
        mixed = block_attention(
            q,
            k_ctx,
            v_ctx,
            k_blk,
            v_blk,
            layout,
            scale=self.head_dim**-0.5,
            sliding_window=self.window,
            causal=self.causal,
            backend=attention,
        )
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], rows.shape[1] // self.head_dim, self.head_dim)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RMSNorm(nn.Module):
    """weight * x / rms(x), the statistic in fp32 or wider (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class DraftCache:
    """Keys and values of the context rows of one sequence, per layer; rows of draft blocks never enter."""

    def __init__(self, config: DFlashConfig) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * config.num_hidden_layers
        self._lengths = [0] * config.num_hidden_layers

    @property
    def length(self) -> int:
        """How many context rows every layer holds."""
        return self._lengths[-1]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Add ``[C, Hkv, D]`` rows to ``layer``. Storage doubles when full, so appending stays linear in total."""
        begin = self._lengths[layer]
        end = begin + keys.shape[0]
        stored = self._layers[layer]
        if stored is None or stored[0].shape[0] < end:
            stored = _grown(stored, keys, begin, max(end, 2 * begin, 256))
            self._layers[layer] = stored
        stored[0][begin:end] = keys
        stored[1][begin:end] = values
        self._lengths[layer] = end

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of ``layer``, each ``[length, Hkv, D]``."""
        stored = self._layers[layer]
        assert stored is not None, "append before reading"
        return stored[0][: self._lengths[layer]], stored[1][: self._lengths[layer]]


def rotary(positions: Tensor, config: DFlashConfig, dtype: torch.dtype) -> Rotary:
    """cos and sin ``[R, 1, D/2]`` of plain rotary positions (arXiv 2104.09864), in fp32 or wider.

    Frequencies are computed on every call rather than kept as a buffer: a buffer would be rounded when the model
    is cast to bf16, and the phases would drift with distance.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, config.head_dim, 2, dtype=wide, device=positions.device) / config.head_dim
    angles = positions.to(wide)[:, None, None] / config.rope_theta**exponents
    return angles.cos(), angles.sin()


def rotate(rows_RHD: Tensor, positions: Rotary) -> Tensor:
    """Rotate the two halves of every head (the "neox" pairing of Qwen and Llama); same shape and dtype."""
    cos, sin = positions
    first, second = rows_RHD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(rows_RHD.dtype)


def _grown(stored: tuple[Tensor, Tensor] | None, like: Tensor, used: int, capacity: int) -> tuple[Tensor, Tensor]:
    grown = (like.new_empty(capacity, *like.shape[1:]), like.new_empty(capacity, *like.shape[1:]))
    if stored is not None:
        grown[0][:used] = stored[0][:used]
        grown[1][:used] = stored[1][:used]
    return grown
