"""Packed batches: rows of a fixed number of tokens that hold whole chats, in an order that can be entered anywhere."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_core.config import DataConfig
from dflash_core.data.chats import ChatIndex
from dflash_core.data.encode import Encoded, SampleRefused, encode_chat
from dflash_core.data.rows import StreamState, epoch_order, next_row
from dflash_core.errors import DataError

__all__ = ["BatchCount", "BatchIterator", "BatchStream", "PackedBatch", "StreamState"]

UNKNOWN = -1
UNUSABLE = 0


@dataclass(frozen=True)
class PackedBatch:
    """One row of S = `tokens_per_batch` tokens; document k of the row is chat `sample_ids[k]` of the index."""

    sequence: int
    epoch: int
    input_ids: np.ndarray
    """`[S]` int64; 0 in the padding."""
    loss_mask: np.ndarray
    """`[S]` bool."""
    document_ids: np.ndarray
    """`[S]` int64: 0, 1, ... in order; -1 is padding."""
    position_ids: np.ndarray
    """`[S]` int64: the place inside the document; 0 in the padding."""
    sample_ids: tuple[int, ...]
    next_state: StreamState
    """The state behind this batch; `BatchStream.start` enters it at once."""

    @property
    def num_tokens(self) -> int:
        """The tokens that are not padding."""
        return int((self.document_ids >= 0).sum())


@dataclass(frozen=True)
class BatchCount:
    """A number of batches; `exact` is False when it was extrapolated from a part of the chats."""

    batches: int
    exact: bool


class BatchStream:
    """Packed batches over a set of chats, epoch after epoch. Batch n is the same in every process and after resume."""

    def __init__(
        self, index: ChatIndex, tokenizer: Any, config: DataConfig, *, seed: int, shuffle: bool = True
    ) -> None:
        """Nothing is read yet. Without `shuffle` every epoch has the order of the files."""
        self.index = index
        self.config = config
        self.dropped: Counter[str] = Counter()
        """Chats met so far that cannot be used, by reason (see `encode_chat`), each counted once."""
        self._tokenizer = tokenizer
        self._seed = seed
        self._shuffle = shuffle
        self._lengths = np.full(len(index), UNKNOWN, dtype=np.int32)
        self._first_refusal: SampleRefused | None = None
        self._lock = threading.Lock()

    def start(self, at: StreamState | int = 0, *, epochs: int | None = None) -> BatchIterator:
        """Iterate from a batch onwards, up to the end of epoch `epochs - 1` (default: for ever).

        A `StreamState` is entered at once. A bare sequence number must first find out how everything before it was
        packed, which reads and tokenises those chats once. `next` raises `DataError` for a line that cannot be read,
        and when an epoch holds no usable chat.
        """
        iterator = BatchIterator(self, at if isinstance(at, StreamState) else StreamState(), epochs)
        if not isinstance(at, StreamState):
            while iterator.state.sequence < at:
                iterator.skip()
        return iterator

    def count_batches(self, epochs: int, *, sample_limit: int = 4096) -> BatchCount:
        """How many batches `epochs` epochs give: exact up to `sample_limit` chats, estimated above."""
        size = len(self.index)
        if size > sample_limit:
            part = self.order(0)[:sample_limit]
            mean = sum(self.length(int(sample)) for sample in part) / sample_limit
            per_epoch = max(1, math.ceil(mean * size / self.config.tokens_per_batch))
            return BatchCount(per_epoch * epochs, exact=False)
        iterator = self.start(epochs=epochs)
        while iterator.skip():
            pass
        return BatchCount(iterator.state.sequence, exact=True)

    def encode(self, sample: int) -> Encoded | None:
        """One chat encoded, or None when it is unusable, which `dropped` counts."""
        chat = self.index[sample]
        try:
            encoded = encode_chat(
                chat.messages,
                self._tokenizer,
                self.config.max_length,
                self.config.on_overlong,
                complete=chat.complete,
                place=chat.place,
            )
        except SampleRefused as refusal:
            self._remember(sample, UNUSABLE, refusal)
            return None
        self._remember(sample, len(encoded))
        return encoded

    def length(self, sample: int, keep: dict[int, Encoded] | None = None) -> int:
        """Tokens of one chat, 0 if unusable. What had to be encoded to find out is left in `keep`."""
        if self._lengths[sample] == UNKNOWN:
            encoded = self.encode(sample)
            if keep is not None and encoded is not None:
                keep[sample] = encoded
        return int(self._lengths[sample])

    def order(self, epoch: int) -> np.ndarray:
        """The order of the chats in one epoch, `[len(index)]`."""
        return epoch_order(len(self.index), self._seed, epoch, shuffle=self._shuffle)

    def nothing_usable(self) -> DataError:
        """The error for a set of chats none of which can be used."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        first = self._first_refusal
        assert first is not None, "chats are left out only by refusing them"
        files = ", ".join(map(str, self.index.files))
        return DataError(
            f"none of the {len(self.index)} chats in {files} can be used",
            f"dropped: {counts}; the first was {first.what}",
            first.fix,
        )

    def _remember(self, sample: int, length: int, refusal: SampleRefused | None = None) -> None:
        with self._lock:
            if self._lengths[sample] == UNKNOWN:
                self._lengths[sample] = length
                if refusal is not None:
                    self.dropped[refusal.reason] += 1
                    self._first_refusal = self._first_refusal or refusal


class BatchIterator(Iterator[PackedBatch]):
    """The batches from one state on. Threads may share it: each batch goes to one of them."""

    def __init__(self, stream: BatchStream, state: StreamState, epochs: int | None) -> None:
        self.state = state
        """The state of the batch that comes next."""
        self._stream = stream
        self._epochs = epochs
        self._order: tuple[int, np.ndarray] | None = None
        self._encoded: dict[int, Encoded] = {}
        self._lock = threading.Lock()

    def __next__(self) -> PackedBatch:
        with self._lock:
            before = self.state
            row, epoch = self._advance(self._encoded)
            if not row:
                raise StopIteration
            return self._pack(before.sequence, epoch, row)

    def skip(self) -> bool:
        """Pass over one batch without building it; False at the end."""
        with self._lock:
            return bool(self._advance(None)[0])

    def _advance(self, keep: dict[int, Encoded] | None) -> tuple[list[int], int]:
        """The chats of the next row and its epoch; no chats at the end."""
        while self._epochs is None or self.state.epoch < self._epochs:
            epoch, fresh = self.state.epoch, self.state.cursor == 0
            if self._order is None or self._order[0] != epoch:
                self._order = epoch, self._stream.order(epoch)
            row, self.state = next_row(
                self.state,
                self._order[1],
                lambda sample: self._stream.length(sample, keep),
                self._stream.config.tokens_per_batch,
            )
            if row:
                return row, epoch
            if fresh:
                raise self._stream.nothing_usable()
        return [], self.state.epoch

    def _pack(self, sequence: int, epoch: int, row: list[int]) -> PackedBatch:
        size = self._stream.config.tokens_per_batch
        batch = PackedBatch(
            sequence=sequence,
            epoch=epoch,
            input_ids=np.zeros(size, dtype=np.int64),
            loss_mask=np.zeros(size, dtype=bool),
            document_ids=np.full(size, -1, dtype=np.int64),
            position_ids=np.zeros(size, dtype=np.int64),
            sample_ids=tuple(row),
            next_state=self.state,
        )
        at = 0
        for number, sample in enumerate(row):
            encoded = self._encoded.pop(sample, None)
            if encoded is None:
                encoded = self._stream.encode(sample)
            assert encoded is not None, "a chat that had a length has become unusable"
            span = slice(at, at + len(encoded))
            batch.input_ids[span] = encoded.input_ids
            batch.loss_mask[span] = encoded.loss_mask
            batch.document_ids[span] = number
            batch.position_ids[span] = np.arange(len(encoded))
            at = span.stop
        return batch
