"""Variable-length attention over the documents of one packed row, for targets whose attention can be exchanged.

transformers looks up a model's attention by the name in its configuration. So a second tree of the decoder's modules,
which shares every weight with the first and differs in its configuration only, runs flash attention over whole packed
rows (`torch.nn.attention.varlen`), with no padding and no mask, while decoding goes on with the model's own attention.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from dflash_core.transfer import to_device

IMPLEMENTATION = "dflash_packed"
LAYER_TYPES = {"full_attention", "sliding_attention"}
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

_HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""Options of an attention call that do not change its result."""


class CannotPackError(Exception):
    """Why the documents of a target cannot run packed."""


@dataclass
class PackedDocuments:
    """D documents, one behind the other, that cover a row of S tokens: `bounds [D+1]` int32, from 0 to S."""

    bounds: Tensor
    longest: int
    calls: int = 0
    """How many layers have attended so far."""

    @classmethod
    def of(cls, document_ids: np.ndarray, device: torch.device) -> PackedDocuments:
        """From ids `[S]`: a run of equal ids is a document."""
        edges = np.flatnonzero(np.diff(document_ids)) + 1
        bounds = np.concatenate(([0], edges, [len(document_ids)])).astype(np.int32)
        return cls(to_device(bounds, device), int(np.diff(bounds).max()))


def packed_decoder(decoder: nn.Module) -> nn.Module:
    """A tree of modules with the weights of `decoder`, whose attention isolates `PackedDocuments`.

    Raises `CannotPackError` for what the class and its configuration already tell. Whether the result is right shows
    only when it runs.
    """
    config: Any = getattr(decoder, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    parameters = inspect.signature(type(decoder).forward).parameters.values()
    if not getattr(decoder, "_supports_flash_attn", False):
        raise CannotPackError("its class does not offer flash attention")
    if kinds or any(isinstance(module, nn.Conv1d) for module in decoder.modules()):
        raise CannotPackError(f"not only attention mixes its tokens ({', '.join(sorted(kinds)) or 'convolutions'})")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise CannotPackError("its forward takes no further options")
    shared = {id(tensor): tensor for tensor in (*decoder.parameters(), *decoder.buffers())}
    twin: Any = copy.deepcopy(decoder, shared)
    twin.config._attn_implementation = IMPLEMENTATION
    return twin


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    packed_documents: PackedDocuments | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, called by transformers; nothing waits for the device.

    `query [1, Hq, S, D]`, `key` and `value` `[1, Hkv, S, D]` → `[1, S, Hq, D]`. A sliding window of W tokens counts
    the query itself. Raises `CannotPackError` when the model wants anything else (softcapping, sinks, a mask).
    """
    unknown = sorted(name for name, option in options.items() if option is not None and name not in _HARMLESS)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if packed_documents is None or attention_mask is not None or not causal or unknown or dropout:
        raise CannotPackError(f"its attention wants {', '.join(unknown) or 'something else than packed documents'}")
    if query.shape[0] != 1 or value.shape[-1] != query.shape[-1] or key.shape[2] != query.shape[2]:
        raise CannotPackError(f"its attention has the shapes {tuple(query.shape)} and {tuple(value.shape)}")
    packed_documents.calls += 1
    bounds, longest = packed_documents.bounds, packed_documents.longest
    # The window is (left, right), and no window is the faster kernel.
    left = -1 if sliding_window is None or sliding_window >= longest else sliding_window - 1
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    mixed = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), **_GROUPED)
    assert isinstance(mixed, Tensor)
    return mixed[None], None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
