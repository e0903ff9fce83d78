"""Attention of draft blocks over a context prefix and over themselves, behind one function."""

from dflash_core.attention.interface import BACKENDS, AttentionBackend, block_attention
from dflash_core.attention.layout import BlockLayout

__all__ = ["BACKENDS", "AttentionBackend", "BlockLayout", "block_attention"]
