"""z-lab's `config.json` for DFlash checkpoints: read strictly, written for old and new readers alike.

Older files keep block_size, mask_token_id and target_layer_ids at the top level, newer ones in `dflash_config`;
rope_theta sits at the top level or in `rope_parameters`. Both places are read, and must agree; both are written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast, get_args

from dflash_core.config import DtypeName
from dflash_core.drafter.config import SLIDING, DFlashConfig
from dflash_core.errors import ConfigError

ARCHITECTURE = "DFlashDraftModel"
TAP_CONVENTION = "decoder_layer_output_0_based"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
)
_DFLASH_KEYS = {"block_size", "mask_token_id", "target_layer_ids", "tap_convention", "causal"}
# Top-level keys that would change the computation; only these values mean what this drafter computes.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_dropout": (0, None),
    "rope_scaling": (None,),
    "final_logit_softcapping": (None, 0),
    "output_multiplier": (1, None),
    "input_embedding_scale": (1, None),
    "mlp_bias": (False, None),
    "is_neox_style": (True, None),
    "speculators_model_type": (None,),
}
_OTHER_KIND = "the file describes another kind of drafter, which would load and draft nonsense"
_MISSING = object()


def config_to_json(config: DFlashConfig) -> dict[str, Any]:
    """The content of `config.json` for ``config``."""
    windowed = SLIDING in config.layer_types
    own = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "tap_convention": TAP_CONVENTION,
    }
    causality = {} if config.is_causal is None else {"is_causal": config.is_causal}
    if config.is_causal is not None:
        own["causal"] = config.is_causal
    eos = config.eos_token_id
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": f"dflash.{ARCHITECTURE}"},
        "model_type": "qwen3",
        **{key: getattr(config, key) for key in _SIZES},
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": windowed,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "block_size": config.block_size,
        "dflash_config": own,
        **causality,
    }


def config_from_json(path: Path) -> DFlashConfig:
    """Read a z-lab `config.json`. Raises `ConfigError` naming file and key for what is missing or unsupported."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read", str(error.strerror), "give a drafter folder") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON", str(error), "restore the file from its source") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("dflash_config", {}), dict):
        raise ConfigError(f"{path}: must be an object, and so must dflash_config", "", "restore the file")
    reader = _Reader(path, raw, raw.get("dflash_config", {}))
    reader.refuse_unsupported()
    try:
        return reader.config()
    except ConfigError as error:
        if error.what.startswith(str(path)):
            raise
        raise ConfigError(f"{path}: {error.what}", error.why, error.fix, key=error.key) from None


class _Reader:
    """Typed access to one config.json and its `dflash_config` object."""

    def __init__(self, path: Path, top: dict[str, Any], own: dict[str, Any]) -> None:
        self.path, self.top, self.own = path, top, own

    def error(self, key: str, problem: str, why: str = "", fix: str = "") -> ConfigError:
        return ConfigError(f"{self.path}: {key}: {problem}", why, fix, key=key)

    def refuse_unsupported(self) -> None:
        """Raise for every key that asks for a computation which this drafter does not do."""
        architectures = self.read_list("architectures", str, [self.top], default=[ARCHITECTURE])
        if ARCHITECTURE not in architectures:
            raise self.error("architectures", f"{architectures} is not [{ARCHITECTURE!r}]", _OTHER_KIND)
        unknown = sorted(set(self.own) - _DFLASH_KEYS)
        if unknown:
            raise self.error(f"dflash_config.{unknown[0]}", "not a key of a plain DFlash drafter", _OTHER_KIND)
        for key, neutral in _NEUTRAL.items():
            if self.top.get(key) not in neutral:
                raise self.error(key, f"{self.top[key]!r} is not supported", _OTHER_KIND)
        rope_type = self.rope().get("rope_type", "default")
        if rope_type != "default":
            raise self.error("rope_parameters.rope_type", f"{rope_type!r} is not supported", _OTHER_KIND)
        convention = self.own.get("tap_convention", TAP_CONVENTION)
        if convention != TAP_CONVENTION:
            fix = f"convert target_layer_ids to {TAP_CONVENTION}"
            raise self.error("dflash_config.tap_convention", f"{convention!r} is not known", "", fix)

    def config(self) -> DFlashConfig:
        top, own = self.top, self.own
        layer_types = self.read_list("layer_types", str, [top], default=[])
        if not layer_types and top.get("use_sliding_window"):
            raise self.error(
                "layer_types", "missing, but use_sliding_window is true", "", "list the type of each layer"
            )
        return DFlashConfig(
            **{key: self.read(key, int, [top]) for key in _SIZES},
            target_layer_ids=tuple(self.read_list("target_layer_ids", int, [own, top])),
            mask_token_id=self.read("mask_token_id", int, [own, top]),
            block_size=self.read("block_size", int, [own, top]),
            rms_norm_eps=self.read("rms_norm_eps", float, [top]),
            rope_theta=float(self.read("rope_theta", float, [top, self.rope()])),
            max_position_embeddings=self.read("max_position_embeddings", int, [top], default=32768),
            attention_bias=self.read("attention_bias", bool, [top], default=False),
            layer_types=tuple(layer_types),
            sliding_window=self.read("sliding_window", int, [top], default=None),
            is_causal=self.read_causality(),
            bos_token_id=self.read("bos_token_id", int, [top], default=None),
            eos_token_id=self.read_eos(),
            dtype=self.read_dtype(),
        )

    def read(self, key: str, kind: type, places: list[dict[str, Any]], default: Any = _MISSING) -> Any:
        """The value of ``key`` from the places that have it, which must agree; no type is converted."""
        found = [place[key] for place in places if place.get(key) is not None]
        if not found:
            if default is _MISSING:
                raise self.error(key, "is missing", "a guessed value would load and draft nonsense")
            return default
        if any(value != found[0] for value in found):
            raise self.error(key, f"given twice with different values: {found}")
        kinds = (int, float) if kind is float else (kind,)
        if type(found[0]) not in kinds:
            raise self.error(key, f"must be of type {kind.__name__}, got {found[0]!r}")
        return found[0]

    def read_list(self, key: str, kind: type, places: list[dict[str, Any]], default: Any = _MISSING) -> list[Any]:
        items: list[Any] = self.read(key, list, places, default)
        if any(type(item) is not kind for item in items):
            raise self.error(key, f"must be a list of {kind.__name__}, got {items!r}")
        return items

    def rope(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.read("rope_parameters", dict, [self.top], default={})
        return parameters

    def read_eos(self) -> int | tuple[int, ...] | None:
        if isinstance(self.top.get("eos_token_id"), list):
            return tuple(self.read_list("eos_token_id", int, [self.top]))
        eos: int | None = self.read("eos_token_id", int, [self.top], default=None)
        return eos

    def read_causality(self) -> bool | None:
        causal = self.read("causal", bool, [self.own], default=None)
        places = [self.top] if causal is None else [self.top, {"is_causal": causal}]
        value: bool | None = self.read("is_causal", bool, places, default=None)
        return value

    def read_dtype(self) -> DtypeName:
        name = self.top.get("dtype", self.top.get("torch_dtype", "bfloat16"))
        if name not in get_args(DtypeName):
            raise self.error("dtype", f"must be one of {', '.join(get_args(DtypeName))}, got {name!r}")
        return cast(DtypeName, name)
