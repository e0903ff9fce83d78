"""Which context rows each draft block may see: two integers per block instead of a mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dflash_core.transfer import to_device


@dataclass(frozen=True)
class BlockLayout:
    """N blocks of ``block_size`` rows over one packed row of context; block b owns rows [b·B, (b+1)·B).

    ``lo [N]`` is the first row of the block's document, ``hi [N]`` the row of its anchor P. Context row p is
    visible iff lo <= p < hi: strictly before the anchor, because at decoding time the target has not yet
    computed a feature for the anchor token (arXiv 2602.06036). ``valid [N]`` is False for unused slots, whose
    rows see nothing and come out as zeros. Block rows see their own block only.
    """

    lo: Tensor
    hi: Tensor
    block_size: int
    valid: Tensor

    def __post_init__(self) -> None:
        assert self.lo.shape == self.hi.shape == self.valid.shape and self.lo.dim() == 1, "lo, hi, valid are [N]"
        assert self.valid.dtype == torch.bool and self.block_size >= 1

    @classmethod
    def single(cls, prefix: int, block_size: int, device: torch.device | str) -> BlockLayout:
        """One block behind ``prefix`` context rows, as in decoding."""
        lo = torch.zeros(1, dtype=torch.long, device=device)
        layout = cls(lo, lo + prefix, block_size, torch.ones(1, dtype=torch.bool, device=device))
        layout.__dict__["spans"] = [(0, prefix)]
        return layout

    @property
    def num_blocks(self) -> int:
        return self.lo.shape[0]

    @property
    def num_rows(self) -> int:
        """T = N·B."""
        return self.num_blocks * self.block_size

    def positions(self) -> Tensor:
        """Rotary position [T] of every block row: its distance from the start of its document."""
        offsets = torch.arange(self.block_size, device=self.lo.device)
        return ((self.hi - self.lo)[:, None] + offsets).reshape(-1)

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout on ``device``; the host-side copy of the spans travels along."""
        lo, hi, valid = (to_device(tensor, device) for tensor in (self.lo, self.hi, self.valid))
        moved = BlockLayout(lo, hi, self.block_size, valid)
        moved.__dict__["spans"] = self.spans
        return moved

    @cached_property
    def spans(self) -> list[tuple[int, int] | None]:
        """(lo, hi) per block on the host, None for unused slots; computed once and shared by all layers."""
        triples = zip(self.lo.tolist(), self.hi.tolist(), self.valid.tolist(), strict=True)
        return [(lo, hi) if valid else None for lo, hi, valid in triples]
