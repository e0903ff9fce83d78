"""A frozen transformers causal LM whose decoder layers can be tapped.

Index convention: tap `l` is the output of decoder layer `l`, counted from 0, as a forward hook on `layers[l]` sees
it. In the tuple that `output_hidden_states=True` returns this is entry `l + 1`, except for the last layer: there the
tuple holds the state after the final norm, and a tap the state before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from dflash_core.errors import TargetError
from dflash_core.target.documents import batch_documents

TapWriter = Callable[[int, Tensor], None]
"""Receives the slot of a tapped layer (its place among the tapped ones) and the layer's output `[B, L, H]`."""


class _LastTapSeen(BaseException):
    """Leaves the model's forward once the last tapped layer has run.

    A BaseException, so that no `except Exception` inside a model's forward can swallow it.
    """


class _Taps(threading.local):
    """Who receives layer outputs, per thread: threads that share a target never see each other's taps."""

    slots: dict[int, int] | None = None
    write: TapWriter | None = None


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


class Target:
    """A frozen target. It never changes after construction, so several threads may share one."""

    def __init__(self, model: Any) -> None:
        """Wrap a transformers causal LM, in place: evaluation mode, no gradients, one hook per decoder layer.

        The generation settings that came with the model are dropped (`eos_ids` keeps the end tokens), so that nothing
        but our own settings shapes what it writes.

        Raises `TargetError` when the model has no list of decoder layers, no head, or a head with a bias.
        """
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self._decoder, layers = _find_layers(model)
        self._head = _find_head(model)
        self.num_layers = len(layers)
        self.eos_ids = _eos_ids(model)
        """Ids that end an answer, as the model's generation and model configs name them."""
        self.cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        """Keyword of `model` for a KV cache; transformers renames it within version 5."""
        model.generation_config = GenerationConfig.from_dict({})
        self._taps = _Taps()
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(index))

    @property
    def embed_weight(self) -> Tensor:
        """The token embedding table, `[V, H]`. Use `embed` for lookups: some models scale them."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        """The language-model head, `[V, H]`; the same tensor as `embed_weight` where the two are tied."""
        weight: Tensor = self._head.weight
        return weight

    @property
    def hidden_size(self) -> int:
        return self.embed_weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of `ids` of any shape, with `[H]` appended to it, as the model itself computes them."""
        with torch.no_grad():
            embeddings: Tensor = self.model.get_input_embeddings()(ids)
        return embeddings

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor | np.ndarray,
        position_ids: Tensor | np.ndarray,
        document_ids: Tensor | np.ndarray,
        layer_ids: Sequence[int],
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Taps of one packed row, `[S, n*H]`, in the order of `layer_ids`; rows of padding are zero.

        `input_ids`, `position_ids` and `document_ids` are `[S]`, best on the CPU (they are read there). Documents
        are contiguous and cannot see each other; -1 is padding. Positions count up by one inside a document. The
        forward stops after the last tapped layer, never touches the head and keeps no KV cache. The result is
        written into `out` if given (`[S, n*H]`, this target's dtype and device).
        """
        slots = self._slots(layer_ids)
        ids, positions, documents = (_to_numpy(x) for x in (input_ids, position_ids, document_ids))
        width = self.hidden_size
        taps = out
        if taps is None:
            taps = torch.empty(len(ids), len(slots) * width, dtype=self.dtype, device=self.device)
        assert taps.shape == (len(ids), len(slots) * width), f"out has shape {tuple(taps.shape)}"
        taps[self._on_device(np.flatnonzero(documents < 0))] = 0
        for batch in batch_documents(documents):
            rows = self._on_device(batch.rows_BL[batch.real_BL])
            cells = self._on_device(np.flatnonzero(batch.real_BL))
            positions_BL = positions[batch.rows_BL[:, :1]] + np.arange(batch.rows_BL.shape[1])

            def write(slot: int, hidden: Tensor, rows: Tensor = rows, cells: Tensor = cells) -> None:
                column = taps[:, slot * width : (slot + 1) * width]
                column.index_copy_(0, rows, hidden.flatten(0, 1).index_select(0, cells))
                if slot == len(slots) - 1:
                    raise _LastTapSeen

            self._run_until_last_tap(ids[batch.rows_BL], positions_BL, slots, write)
        return taps

    @contextmanager
    def tapping(self, layer_ids: Sequence[int]) -> Iterator[TapCapture]:
        """Capture the taps of every forward of `model` that this thread runs inside, cached ones included.

        Read `features` of the yielded `TapCapture` after each forward.
        """
        slots = self._slots(layer_ids)
        capture = TapCapture(len(slots))
        with self._receiving(slots, capture.write):
            yield capture

    def _run_until_last_tap(
        self, ids_BL: np.ndarray, positions_BL: np.ndarray, slots: dict[int, int], write: TapWriter
    ) -> None:
        with self._receiving(slots, write):
            try:
                self._decoder(
                    input_ids=self._on_device(ids_BL),
                    position_ids=self._on_device(positions_BL),
                    use_cache=False,
                )
            except _LastTapSeen:
                return
        raise AssertionError("the forward ended before the last tapped layer")

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def on_output(_module: nn.Module, _args: Any, output: Any) -> None:
            taps = self._taps
            if taps.slots is not None and taps.write is not None and index in taps.slots:
                taps.write(taps.slots[index], output[0] if isinstance(output, tuple) else output)

        return on_output

    @contextmanager
    def _receiving(self, slots: dict[int, int], write: TapWriter) -> Iterator[None]:
        taps = self._taps
        before = taps.slots, taps.write
        taps.slots, taps.write = slots, write
        try:
            yield
        finally:
            taps.slots, taps.write = before

    def _slots(self, layer_ids: Sequence[int]) -> dict[int, int]:
        ids = list(layer_ids)
        if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_layers:
            raise TargetError(
                f"target_layer_ids {ids} do not fit this target",
                f"they are 0-based layer indices in rising order, and it has {self.num_layers} decoder layers",
                f"choose from 0 to {self.num_layers - 1}",
            )
        return {layer: slot for slot, layer in enumerate(ids)}

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device, non_blocking=True)


def _to_numpy(values: Tensor | np.ndarray) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _find_layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise TargetError(
            f"{type(model).__name__} has no list of decoder layers at get_decoder().layers",
            "features are tapped by hooks on the target's decoder layers",
            "use a target whose transformers class follows the Llama layout (model.layers)",
        )
    assert decoder is not None
    return decoder, layers


def _find_head(model: Any) -> Any:
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise TargetError(
            f"{type(model).__name__} has {'no language-model head' if head is None else 'a head with a bias'}",
            "the drafter shares the target's head, one plain matrix",
            "use a causal language model whose head has no bias",
        )
    return head


def _eos_ids(model: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list) else [ids])
    return tuple(sorted(found))
