"""The two ways in which a target runs one packed row of documents; both write the same features.

`BatchedForward` suits every architecture, `PackedForward` those whose attention can be exchanged (see `packed`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dflash_core.target.documents import batch_documents
from dflash_core.target.packed import CannotPackError, PackedDocuments, packed_decoder
from dflash_core.target.taps import TapHooks
from dflash_core.transfer import to_device

log = logging.getLogger(__name__)

PACKED_DEVICES = ("cuda",)
PACKED_DTYPES = (torch.bfloat16, torch.float16)
TRIAL_LENGTHS = (33, 40, 24)
TRIAL_LAYERS = 8
TRIAL_TOLERANCE = 0.2
"""Relative error of the median row: rounding in bf16 gave 0.04 after 34 layers, documents that see each other 0.7."""


@dataclass(frozen=True)
class PackedRow:
    """S tokens on the host: `ids`, `positions` and `documents`, each `[S]`; documents are contiguous, -1 is padding."""

    ids: np.ndarray
    positions: np.ndarray
    documents: np.ndarray

    @classmethod
    def random(cls, lengths: tuple[int, ...], vocab_size: int) -> PackedRow:
        """Documents of these lengths, always the same ones."""
        positions = np.concatenate([np.arange(length) for length in lengths])
        ids = np.random.default_rng(0).integers(0, vocab_size, len(positions))
        return cls(ids, positions, np.repeat(np.arange(len(lengths)), lengths))


class Forward(Protocol):
    def __call__(self, row: PackedRow, slots: dict[int, int], taps: Tensor) -> None:
        """Write the outputs of the layers in `slots` into `taps [S, n*H]`; rows of padding may hold anything."""


class BatchedForward:
    """Documents of similar length as right-padded batches, for any architecture (see `documents`)."""

    def __init__(self, decoder: nn.Module, hooks: TapHooks) -> None:
        self._decoder = decoder
        self._hooks = hooks

    def __call__(self, row: PackedRow, slots: dict[int, int], taps: Tensor) -> None:
        width, device = taps.shape[1] // len(slots), taps.device
        for batch in batch_documents(row.documents):
            rows = to_device(batch.rows_BL[batch.real_BL], device)
            cells = to_device(np.flatnonzero(batch.real_BL), device)
            positions_BL = row.positions[batch.rows_BL[:, :1]] + np.arange(batch.rows_BL.shape[1])

            def write(slot: int, hidden: Tensor, rows: Tensor = rows, cells: Tensor = cells) -> None:
                column = taps[:, slot * width : (slot + 1) * width]
                column.index_copy_(0, rows, hidden.flatten(0, 1).index_select(0, cells))

            self._hooks.run(
                self._decoder,
                slots,
                write,
                input_ids=to_device(row.ids[batch.rows_BL], device),
                position_ids=to_device(positions_BL, device),
                use_cache=False,
            )


class PackedForward:
    """All documents in one forward under variable-length attention; a tap goes straight into its columns.

    Padding between documents counts as a document, padding behind the last one is left out. Raises `CannotPackError`
    when the model turns out not to attend as it promised.
    """

    def __init__(self, decoder: nn.Module, hooks: TapHooks) -> None:
        self._decoder = packed_decoder(decoder)
        self._hooks = hooks

    def __call__(self, row: PackedRow, slots: dict[int, int], taps: Tensor) -> None:
        width, device = taps.shape[1] // len(slots), taps.device
        used = int(np.flatnonzero(row.documents >= 0).max(initial=-1)) + 1
        if used == 0:
            return
        held = PackedDocuments.of(row.documents[:used], device)

        def write(slot: int, hidden: Tensor) -> None:
            taps[:used, slot * width : (slot + 1) * width] = hidden[0]

        self._hooks.run(
            self._decoder,
            slots,
            write,
            input_ids=to_device(row.ids[None, :used], device),
            position_ids=to_device(row.positions[None, :used], device),
            use_cache=False,
            packed_documents=held,
        )
        if held.calls != max(slots) + 1:
            raise CannotPackError(f"{max(slots) + 1} layers ran and {held.calls} attended")


def choose_forward(decoder: nn.Module, hooks: TapHooks, embed_weight: Tensor, num_layers: int) -> Forward:
    """The packed forward where it works, which a trial row shows, else the batched one; the reason is logged.

    `embed_weight [V, H]` tells vocabulary, width, type and device.
    """
    batched = BatchedForward(decoder, hooks)
    if embed_weight.device.type not in PACKED_DEVICES or embed_weight.dtype not in PACKED_DTYPES:
        return batched
    try:
        packed = PackedForward(decoder, hooks)
        _compare(batched, packed, embed_weight, min(num_layers, TRIAL_LAYERS) - 1)
    except CannotPackError as reason:
        log.info("documents run through %s as padded batches: %s", type(decoder).__name__, reason)
        return batched
    return packed


@torch.no_grad()
def _compare(batched: Forward, packed: Forward, embed_weight: Tensor, layer: int) -> None:
    row = PackedRow.random(TRIAL_LENGTHS, embed_weight.shape[0])
    apart, together = (embed_weight.new_empty(len(row.ids), embed_weight.shape[1]) for _ in range(2))
    batched(row, {layer: 0}, apart)
    try:
        packed(row, {layer: 0}, together)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise CannotPackError(f"{type(error).__name__}: {error}") from error
    errors = (together.double() - apart.double()).norm(dim=1) / apart.double().norm(dim=1)
    # The first document looks right even where documents see each other.
    typical = errors[TRIAL_LENGTHS[0] :].median().item()
    if not typical < TRIAL_TOLERANCE:
        raise CannotPackError(f"packed features differ from those of documents alone by {typical:.2g}")
