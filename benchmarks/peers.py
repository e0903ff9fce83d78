"""The DFlash cores of two published trainers, as step functions; their own code paths, from their wheels.

    pip install --no-deps -r requirements/peers.txt

Their packages import servers and data tools on the way in, so the packages around the core are entered without their
`__init__`. A peer's step is what its trainer runs per micro-batch, without its optimizer: draw anchors, embed, draft,
loss, backward. Both compile flex_attention as they do in training.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

if TYPE_CHECKING:
    from step import Case, Inputs

Step = Callable[[], Tensor]


def specforge(case: Case, inputs: Inputs, *, liger: bool = False) -> Step:
    """`OnlineDFlashModel` of specforge with its defaults: flex attention, objective in chunks of 128 blocks.

    ``liger``: with its optional Liger-Kernel norms and SwiGLU.
    """
    _bare("specforge.modeling", "specforge.modeling.draft", "specforge.algorithms", "specforge.algorithms.common")
    family: Any = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    kernels: Any = importlib.import_module("specforge.modeling.draft.dflash_kernels")
    config = _qwen3(case, "flex_attention")
    config.block_size, config.num_target_layers = case.block, case.shape.target_layers
    config.dflash_config = {"mask_token_id": inputs.mask_token_id, "target_layer_ids": list(case.shape.taps)}
    draft = _on_device(
        lambda: family.DFlashDraftModel(config, kernels.load_liger_dflash_kernels() if liger else None), inputs
    )
    model = family.OnlineDFlashModel(
        draft,
        _frozen(inputs.head),
        nn.Embedding.from_pretrained(inputs.embed),
        mask_token_id=inputs.mask_token_id,
        block_size=case.block,
        attention_backend="flex_attention",
        num_anchors=case.anchors,
        loss_decay_gamma=case.gamma,
    ).train()
    batch = (inputs.input_ids[None], inputs.taps[None], torch.ones_like(inputs.input_ids[None]))

    def step() -> Tensor:
        loss: Tensor = model(*batch)[0]
        return _differentiate(loss, draft)

    return step


def speculators(case: Case, inputs: Inputs) -> Step:
    """`DFlashDraftModel` of speculators: compiled forward, fused cross-entropy against the verifier's arg-max."""
    _bare("speculators", "speculators.models")
    sys.modules["speculators"].SpeculatorModelConfig = importlib.import_module(  # type: ignore[attr-defined]
        "speculators.config"
    ).SpeculatorModelConfig
    config_module: Any = importlib.import_module("speculators.models.dflash.config")
    core: Any = importlib.import_module("speculators.models.dflash.core")
    losses: Any = importlib.import_module("speculators.losses")
    config_module.DFlashSpeculatorConfig.model_rebuild(_types_namespace={"torch": torch})
    config = config_module.DFlashSpeculatorConfig(
        transformer_layer_config=_qwen3(case, "simple_flex_attention"),
        draft_vocab_size=case.shape.vocab_size,
        block_size=case.block,
        aux_hidden_state_layer_ids=[layer + 1 for layer in case.shape.taps],
        mask_token_id=inputs.mask_token_id,
    )
    draft = _on_device(lambda: core.DFlashDraftModel(config), inputs)
    draft.embed_tokens.weight.data, draft.lm_head.weight.data = inputs.embed, inputs.head
    draft.verifier_lm_head.weight.data = inputs.head
    ids = inputs.input_ids[None]
    batch = (inputs.taps[None], ids, torch.ones_like(ids), inputs.last_hidden[None], torch.zeros_like(ids))
    options = {
        "loss_config": losses.resolve_loss_config("ce", "fused"),
        "gamma": case.gamma,
        "max_anchors": case.anchors,
    }

    def step() -> Tensor:
        loss: Tensor = draft(*batch, **options)[1]
        return _differentiate(loss, draft)

    return step


def _differentiate(loss: Tensor, draft: nn.Module) -> Tensor:
    for parameter in draft.parameters():
        parameter.grad = None
    loss.backward()
    return loss.detach()


def _qwen3(case: Case, attention: str) -> Qwen3Config:
    shape = case.shape
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        layer_types=["full_attention"] * shape.layers,
        tie_word_embeddings=False,
    )
    config._attn_implementation = attention
    return config


def _on_device(build: Callable[[], nn.Module], inputs: Inputs) -> Any:
    """The module in bf16 on the inputs' device, built there: a billion parameters take long on a CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(inputs.taps.dtype)
    try:
        with inputs.taps.device:
            module = build()
    finally:
        torch.set_default_dtype(before)
    return module.to(inputs.taps.dtype).train()


def _frozen(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _bare(*packages: str) -> None:
    """Enter packages without running their `__init__`; the modules inside import as usual."""
    for name in packages:
        if name in sys.modules:
            continue
        parent, _, own = name.rpartition(".")
        if parent:
            folders = [str(Path(folder, own)) for folder in importlib.import_module(parent).__path__]
        else:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.submodule_search_locations, f"{name} is not installed"
            folders = list(spec.submodule_search_locations)
        package = ModuleType(name)
        package.__path__ = folders
        sys.modules[name] = package
