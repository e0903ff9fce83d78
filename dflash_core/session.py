"""The parts of a run, built from its configuration: targets, tokenizer, drafter, objective.

Training, warm-up and evaluation build the same parts in the same way here, so "the same initialisation" and "the same
blocks" mean the same everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_core.config import RunConfig, resolve_path
from dflash_core.data.chats import ChatIndex
from dflash_core.data.packing import BatchStream
from dflash_core.drafter import DFlashConfig, DFlashDrafter, config_from_target, load_drafter
from dflash_core.errors import ConfigError
from dflash_core.pipeline.feature_store import FeatureStore, default_ram_budget, target_fingerprint
from dflash_core.pipeline.microstep import Objective
from dflash_core.target import Target, load_target, load_tokenizer


@dataclass(kw_only=True)
class Session:
    """Loaded models of one run. `targets` by device name; `drafter_config` fits all of them."""

    config: RunConfig
    tokenizer: Any
    targets: dict[str, Target]
    drafter_config: DFlashConfig
    objective: Objective

    @property
    def target(self) -> Target:
        """The first target."""
        return next(iter(self.targets.values()))

    def initial_drafter(self) -> DFlashDrafter:
        """The drafter before training, in fp32 on the CPU: `drafter.init_from`, or random from the run's seed."""
        if self.config.drafter.init_from is not None:
            return load_drafter(resolve_path(self.config.drafter.init_from), dtype=torch.float32)
        generator = torch.Generator().manual_seed(self.config.seed)
        return DFlashDrafter(self.drafter_config, generator=generator)

    def train_stream(self) -> BatchStream:
        """The training batches. Raises DataError."""
        index = ChatIndex(self.config.data.train)
        return BatchStream(index, self.tokenizer, self.config.data, seed=self.config.seed)

    def feature_store(self) -> FeatureStore | None:
        """The store of `data.feature_store`, if one is configured."""
        folder = self.config.data.feature_store
        if folder is None:
            return None
        return FeatureStore(
            Path(folder),
            self.target_fingerprint(),
            width=self.drafter_config.num_taps * self.target.hidden_size,
            dtype=self.target.dtype,
            ram_budget=default_ram_budget(),
        )

    def target_fingerprint(self) -> str:
        """Identity of the features: the target's weights and type, and which layers are tapped."""
        target = self.target
        return target_fingerprint(
            target.model, self.drafter_config.target_layer_ids, target.dtype, target.config.to_dict()
        )


def open_session(config: RunConfig, devices: Sequence[str], *, target_dtype: str | None = None) -> Session:
    """Load tokenizer and targets (one per distinct device) and derive the drafter's shape.

    Raises TargetError, ConfigError (taps or mask token out of range, `init_from` of another shape).
    """
    tokenizer = load_tokenizer(config.target)
    targets = {device: load_target(config.target, device, dtype=target_dtype) for device in dict.fromkeys(devices)}
    target = next(iter(targets.values()))
    drafter_config = _drafter_config(config, target, tokenizer)
    return Session(
        config=config,
        tokenizer=tokenizer,
        targets=targets,
        drafter_config=drafter_config,
        objective=build_objective(config, drafter_config),
    )


def build_objective(config: RunConfig, drafter_config: DFlashConfig) -> Objective:
    """The training objective of a configuration."""
    return Objective(
        seed=config.seed,
        block_size=drafter_config.block_size,
        mask_token_id=drafter_config.mask_token_id,
        anchors_per_batch=config.train.anchors_per_batch,
        loss=config.train.loss,
        gamma=config.gamma,
        dpace_alpha=config.train.dpace_alpha,
    )


def replica(drafter: DFlashDrafter, device: str, dtype: str) -> DFlashDrafter:
    """A copy of `drafter` on `device` in `dtype` that shares nothing with it."""
    return copy.deepcopy(drafter).to(device, getattr(torch, dtype))


def head_weight(target: Target, device: str, dtype: str) -> torch.Tensor:
    """The target's head `[V, H]` where and as a drafter needs it; the same tensor when it is already there."""
    return target.head_weight.detach().to(device, getattr(torch, dtype))


def _drafter_config(config: RunConfig, target: Target, tokenizer: Any) -> DFlashConfig:
    fresh = config_from_target(target.config, config.drafter, tokenizer, dtype=config.train.dtype)
    if config.drafter.init_from is None:
        return fresh
    start = load_drafter(resolve_path(config.drafter.init_from)).config
    start.require_target(
        hidden_size=fresh.hidden_size,
        vocab_size=fresh.vocab_size,
        num_target_layers=fresh.num_target_layers,
    )
    settings = config.drafter
    wanted = {
        "num_hidden_layers": settings.num_hidden_layers,
        "block_size": settings.block_size,
        "target_layer_ids": settings.target_layer_ids,
        "mask_token_id": settings.mask_token_id,
    }
    for key, value in wanted.items():
        if value is not None and value != getattr(start, key):
            raise ConfigError(
                f"drafter.{key}: {value} differs from {getattr(start, key)} of drafter.init_from",
                f"training starts from {settings.init_from}, whose shape is fixed",
                f"set drafter.{key} to {getattr(start, key)}, or remove drafter.init_from",
                key=f"drafter.{key}",
            )
    return replace(start, dtype=config.train.dtype)
