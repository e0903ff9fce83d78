"""Attention of draft blocks over a context prefix and over themselves, behind one function."""

from dflash_core.attention.interface import (
    BACKENDS,
    AttentionBackend,
    BackendKind,
    backend_name,
    block_attention,
    check_backend,
    make_backend,
)
from dflash_core.attention.layout import BlockLayout
from dflash_core.attention.reference import reference_attention

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "BackendKind",
    "BlockLayout",
    "backend_name",
    "block_attention",
    "check_backend",
    "make_backend",
    "reference_attention",
]
