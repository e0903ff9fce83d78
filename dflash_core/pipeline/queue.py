"""A bounded hand-over of numbered items: filled in any order, taken by number.

Targets claim the next number before they compute, and may claim only `capacity` numbers beyond the oldest one
not yet taken. So a slow drafter holds the targets back, memory is bounded, and the item everybody waits for is
always among the claimed ones: the queue cannot deadlock, whatever the number of producers and consumers.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from dflash_core.pipeline.control import Control, StalledError

Item = TypeVar("Item")


class FeatureQueue(Generic[Item]):
    """Numbers run from `first` to `end` - 1."""

    def __init__(self, capacity: int, control: Control, *, first: int, end: int, stall_s: float) -> None:
        assert capacity >= 1
        self._capacity = capacity
        self._control = control
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._items: dict[int, Item] = {}
        self._claimed_by: dict[int, str] = {}
        self._taken: set[int] = set()
        self._oldest_untaken = first
        self._next_claim = first
        self._end = end

    def claim(self, worker: str) -> int | None:
        """Reserve the next number for `worker`, waiting for room; None when there are no more."""
        with self._changed:
            self._control.wait(self._changed, self._may_claim)
            if self._next_claim >= self._end:
                return None
            sequence = self._next_claim
            self._next_claim += 1
            self._claimed_by[sequence] = worker
            return sequence

    def _may_claim(self) -> bool:
        return self._next_claim >= self._end or self._next_claim < self._oldest_untaken + self._capacity

    def put(self, sequence: int, item: Item) -> None:
        """Deliver a claimed number."""
        with self._changed:
            assert sequence in self._claimed_by and sequence not in self._items, sequence
            self._items[sequence] = item
            self._changed.notify_all()

    def take(self, sequence: int) -> tuple[Item, float]:
        """Wait for `sequence` and remove it; returns the item and the seconds waited.

        Raises `StalledError` when its producer is silent for longer than the queue's deadline.
        """
        with self._changed:
            waited = self._control.wait(
                self._changed,
                lambda: sequence in self._items,
                deadline_s=self._stall_s,
                late=lambda: StalledError(
                    self._claimed_by.get(sequence, "no target"), f"the features of batch {sequence}", self._stall_s
                ),
            )
            item = self._items.pop(sequence)
            del self._claimed_by[sequence]
            self._taken.add(sequence)
            while self._oldest_untaken in self._taken:
                self._taken.remove(self._oldest_untaken)
                self._oldest_untaken += 1
            self._changed.notify_all()
            return item, waited

    def __len__(self) -> int:
        """Items delivered and not yet taken."""
        with self._changed:
            return len(self._items)
