"""The frozen target model: loading, and features tapped from its decoder layers."""

from dflash_core.target.loading import load_target, load_target_config, load_tokenizer
from dflash_core.target.model import Target
from dflash_core.target.taps import TapCapture

__all__ = ["TapCapture", "Target", "load_target", "load_target_config", "load_tokenizer"]
