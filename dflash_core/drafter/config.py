"""What a DFlash drafter is: its shape, its taps, its mask token. Field names are z-lab's `config.json` keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_core.config import DtypeName, LayerType
from dflash_core.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"

_POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)
Problem = tuple[str, str, str]  # key, what is wrong with it, what to do


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Shape and semantics of one drafter; frozen, checked on construction (raises `ConfigError` with its `key`).

    ``target_layer_ids`` are 0-based decoder layers, each standing for that layer's OUTPUT in the residual
    stream (`hidden_states[l + 1]` of a transformers model). The target's last layer cannot be tapped: its entry
    in `hidden_states` is taken after the final norm, a hook sees it before, and serving engines disagree.
    ``is_causal`` None means causal on sliding layers and bidirectional on full ones.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: DtypeName = "bfloat16"

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        if self.is_causal is None and len(set(self.layer_types)) == 1:
            object.__setattr__(self, "is_causal", self.layer_types[0] == SLIDING)
        for key, problem, fix in self._problems():
            raise ConfigError(f"{key}: {problem}", "the drafter's shape does not fit together", fix, key=key)

    def _problems(self) -> Iterator[Problem]:
        for item in _POSITIVE:
            if getattr(self, item) <= 0:
                yield item, f"must be greater than 0, got {getattr(self, item)}", ""
        if self.block_size < 2:
            yield "block_size", f"must be at least 2, got {self.block_size}", ""
        if self.head_dim % 2:
            yield "head_dim", f"must be even for rotary positions, got {self.head_dim}", ""
        if self.num_attention_heads % self.num_key_value_heads:
            problem = f"{self.num_key_value_heads} does not divide the {self.num_attention_heads} query heads"
            yield "num_key_value_heads", problem, ""
        if not 0 <= self.mask_token_id < self.vocab_size:
            problem = f"{self.mask_token_id} is outside the embedding table of {self.vocab_size} rows"
            yield "mask_token_id", problem, f"take an id below {self.vocab_size} that never occurs in data"
        yield from self._tap_problems()
        yield from self._layer_problems()

    def _tap_problems(self) -> Iterator[Problem]:
        ids, last = self.target_layer_ids, self.num_target_layers - 2
        wrong = [layer for layer in ids if not 0 <= layer <= last]
        if wrong:
            problem = f"{wrong} out of range for a target of {self.num_target_layers} layers"
            yield "target_layer_ids", problem, f"use layers 0 to {last}; the last layer cannot be tapped"
        if not ids or list(ids) != sorted(set(ids)):
            yield "target_layer_ids", f"{list(ids)} must be increasing, without repeats, at least one", ""

    def _layer_problems(self) -> Iterator[Problem]:
        if len(self.layer_types) != self.num_hidden_layers:
            problem = f"{len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            yield "layer_types", problem, "give one type per layer"
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            yield "layer_types", f"{unknown} not known", f"use {FULL} or {SLIDING}"
        if SLIDING in self.layer_types and (self.sliding_window or 0) < self.block_size:
            problem = f"sliding layers need a window of at least one block, got {self.sliding_window}"
            yield "sliding_window", problem, f"set it to {self.block_size} or more"

    @property
    def num_taps(self) -> int:
        """n: how many target layers feed one context feature."""
        return len(self.target_layer_ids)

    def layer_is_causal(self, layer: int) -> bool:
        """Whether attention inside a block is causal in ``layer``."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of ``layer`` in tokens, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def require_target(self, *, hidden_size: int, vocab_size: int, num_target_layers: int) -> None:
        """Raise `ConfigError` unless the target has the width, vocabulary and depth this drafter was made for."""
        found = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_target_layers": num_target_layers}
        for key, value in found.items():
            if getattr(self, key) != value:
                raise ConfigError(
                    f"{key}: the drafter was made for {getattr(self, key)}, the target has {value}",
                    "a drafter reads its target's features and shares its embedding and head",
                    "use the target that the drafter was trained for",
                    key=key,
                )
