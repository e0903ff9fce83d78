"""Turning one packed row into right-padded batches of whole documents.

A causal model never looks to the right, so padding behind a document cannot change it, and documents in different
batch rows cannot see each other. Isolation therefore needs no attention mask: the fast causal kernels stay in use,
and it holds for every architecture, recurrent ones included, where a block-diagonal mask would not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FORWARD_OVERHEAD_TOKENS = 128
"""What one more forward costs besides its tokens, in tokens; trades padding against the number of forwards."""


@dataclass(frozen=True)
class DocumentBatch:
    """Documents of similar length, one per batch row: B documents padded to L tokens."""

    rows_BL: np.ndarray
    """Packed row of every cell; cells behind the end of a document repeat its last row."""
    real_BL: np.ndarray
    """False for the cells behind the end of a document."""


def batch_documents(document_ids: np.ndarray) -> list[DocumentBatch]:
    """Split packed rows `[S]` into batches that cover every document exactly once; id -1 marks padding."""
    starts, lengths = document_spans(document_ids)
    batches = []
    for members in group_by_length(lengths):
        length = lengths[members]
        offset_L = np.arange(length.max())
        real_BL = offset_L < length[:, None]
        rows_BL = starts[members][:, None] + np.minimum(offset_L, length[:, None] - 1)
        batches.append(DocumentBatch(rows_BL, real_BL))
    return batches


def document_spans(document_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First row and length of every document, `[D]` each, in row order, padding (-1) left out."""
    edges = np.flatnonzero(np.diff(document_ids)) + 1
    starts = np.concatenate(([0], edges))[: len(document_ids)]
    lengths = np.diff(np.append(starts, len(document_ids)))
    ids = document_ids[starts]
    assert len(np.unique(ids[ids >= 0])) == (ids >= 0).sum(), "a document must be one contiguous span of rows"
    return starts[ids >= 0], lengths[ids >= 0]


def group_by_length(lengths: np.ndarray, overhead: int = FORWARD_OVERHEAD_TOKENS) -> list[np.ndarray]:
    """Partition documents so that padded tokens plus `overhead` per group are fewest.

    An optimal grouping is contiguous in the order of lengths, so dynamic programming over that order is exact.
    """
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order]
    cost = np.zeros(len(order) + 1)
    first = np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):
        members = end - np.arange(end)
        candidates = cost[:end] + members * longest_first[:end] + overhead
        first[end] = candidates.argmin()
        cost[end] = candidates[first[end]]
    groups = []
    end = len(order)
    while end:
        groups.append(order[first[end] : end])
        end = int(first[end])
    return groups
