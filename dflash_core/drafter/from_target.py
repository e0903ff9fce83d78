"""The drafter's shape, derived from the target's configuration and the user's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_core.config import DrafterConfig, DtypeName
from dflash_core.drafter.config import DFlashConfig
from dflash_core.errors import ConfigError

_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The layers to tap: one → the middle; n → evenly from layer 1 to layer N-3 (the rule of z-lab's releases).

    Raises `ConfigError` when the target is too shallow for that many different layers.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if len(set(ids)) < num_taps or ids[-1] < ids[0]:
        raise ConfigError(
            f"drafter.num_target_taps: {num_taps} taps do not fit into a target of {num_target_layers} layers",
            f"layers 1 to {num_target_layers - 3} are tapped by default, each once",
            "lower drafter.num_target_taps, or list drafter.target_layer_ids",
            key="drafter.num_target_taps",
        )
    return ids


def resolve_mask_token_id(
    tokenizer: Any, *, vocab_size: int, explicit: int | None = None, in_use: Sequence[int] = ()
) -> int:
    """The id that stands for unknown offsets of a block: a row of the embedding table that data never contains.

    Order: ``explicit`` (run configuration, or the drafter that training starts from), the tokenizer's mask
    token, then the first embedding row behind the tokenizer's last id. ``in_use`` are ids that do occur in data
    (bos, eos) and are refused. Padding and eos are never guessed: they occur in data. Raises `ConfigError`.
    """
    key = "drafter.mask_token_id"
    chosen = explicit if explicit is not None else getattr(tokenizer, "mask_token_id", None)
    if chosen is None and tokenizer is not None and len(tokenizer) < vocab_size:
        chosen = len(tokenizer)
    if chosen is None:
        raise ConfigError(
            f"{key}: this target has no obvious mask token",
            f"the tokenizer has no mask token and the {vocab_size} embedding rows have no unused one",
            f"set {key} to an id that never occurs in your data{_spare_tokens(tokenizer, in_use)}",
            key=key,
        )
    if not 0 <= chosen < vocab_size:
        raise ConfigError(
            f"{key}: {chosen} is outside the embedding table of {vocab_size} rows",
            "the mask token's embedding is a row of that table",
            f"take an id below {vocab_size} that never occurs in data",
            key=key,
        )
    if chosen in in_use:
        raise ConfigError(
            f"{key}: {chosen} is the target's bos or eos token",
            "a mask token must never occur in data",
            f"take another id{_spare_tokens(tokenizer, in_use)}",
            key=key,
        )
    return chosen


def config_from_target(
    target_config: Any, settings: DrafterConfig, tokenizer: Any = None, *, dtype: DtypeName = "bfloat16"
) -> DFlashConfig:
    """The drafter for a transformers ``target_config``; whatever ``settings`` leaves open comes from the target.

    Rotary positions are always plain (no scaling, full head width) with the target's theta. Raises `ConfigError`
    with the key path in the run configuration.
    """
    text = target_config.get_text_config()
    rope_theta = _rope_theta(text)
    bos, eos = getattr(text, "bos_token_id", None), _ids(getattr(text, "eos_token_id", None))
    in_use = eos if bos is None else (bos, *eos)
    try:
        return DFlashConfig(
            **_sizes(text, settings),
            num_hidden_layers=settings.num_hidden_layers,
            vocab_size=text.vocab_size,
            num_target_layers=text.num_hidden_layers,
            target_layer_ids=_taps(settings, text.num_hidden_layers),
            mask_token_id=resolve_mask_token_id(
                tokenizer, vocab_size=text.vocab_size, explicit=settings.mask_token_id, in_use=in_use
            ),
            block_size=settings.block_size,
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            max_position_embeddings=text.max_position_embeddings,
            layer_types=settings.layer_types or (),
            sliding_window=settings.sliding_window,
            is_causal=settings.is_causal,
            bos_token_id=bos,
            eos_token_id=eos[0] if len(eos) == 1 else eos or None,
            dtype=dtype,
        )
    except ConfigError as error:
        if "." in error.key:
            raise
        raise ConfigError(f"drafter.{error.what}", error.why, error.fix, key=f"drafter.{error.key}") from None


def _taps(settings: DrafterConfig, num_target_layers: int) -> tuple[int, ...]:
    listed, number = settings.target_layer_ids, settings.num_target_taps
    if listed is None:
        return default_target_layer_ids(num_target_layers, number or settings.num_hidden_layers)
    if number not in (None, len(listed)):
        raise ConfigError(
            f"drafter.num_target_taps: {number}, but target_layer_ids lists {len(listed)}",
            "the list decides how many layers are tapped",
            "remove drafter.num_target_taps",
            key="drafter.num_target_taps",
        )
    return listed


def _sizes(text: Any, settings: DrafterConfig) -> dict[str, Any]:
    is_moe = any(getattr(text, key, None) for key in _MOE_KEYS)
    dense_width = None if is_moe else getattr(text, "intermediate_size", None)
    heads = settings.num_attention_heads or text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": settings.intermediate_size or dense_width or 3 * text.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.num_key_value_heads or kv_heads,
        "head_dim": settings.head_dim or head_dim,
    }


def _rope_theta(text: Any) -> float:
    """Transformers 5 keeps it in `rope_parameters`, per layer type for models that mix them."""
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        raise ConfigError(
            "target: its configuration names no rope_theta",
            "the drafter uses plain rotary positions with the target's theta",
            "use a target with rotary positions",
            key="target.path",
        )
    return float(theta)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _spare_tokens(tokenizer: Any, in_use: Sequence[int]) -> str:
    """Special tokens that no chat needs, as a hint for the user; empty when there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    taken = {*in_use, getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "unk_token_id", None)}
    spare = [f"{index} ({token})" for index, token in sorted(added.items()) if index not in taken]
    return f"; special tokens to consider: {', '.join(spare[:8])}" if spare else ""
