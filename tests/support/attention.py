"""Layouts and inputs that the tests of every attention backend share."""

import torch

from dflash_core.attention import BlockLayout

# Blocks without context, of several lengths, in several documents, unordered, and unused slots.
SPANS = [(0, 0), (0, 5), (0, 12), None, (15, 16), (15, 25), (15, 24), (30, 39), None]


def layout_of(spans, block_size):
    lo = torch.tensor([span[0] if span else 0 for span in spans], dtype=torch.long)
    hi = torch.tensor([span[1] if span else 0 for span in spans], dtype=torch.long)
    return BlockLayout(lo, hi, block_size, torch.tensor([span is not None for span in spans]))


def inputs(layout, rows, *, heads=4, kv_heads=2, width=8, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(layout.num_rows, heads), (rows, kv_heads), (rows, kv_heads)] + [(layout.num_rows, kv_heads)] * 2
    return [torch.randn(*shape, width, generator=rng, dtype=dtype).requires_grad_() for shape in shapes]
