"""A frozen transformers causal LM whose decoder layers can be tapped (the index convention is in `taps`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from dflash_core.errors import TargetError
from dflash_core.target.forwards import Forward, PackedForward, PackedRow, choose_forward
from dflash_core.target.taps import TapCapture, TapHooks
from dflash_core.transfer import to_device


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
        self._hooks = TapHooks(layers)
        self._choosing = threading.Lock()
        self._forward: Forward | None = None

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
        row = PackedRow(*(_to_numpy(x) for x in (input_ids, position_ids, document_ids)))
        shape = (len(row.ids), len(slots) * self.hidden_size)
        taps = torch.empty(shape, dtype=self.dtype, device=self.device) if out is None else out
        assert taps.shape == shape, f"out has shape {tuple(taps.shape)}"
        self._chosen_forward()(row, slots, taps)
        padding = np.flatnonzero(row.documents < 0)
        if len(padding):
            taps.index_fill_(0, to_device(padding, self.device), 0)
        return taps

    @property
    def packs_documents(self) -> bool:
        """Whether `features` runs a whole row in one forward, or its documents as padded batches."""
        return isinstance(self._chosen_forward(), PackedForward)

    @contextmanager
    def tapping(self, layer_ids: Sequence[int]) -> Iterator[TapCapture]:
        """Capture the taps of every forward of `model` that this thread runs inside, cached ones included.

        Read `features` of the yielded `TapCapture` after each forward.
        """
        slots = self._slots(layer_ids)
        capture = TapCapture(len(slots))
        with self._hooks.receiving(slots, capture.write):
            yield capture

    def _chosen_forward(self) -> Forward:
        """Tried out once, on the device where the model is by now, by whichever thread comes first."""
        with self._choosing:
            if self._forward is None:
                self._forward = choose_forward(self._decoder, self._hooks, self.embed_weight, self.num_layers)
            return self._forward

    def _slots(self, layer_ids: Sequence[int]) -> dict[int, int]:
        ids = list(layer_ids)
        if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_layers:
            raise TargetError(
                f"target_layer_ids {ids} do not fit this target",
                f"they are 0-based layer indices in rising order, and it has {self.num_layers} decoder layers",
                f"choose from 0 to {self.num_layers - 1}",
            )
        return {layer: slot for slot, layer in enumerate(ids)}


def _to_numpy(values: Tensor | np.ndarray) -> np.ndarray:
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    return np.asarray(array, dtype=np.int64)


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
