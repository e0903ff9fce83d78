"""Which block rows meet the head, and in which chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_core.objective.labels import IGNORED_LABEL
from dflash_core.transfer import to_device


@dataclass(frozen=True)
class ScoredRows:
    """``labels [N, B]``, negative where nothing is to be predicted; ``chunks``: block rows ``[R]``, R <= ``capacity``,
    with the blocks that they are all scored rows of.

    Row 0 is offset 0 of a block, which is never scored. So it can fill a chunk up, any number of times. ``capacity``
    does not depend on what is supervised.
    """

    labels: Tensor
    chunks: list[tuple[Tensor, slice]]
    capacity: int

    @property
    def supervised(self) -> Tensor:
        """``[N, B-1]`` bool."""
        return self.labels[:, 1:] >= 0

    @staticmethod
    def of(
        labels: Tensor, supervised: Tensor, device: torch.device, *, limit: int, multiple: int = 1, every: bool = False
    ) -> ScoredRows:
        """Chunks of up to ``limit`` rows, or of one block if that has more, each filled up to a ``multiple``.

        ``labels, supervised [N, B]`` are on one device. With ``every``, all rows are in it that are not offset 0. To
        pick the supervised ones, they have to be on the CPU: anywhere else it would mean to wait for the device.
        """
        num_blocks, per_block = labels.shape[0], labels.shape[1] - 1
        capacity = _up(min(max(limit, per_block), num_blocks * per_block), multiple)
        rows = torch.arange(labels.numel(), device=supervised.device).view(labels.shape)
        if every:
            index, rows_per_block = rows[:, 1:].flatten(), [per_block] * num_blocks
        else:
            assert not supervised[:, 0].any(), "offset 0 is given, not predicted"
            index, rows_per_block = rows[supervised], supervised.sum(dim=1).tolist()
        cuts = _cut(rows_per_block, capacity)
        pieces = [F.pad(index[span], (0, -(span.stop - span.start) % multiple)) for span, _ in cuts]
        chosen = to_device(torch.cat([index[:0], *pieces]), device).split([len(piece) for piece in pieces])
        known = to_device(labels.masked_fill(~supervised, IGNORED_LABEL), device)
        return ScoredRows(known, list(zip(chosen, (blocks for _, blocks in cuts), strict=True)), capacity)


def _cut(rows_per_block: list[int], limit: int) -> list[tuple[slice, slice]]:
    """Cut into runs of whole blocks with at most ``limit`` rows each; no block has more."""
    chunks: list[tuple[slice, slice]] = []
    row = block = rows = 0
    for b, count in enumerate(rows_per_block):
        if rows + count > limit:
            chunks.append((slice(row, row + rows), slice(block, b)))
            row, block, rows = row + rows, b, 0
        rows += count
    if rows:
        chunks.append((slice(row, row + rows), slice(block, len(rows_per_block))))
    return chunks


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
