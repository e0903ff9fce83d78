"""Hooks that hand out what decoder layers put out.

Index convention: tap `l` is the output of decoder layer `l`, counted from 0, as a forward hook on `layers[l]` sees
it. In the tuple that `output_hidden_states=True` returns this is entry `l + 1`, except for the last layer: there the
tuple holds the state after the final norm, and a tap the state before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

TapWriter = Callable[[int, Tensor], None]
"""Receives the slot of a tapped layer (its place among the tapped ones) and the layer's output `[B, L, H]`."""


class _LastTapSeen(BaseException):
    """Leaves the model's forward once the last tapped layer has run.

    A BaseException, so that no `except Exception` inside a model's forward can swallow it.
    """


class _Receiver(threading.local):
    """Who receives layer outputs, per thread: threads that share a target never see each other's taps."""

    slots: dict[int, int] | None = None
    write: TapWriter | None = None


class TapHooks:
    """One hook per decoder layer, idle unless the calling thread receives. `slots` map tapped layers to 0, 1, ..."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._receiver = _Receiver()
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(index))

    @contextmanager
    def receiving(self, slots: dict[int, int], write: TapWriter) -> Iterator[None]:
        """Every forward of this thread inside writes its taps to `write`, layer after layer."""
        receiver = self._receiver
        before = receiver.slots, receiver.write
        receiver.slots, receiver.write = slots, write
        try:
            yield
        finally:
            receiver.slots, receiver.write = before

    def run(self, decoder: nn.Module, slots: dict[int, int], write: TapWriter, **inputs: Any) -> None:
        """Forward of `decoder` up to the last tapped layer; nothing behind it runs."""

        def write_and_leave(slot: int, hidden: Tensor) -> None:
            write(slot, hidden)
            if slot == len(slots) - 1:
                raise _LastTapSeen

        with self.receiving(slots, write_and_leave):
            try:
                decoder(**inputs)
            except _LastTapSeen:
                return
        raise AssertionError("the forward ended before the last tapped layer")

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def on_output(_module: nn.Module, _args: Any, output: Any) -> None:
            receiver = self._receiver
            if receiver.slots is not None and receiver.write is not None and index in receiver.slots:
                receiver.write(receiver.slots[index], output[0] if isinstance(output, tuple) else output)

        return on_output


class TapCapture:
    """The taps of the latest forward inside `Target.tapping`."""

    def __init__(self, num_taps: int) -> None:
        self._num_taps = num_taps
        self._features: Tensor | None = None
        self._filled = 0

    @property
    def features(self) -> Tensor:
        """Taps of the latest forward, `[rows, n*H]`; rows are the forward's tokens, batch after batch."""
        assert self._features is not None and self._filled == self._num_taps, "no whole forward was captured"
        return self._features

    def write(self, slot: int, hidden: Tensor) -> None:
        rows = hidden.detach().flatten(0, -2)
        if slot == 0:
            self._features = rows.new_empty(rows.shape[0], self._num_taps * rows.shape[1])
            self._filled = 0
        assert self._features is not None
        width = rows.shape[1]
        self._features[:, slot * width : (slot + 1) * width] = rows
        self._filled += 1
