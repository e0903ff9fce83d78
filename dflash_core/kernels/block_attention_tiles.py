"""Tile sizes of block attention, from a table: autotuning at run time is not thread-safe, and differs between runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """Query rows and keys of one step of a program, its warps, and how many of its loads are in flight."""

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    """For every kernel. `key` and `kept` are squares of one size; `heads` of a `kept` program share its keys."""

    forward: Tile
    query: Tile
    key: Tile
    kept: Tile
    heads: int


# Triton's interpreter. Small, so that small tests have several tiles of everything.
INTERPRETED = Tiles(Tile(32, 16, 1, 1), Tile(32, 16, 1, 1), Tile(16, 16, 1, 1), Tile(16, 16, 1, 1), 4)
# By head width. Two bytes per number, on data centre GPUs from Hopper on: chosen on an H200.
LARGE = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 8, 4), 4),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 8, 3), 4),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 3), 2),
}
# Two bytes, GPUs with 99 KB of shared memory for a program.
SMALL = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), 4),
    128: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), 2),
    256: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), 2),
}
# Four bytes, without tensor cores.
WIDE = {
    64: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), 2),
    128: Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), 2),
    256: Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), 4),
}
LARGE_SHARED_MEMORY = 220_000


def tiles_for(rows: torch.Tensor) -> Tiles:
    """The tiles for ``rows [R, H, D]`` on their device."""
    if rows.device.type == "cpu":
        return INTERPRETED
    return _tiles(rows.shape[2], rows.element_size(), rows.device.index)


@lru_cache
def _tiles(head_dim: int, element_size: int, device: int) -> Tiles:
    properties: Any = torch.cuda.get_device_properties(device)
    large = properties.shared_memory_per_block_optin >= LARGE_SHARED_MEMORY
    table = WIDE if element_size == 4 else LARGE if large else SMALL
    return table[max(head_dim, 64)]
