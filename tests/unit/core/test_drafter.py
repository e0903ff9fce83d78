"""The drafter's configuration and its parts. What the whole model must satisfy is in test_invariants.py."""

import math

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_core.config import DrafterConfig
from dflash_core.drafter import (
    DFlashConfig,
    DFlashDrafter,
    DraftCache,
    config_from_target,
    default_target_layer_ids,
    resolve_mask_token_id,
)
from dflash_core.drafter.model import RMSNorm, rotary, rotate
from dflash_core.errors import ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"


class FakeTokenizer:
    """Only what the mask token rule looks at."""

    def __init__(self, length, mask_token_id=None, added=()):
        self.length, self.mask_token_id = length, mask_token_id
        self.added_tokens_decoder = dict(added)
        self.pad_token_id = self.unk_token_id = None

    def __len__(self):
        return self.length


QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    bos_token_id=151643,
    eos_token_id=[151645, 151643],
)


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (30, 2, (1, 27)),
        (36, 1, (18,)),
    ],
)
def test_default_taps(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected


@pytest.mark.parametrize(("layers", "taps"), [(4, 2), (6, 4), (2, 2)])
def test_a_shallow_target_cannot_have_many_taps(layers, taps):
    with pytest.raises(ConfigError, match="taps do not fit") as caught:
        default_target_layer_ids(layers, taps)
    assert caught.value.key == "drafter.num_target_taps"


def test_the_drafter_of_qwen3_8b_has_the_published_shape():
    config = config_from_target(QWEN3_8B, DrafterConfig(), FakeTokenizer(151669))
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.mask_token_id == 151669
    assert config.rope_theta == 1e6 and config.eos_token_id == (151645, 151643) and config.num_taps == 5
    with torch.device("meta"):
        model = DFlashDrafter(config)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(tensors) == 58
    assert tensors["fc.weight"] == (4096, 5 * 4096) and tensors["hidden_norm.weight"] == (4096,)
    assert tensors["layers.4.self_attn.k_proj.weight"] == (1024, 4096)
    assert tensors["layers.0.self_attn.q_norm.weight"] == (128,)
    assert tensors["layers.0.mlp.down_proj.weight"] == (4096, 12288)
    assert not any("embed" in name or "head" in name or "rotary" in name for name in tensors)
    assert 1.048e9 < sum(math.prod(shape) for shape in tensors.values()) < 1.050e9


def test_settings_win_over_the_target():
    settings = DrafterConfig(
        num_hidden_layers=2,
        block_size=8,
        target_layer_ids=(3, 5),
        mask_token_id=7,
        intermediate_size=100,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        layer_types=(SLIDING, FULL),
        sliding_window=64,
        is_causal=None,
    )
    config = config_from_target(QWEN3_8B, settings, dtype="float32")
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (100, 6, 3)
    assert (config.head_dim, config.mask_token_id, config.target_layer_ids) == (16, 7, (3, 5))
    assert [config.layer_is_causal(layer) for layer in range(2)] == [True, False]
    assert [config.layer_window(layer) for layer in range(2)] == [64, None]
    assert config.dtype == "float32"


def test_llama_and_mixture_targets():
    llama = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        rope_parameters={"rope_theta": 1e5, "rope_type": "default"},
    )
    config = config_from_target(llama, DrafterConfig(num_hidden_layers=2, mask_token_id=3))
    assert (config.head_dim, config.intermediate_size, config.rope_theta) == (64, 1536, 1e5)
    mixture = Qwen3MoeConfig(hidden_size=64, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2)
    assert config_from_target(mixture, DrafterConfig(mask_token_id=3)).intermediate_size == 192


class TestMaskToken:
    """Explicit, then the tokenizer's mask token, then the first unused embedding row, then an error."""

    @pytest.mark.parametrize(
        ("tokenizer", "explicit", "expected"),
        [
            (FakeTokenizer(90, mask_token_id=12), 5, 5),
            (FakeTokenizer(90, mask_token_id=12), None, 12),
            (FakeTokenizer(90), None, 90),
            (None, 5, 5),
        ],
    )
    def test_order(self, tokenizer, explicit, expected):
        assert resolve_mask_token_id(tokenizer, vocab_size=100, explicit=explicit) == expected

    def test_nothing_obvious_is_an_error_with_candidates(self):
        tokenizer = FakeTokenizer(100, added={0: "<|endoftext|>", 4: "<repo_name>"})
        with pytest.raises(ConfigError, match="no obvious mask token") as caught:
            resolve_mask_token_id(tokenizer, vocab_size=100, in_use=(0,))
        assert "4 (<repo_name>)" in caught.value.fix and "endoftext" not in caught.value.fix

    @pytest.mark.parametrize("explicit", [100, 4_000_000])
    def test_out_of_range(self, explicit):
        with pytest.raises(ConfigError, match="outside the embedding table of 100 rows") as caught:
            resolve_mask_token_id(None, vocab_size=100, explicit=explicit)
        assert caught.value.key == "drafter.mask_token_id"

    def test_tokens_of_the_data_are_refused(self):
        with pytest.raises(ConfigError, match="bos or eos"):
            config_from_target(QWEN3_8B, DrafterConfig(mask_token_id=151645))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"target_layer_ids": (1, 7)}, "target_layer_ids"),
        ({"target_layer_ids": (-1, 4)}, "target_layer_ids"),
        ({"target_layer_ids": (4, 1)}, "target_layer_ids"),
        ({"target_layer_ids": (4, 4)}, "target_layer_ids"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"mask_token_id": 61}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_attention_heads": 5}, "num_key_value_heads"),
        ({"layer_types": (FULL,)}, "layer_types"),
        ({"layer_types": (FULL, "linear_attention")}, "layer_types"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window"),
        ({"layer_types": (FULL, SLIDING), "sliding_window": 3}, "sliding_window"),
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_shapes_that_do_not_fit(tiny_config, overrides, key):
    with pytest.raises(ConfigError) as caught:
        tiny_config(**overrides)
    assert caught.value.key == key and caught.value.what.startswith(f"{key}: ")


def test_errors_from_a_target_name_the_key_of_the_run_configuration():
    for settings, key in (
        (DrafterConfig(target_layer_ids=(1, 35), mask_token_id=1), "drafter.target_layer_ids"),
        (DrafterConfig(num_target_taps=3, target_layer_ids=(1, 2), mask_token_id=1), "drafter.num_target_taps"),
        (DrafterConfig(layer_types=(FULL,), mask_token_id=1), "drafter.layer_types"),
        (DrafterConfig(num_target_taps=40, mask_token_id=1), "drafter.num_target_taps"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_from_target(QWEN3_8B, settings)
        assert caught.value.key == key and caught.value.what.startswith(key)


def test_a_target_without_rotary_positions_is_refused():
    with pytest.raises(ConfigError, match="target: its configuration names no rope_theta") as caught:
        config_from_target(GPT2Config(), DrafterConfig(num_hidden_layers=2, mask_token_id=3))
    assert caught.value.key == "target.path"


def test_a_drafter_of_another_target_is_refused(tiny_config):
    config = tiny_config()
    config.require_target(hidden_size=32, vocab_size=61, num_target_layers=8)
    with pytest.raises(ConfigError, match="vocab_size: the drafter was made for 61, the target has 62"):
        config.require_target(hidden_size=32, vocab_size=62, num_target_layers=8)


def test_causality_by_layer_type_becomes_explicit_where_it_can(tiny_config):
    assert tiny_config(is_causal=None).is_causal is False
    sliding = {"layer_types": (SLIDING, SLIDING), "sliding_window": 8}
    assert tiny_config(is_causal=None, **sliding).is_causal is True
    assert tiny_config(is_causal=False, **sliding).layer_is_causal(0) is False


def test_initialisation_is_normal_002_with_unit_norms_and_repeatable(tiny_config):
    config = tiny_config(hidden_size=128, attention_bias=True)
    model, again = (DFlashDrafter(config, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    for (name, parameter), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(parameter, other)
        if name.endswith("norm.weight") or "layernorm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            assert abs(float(parameter.detach().std()) - 0.02) < 0.002 and abs(float(parameter.detach().mean())) < 0.002


def test_rotary_equals_qwen3_and_depends_on_distance_only(tiny_config):
    config = tiny_config(head_dim=16)
    positions = torch.tensor([0, 1, 77, 30000])
    qwen = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=16, rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"})
    )
    cos, sin = qwen(torch.zeros(1), positions[None])
    mine = rotary(positions, config, torch.float32)
    torch.testing.assert_close(mine[0][:, 0], cos[0, :, :8], rtol=0, atol=2e-3)
    torch.testing.assert_close(mine[0][:3, 0], cos[0, :3, :8], rtol=0, atol=1e-5)
    torch.testing.assert_close(mine[1][:3, 0], sin[0, :3, :8], rtol=0, atol=1e-5)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(at_q, at_k):
        there = [rotary(torch.tensor([at]), config, torch.float64) for at in (at_q, at_k)]
        return (rotate(q, there[0]) * rotate(k, there[1])).sum()

    torch.testing.assert_close(score(107, 100), score(7, 0), rtol=0, atol=1e-12)
    assert abs(score(7, 0) - score(8, 0)) > 1e-6


def test_phases_do_not_drift_when_the_model_is_cast_to_bf16(tiny_bench):
    bench = tiny_bench(dtype=torch.bfloat16)
    far = torch.tensor([100_000])
    exact = rotary(far, bench.config, torch.float64)
    for mine, true in zip(rotary(far, bench.config, torch.bfloat16), exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), true, rtol=0, atol=0.02)
    assert not dict(bench.drafter.named_buffers())


def test_norm_statistics_are_wide():
    norm = RMSNorm(4096, 1e-6).to(torch.bfloat16)
    x = torch.randn(3, 4096).mul(300).bfloat16()
    expected = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=2**-8, atol=0)


def test_the_model_works_in_bf16_and_close_to_fp64(tiny_bench):
    narrow, wide = tiny_bench(dtype=torch.bfloat16), tiny_bench(dtype=torch.float64)
    row, same = narrow.row(40), wide.row(40)
    positions = [3, 10, 30]
    hidden = narrow.hidden(row, narrow.anchors(row, positions))
    assert hidden.dtype == torch.bfloat16
    difference = hidden.double() - wide.hidden(same, wide.anchors(same, positions))
    assert float(difference.detach().square().mean().sqrt()) < 0.1, "rms of states whose rms is about 1"


def test_cache_grows_and_keeps_what_was_appended(tiny_config):
    cache = DraftCache(tiny_config(num_hidden_layers=1))
    assert cache.length == 0
    rows = torch.randn(700, 2, 8)
    for begin, end in ((0, 0), (0, 3), (3, 4), (4, 300), (300, 700)):
        cache.append(0, rows[begin:end], -rows[begin:end])
    keys, values = cache.rows(0)
    assert cache.length == 700 and torch.equal(keys, rows) and torch.equal(values, -rows)


def test_the_context_feature_is_computed_once_and_shared(tiny_bench):
    """hidden_norm(fc(taps)) and nothing else: not a layer's norm, not a residual."""
    bench = tiny_bench()
    taps = torch.randn(5, 64)
    projected = taps @ bench.drafter.fc.weight.T
    scale = projected.square().mean(-1, keepdim=True).add(bench.config.rms_norm_eps).rsqrt()
    expected = bench.drafter.hidden_norm.weight * projected * scale
    torch.testing.assert_close(bench.drafter.context_features(taps), expected)


def test_config_is_frozen(tiny_config):
    with pytest.raises(AttributeError):
        tiny_config().block_size = 3
    assert isinstance(tiny_config(), DFlashConfig)
