"""Replicas of the drafter and what each worker computes with them; shared by training and warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from dflash_core.attention import make_backend
from dflash_core.compile.gate import Gate
from dflash_core.drafter import DFlashDrafter
from dflash_core.pipeline.feature_store import FeatureStore
from dflash_core.pipeline.microstep import ItemMaker
from dflash_core.pipeline.rehearsal import synthetic_batch
from dflash_core.pipeline.roles import DrafterRole, TargetRole, drafter_role, target_role
from dflash_core.session import Session, head_weight, replica


@dataclass(frozen=True, kw_only=True)
class Workforce:
    """One replica and head per drafter worker, and the roles of all workers, in the order of the topology."""

    replicas: list[DFlashDrafter]
    heads: list[torch.Tensor]
    targets: list[TargetRole]
    drafters: list[DrafterRole]


def build_workforce(session: Session, drafter: DFlashDrafter, gate: Gate, store: FeatureStore | None) -> Workforce:
    """Copies of `drafter` on every drafter device in `train.dtype`, and roles around them and the targets."""
    config, topology, objective = session.config, session.config.topology, session.objective
    dtype = config.train.dtype
    layer_ids = session.drafter_config.target_layer_ids
    synthetic = partial(synthetic_batch, config, session.drafter_config.vocab_size)
    replicas = [replica(drafter, device, dtype) for device in topology.drafters]
    heads = [head_weight(session.target, device, dtype) for device in topology.drafters]
    makers = [ItemMaker(session.targets[d], layer_ids, objective, gate, store=store) for d in topology.targets]
    return Workforce(
        replicas=replicas,
        heads=heads,
        targets=[
            target_role(device, maker, topology.drafters, getattr(torch, dtype), synthetic)
            for device, maker in zip(topology.targets, makers, strict=True)
        ],
        drafters=[
            drafter_role(device, replica_, head, objective, make_backend(config.train.attention, device), synthetic)
            for device, replica_, head in zip(topology.drafters, replicas, heads, strict=True)
        ],
    )
