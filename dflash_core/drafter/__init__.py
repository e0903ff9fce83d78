"""The DFlash drafter: its configuration, its model, its checkpoint format."""

from dflash_core.drafter.checkpoint import load_drafter, save_drafter
from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.from_target import (
    config_from_target,
    default_target_layer_ids,
    resolve_mask_token_id,
)
from dflash_core.drafter.model import DFlashDrafter, DraftCache
from dflash_core.drafter.zlab import config_from_json, config_to_json

__all__ = [
    "DFlashConfig",
    "DFlashDrafter",
    "DraftCache",
    "config_from_json",
    "config_from_target",
    "config_to_json",
    "default_target_layer_ids",
    "load_drafter",
    "resolve_mask_token_id",
    "save_drafter",
]
