"""Which chats go into which row: a seeded order and a packing that can be entered anywhere.

Every epoch visits all chats in a shuffled order. A row is filled from that order; a chat that no longer fits waits and
goes first into the next row, and a row is closed when it is nearly full or `LOOKAHEAD` chats wait. So no chat is
split, little of a row stays empty, and where a stream stands is a handful of numbers: the epoch, the place in its
order, and the chats that wait. Only lengths matter here; nothing is read or tokenised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

LOOKAHEAD = 16
NEARLY_FULL_TOKENS = 24
"""Rows with less room than this are closed: hardly any chat is that short."""


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands: the number of the next batch, and what is needed to build it."""

    sequence: int = 0
    epoch: int = 0
    cursor: int = 0
    """Place in the epoch's order."""
    waiting: tuple[int, ...] = ()
    """Chats that did not fit into the rows before, first in, first out."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "waiting": list(self.waiting)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StreamState:
        """The inverse of `to_dict`."""
        return cls(values["sequence"], values["epoch"], values["cursor"], tuple(values["waiting"]))


def epoch_order(size: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """The order of chats in one epoch, `[size]` int64. Depends on nothing but the arguments.

    Sorts raw Philox output, whose stream numpy guarantees, unlike that of `Generator.permutation`.
    """
    if not shuffle:
        return np.arange(size)
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(size), kind="stable")


def next_row(
    state: StreamState, order: np.ndarray, length_of: Callable[[int], int], capacity: int
) -> tuple[list[int], StreamState]:
    """The chats of the next row of `capacity` tokens, and the state behind it.

    `length_of` gives a chat's tokens, at most `capacity`, or 0 for a chat that is left out. The row is empty, and the
    state that of the next epoch, when the rest of the epoch holds nothing to pack.
    """
    row: list[int] = []
    waiting: list[int] = []
    room = capacity

    def place(sample: int) -> None:
        nonlocal room
        length = length_of(sample)
        if length > room:
            waiting.append(sample)
        elif length > 0:
            row.append(sample)
            room -= length

    for sample in state.waiting:
        place(sample)
    cursor = state.cursor
    while cursor < len(order) and len(waiting) < LOOKAHEAD and room >= NEARLY_FULL_TOKENS:
        place(int(order[cursor]))
        cursor += 1
    sequence = state.sequence + bool(row)
    if cursor == len(order) and not waiting:
        return row, StreamState(sequence, state.epoch + 1)
    return row, StreamState(sequence, state.epoch, cursor, tuple(waiting))
