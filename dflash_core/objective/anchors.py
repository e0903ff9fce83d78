"""Where blocks start: anchors are drawn per document, by seeds that know nothing about packing or workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dflash_core.attention import BlockLayout

Ints = NDArray[np.int64]
SeedKey = tuple[int, int, Sequence[int]]  # seed, epoch, sample id of every document


@dataclass(frozen=True)
class Anchors:
    """N slots: ``positions [N]`` (row of P), ``lo [N]`` (first row of its document), ``valid [N]`` bool.

    Valid slots come first, in ascending order; unused ones hold zeros.
    """

    positions: Tensor
    valid: Tensor
    lo: Tensor

    def layout(self, block_size: int) -> BlockLayout:
        """The blocks of these anchors: each sees its document strictly before P."""
        return BlockLayout(self.lo, self.positions, block_size, self.valid)


def sample_anchors(
    loss_mask: ArrayLike | Tensor, document_ids: ArrayLike | Tensor, *, capacity: int, seed_key: SeedKey
) -> Anchors:
    """Draw up to ``capacity`` anchors from one packed row, without replacement, uniformly within each document.

    ``loss_mask [S]`` bool; ``document_ids [S]``: contiguous documents numbered 0, 1, … along the row, -1 is
    padding. P may be an anchor iff P and P+1 are supervised and in the same document: a first block in decoding
    starts from the first answer token, so nothing is lost. With more such P than slots, documents get equal
    numbers of slots as far as they can use them, so that long documents do not starve short ones. What is drawn
    in a document depends on (seed, epoch, its sample id) and on its number of slots only.
    """
    mask, documents = np.asarray(loss_mask, dtype=bool), np.asarray(document_ids, dtype=np.int64)
    seed, epoch, sample_ids = seed_key
    starts = _document_starts(documents, len(sample_ids))
    allowed = np.flatnonzero(mask[:-1] & mask[1:] & (documents[:-1] == documents[1:]) & (documents[:-1] >= 0))
    counts = np.bincount(documents[allowed], minlength=len(sample_ids))
    streams = [_stream(seed, epoch, sample, count) for sample, count in zip(sample_ids, counts.tolist(), strict=True)]
    slots = allot(counts, capacity, tie_breaks=[tie_break for tie_break, _ in streams])
    drawn = [
        candidates[np.argsort(order, kind="stable")[:slot]]
        for candidates, (_, order), slot in zip(
            np.split(allowed, np.cumsum(counts))[:-1], streams, slots.tolist(), strict=True
        )
    ]
    positions = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *drawn]))
    return Anchors(
        positions=_padded(positions, capacity),
        valid=torch.arange(capacity) < len(positions),
        lo=_padded(starts[documents[positions]], capacity),
    )


def allot(counts: Ints, capacity: int, *, tie_breaks: Sequence[int]) -> Ints:
    """Slots per document, at most its ``counts``, at most ``capacity`` together, as equal as possible.

    min(count, level) with the highest level that fits; what remains goes one by one to the documents with the
    smallest ``tie_breaks`` among those that can use more.
    """
    if counts.sum() <= capacity:
        return counts
    level, too_high = 0, int(counts.max())
    while too_high - level > 1:
        middle = (level + too_high) // 2
        level, too_high = (middle, too_high) if np.minimum(counts, middle).sum() <= capacity else (level, middle)
    slots = np.minimum(counts, level)
    hungry = sorted(np.flatnonzero(counts > level).tolist(), key=lambda d: tie_breaks[d])
    slots[hungry[: capacity - int(slots.sum())]] += 1
    return slots


def _stream(seed: int, epoch: int, sample_id: int, count: int) -> tuple[int, NDArray[np.uint64]]:
    """A tie-break and ``count`` sort keys. Raw Philox words are stable over numpy versions, permutations are not."""
    raw = np.random.Philox(np.random.SeedSequence((seed, epoch, sample_id))).random_raw(count + 1)
    return int(raw[0]), raw[1:]


def _document_starts(documents: Ints, number: int) -> Ints:
    """The first row of every document."""
    real = documents[documents >= 0]
    assert np.all(np.diff(real) >= 0) and (real.size == 0 or real[-1] < number), "documents are 0, 1, … in order"
    firsts = np.flatnonzero(np.diff(documents, prepend=-2))
    starts = np.zeros(number, dtype=np.int64)
    firsts = firsts[documents[firsts] >= 0]
    starts[documents[firsts]] = firsts
    return starts


def _padded(values: Ints, capacity: int) -> Tensor:
    padded = np.zeros(capacity, dtype=np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded)
