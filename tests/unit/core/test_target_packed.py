"""Packed documents under variable-length attention: the same features in one forward, or the old way and a reason.

The kernel itself runs on a GPU only. On a CPU a few lines of dense attention stand in for it, so that everything
around it (which models qualify, windows, bounds, taps, shared weights) is tested everywhere.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
)

from dflash_core.target import Target, forwards, packed
from dflash_core.target.packed import PackedDocuments

LAYERS = 4
SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2)}
PACKED = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "qwen3 sliding": lambda: Qwen3Config(**SMALL, use_sliding_window=True, **SLIDING),
    "phi3": lambda: Phi3Config(**SMALL, sliding_window=8),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
BATCHED = {
    "softcap": (lambda: Gemma2Config(**SMALL, **SLIDING), "softcap"),
    "sinks": (lambda: GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, **SLIDING), "s_aux"),
    "convolutions": (
        lambda: Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * (LAYERS // 2)),
        "not only attention",
    ),
    "parallel recurrence": (
        lambda: FalconH1Config(**SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1,
                               mamba_d_state=8, mamba_chunk_size=16),
        "not only attention",
    ),
}  # fmt: skip


def make(config: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # weights large enough that every path matters
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return Target(model.to(device))


def row(lengths: list[int], padding: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    positions = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(padding, dtype=np.int64)])
    documents = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.full(padding, -1)])
    return rng.integers(3, 97, len(positions)), positions, documents


def dense_varlen(q: Any, k: Any, v: Any, bounds: Any, _k: Any, *_: int, scale: float, window_size: tuple[int, int],
                 **_options: Any) -> torch.Tensor:  # fmt: skip
    """What the kernel computes, document by document."""
    left, right = window_size
    assert right == 0
    outs = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        size = end - begin
        distance = torch.arange(size)[:, None] - torch.arange(size)[None, :]
        mask = (distance >= 0) & (distance <= (left if left >= 0 else size))
        parts = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
        outs.append(mixed[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "varlen_attn", dense_varlen)
    monkeypatch.setattr(forwards, "PACKED_DEVICES", ("cpu",))
    monkeypatch.setattr(forwards, "PACKED_DTYPES", (torch.float32,))


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("lengths", [[7, 31, 12], [1, 60], [5] * 9])
def test_packed_features_equal_those_of_documents_alone(on_cpu: None, name: str, lengths: list[int]) -> None:
    target = make(PACKED[name]())
    assert target.packs_documents
    ids, positions, documents = row(lengths, padding=6)
    taps = target.features(ids, positions, documents, [0, 2])
    assert (taps[documents < 0] == 0).all()
    for index in range(len(lengths)):
        own = documents == index
        with torch.no_grad():
            states = target.model(torch.from_numpy(ids[own])[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[1][0], states[3][0]], 1)
        torch.testing.assert_close(taps[own], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BATCHED)
def test_what_cannot_be_packed_runs_in_batches_and_says_why(on_cpu: None, name: str, caplog: Any) -> None:
    config, reason = BATCHED[name]
    target = make(config())
    with caplog.at_level(logging.INFO):
        assert not target.packs_documents
    assert reason in caplog.text and "padded batches" in caplog.text
    ids, positions, documents = row([9, 20])
    taps = target.features(ids, positions, documents, [1])
    own = documents == 1
    with torch.no_grad():
        states = target.model(torch.from_numpy(ids[own])[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps[own], states[2][0], rtol=1e-4, atol=1e-4)


def test_attention_that_lets_documents_see_each_other_is_found_out(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def leaking(q: Any, k: Any, v: Any, bounds: Any, *rest: Any, **options: Any) -> torch.Tensor:
        return dense_varlen(q, k, v, bounds[[0, -1]], *rest, **options)

    monkeypatch.setattr(packed, "varlen_attn", leaking)
    with caplog.at_level(logging.INFO):
        assert not make(PACKED["llama"]()).packs_documents
    assert "packed features differ" in caplog.text


def test_a_kernel_that_refuses_is_no_error(on_cpu: None, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def refusing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr(packed, "varlen_attn", refusing)
    with caplog.at_level(logging.INFO):
        assert not make(PACKED["llama"]()).packs_documents
    assert "Ampere" in caplog.text


def test_a_layer_that_attends_by_itself_is_found_out(on_cpu: None, caplog: Any) -> None:
    target = make(PACKED["llama"]())
    own = target.model.model.layers[1].self_attn
    own.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with caplog.at_level(logging.INFO):
        assert not target.packs_documents
    assert "4 layers ran and 3 attended" in caplog.text


def test_weights_are_shared_and_decoding_keeps_its_own_attention(on_cpu: None) -> None:
    target = make(PACKED["qwen3"]())
    ids = torch.from_numpy(row([20])[0])[None]
    before = target.model(ids).logits
    memory = {p.data_ptr() for p in target.model.parameters()}
    assert target.packs_documents
    twin = target._forward._decoder  # type: ignore[union-attr]
    assert {p.data_ptr() for p in twin.parameters()} <= memory
    assert twin.config._attn_implementation == packed.IMPLEMENTATION
    assert target.model.config._attn_implementation == "sdpa"
    assert torch.equal(before, target.model(ids).logits)


def test_threads_that_share_a_packed_target_get_their_own_taps(on_cpu: None) -> None:
    target = make(PACKED["llama"]())
    rows = [row([10 + n, 20]) for n in range(4)]
    expected = [make(PACKED["llama"]()).features(*r, [1, 3]) for r in rows]
    found: dict[int, torch.Tensor] = {}

    def work(n: int) -> None:
        for _ in range(5):
            found[n] = target.features(*rows[n], [1, 3])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, want in enumerate(expected):
        torch.testing.assert_close(found[n], want, rtol=0, atol=1e-5)


def test_a_row_of_padding_and_padding_between_documents(on_cpu: None) -> None:
    target = make(PACKED["llama"]())
    ids, positions, documents = row([8, 6, 9])
    documents[documents == 1] = -1
    taps = target.features(ids, positions, documents, [1])
    assert (taps[8:14] == 0).all()
    own = documents == 2
    torch.testing.assert_close(taps[own], target.features(ids[own], positions[own], documents[own], [1]))
    assert (target.features(ids, positions, np.full(len(ids), -1), [1]) == 0).all()


def test_bounds_cover_the_row_and_padding_is_one_more_document() -> None:
    documents = np.array([0, 0, 0, 1, 2, 2, -1, -1, -1, -1])
    held = PackedDocuments.of(documents, torch.device("cpu"))
    assert held.bounds.tolist() == [0, 3, 4, 6, 10] and held.bounds.dtype == torch.int32
    assert held.longest == 4


def test_a_cpu_keeps_the_batches() -> None:
    assert not make(PACKED["llama"](), torch.bfloat16).packs_documents


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", PACKED)
def test_on_a_gpu_packed_features_equal_those_of_documents_alone(name: str) -> None:
    target = make(PACKED[name](), torch.bfloat16, "cuda")
    exact = make(PACKED[name](), torch.float32, "cuda")
    exact.model.load_state_dict(target.model.state_dict())
    assert target.packs_documents and not exact.packs_documents
    ids, positions, documents = row([7, 131, 64, 1, 40], padding=9)
    out = torch.full((len(ids), 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    taps = target.features(ids, positions, documents, [0, 3], out=out).double()
    expected = exact.features(ids, positions, documents, [0, 3])
    assert (taps[-9:] == 0).all()
    errors = (taps - expected).norm(dim=1)[:-9] / expected.norm(dim=1)[:-9]
    # A router near a tie may choose another expert for a few tokens.
    assert errors.quantile(0.95 if name == "mixtral" else 1.0) < 3e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    target = make(PACKED["llama"](), torch.bfloat16, "cuda")
    rows = row([30, 50, 20], padding=4)
    target.features(*rows, [0, 2])
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.features(*rows, [0, 2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
