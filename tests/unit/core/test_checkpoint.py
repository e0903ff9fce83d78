"""Drafter folders: z-lab's format in and out, and every way a checkpoint can be wrong."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.drafter import (
    DFlashDrafter,
    config_from_json,
    config_to_json,
    load_drafter,
    save_drafter,
)
from dflash_core.errors import CheckpointError, ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"

# The two generations of published config.json files, as for Qwen3-8B and a later sliding-window release.
OLD = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": [FULL] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
NEW = {
    **{
        key: value
        for key, value in OLD.items()
        if key not in ("block_size", "rope_theta", "torch_dtype", "rope_scaling")
    },
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "block_size": 8,
        "causal": False,
    },
    "dtype": "bfloat16",
    "is_causal": False,
    "layer_types": [SLIDING] * 4 + [FULL],
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
}


def read(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return config_from_json(path)


@pytest.fixture
def folder(tiny_config, tmp_path):
    save_drafter(DFlashDrafter(tiny_config()), tmp_path / "drafter")
    return tmp_path / "drafter"


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def failure(folder, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        load_drafter(folder)
    assert str(folder) in caught.value.what
    return caught.value


def test_old_files_are_read(tmp_path):
    config = read(tmp_path, OLD)
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (16, 151669, 1e6)
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.is_causal is False
    assert (config.num_target_layers, config.vocab_size, config.dtype) == (36, 151936, "bfloat16")


def test_new_files_are_read(tmp_path):
    config = read(tmp_path, NEW)
    assert (config.block_size, config.rope_theta, config.sliding_window) == (8, 1e7, 2048)
    assert [config.layer_window(layer) for layer in range(5)] == [2048] * 4 + [None]
    assert config.is_causal is False


def test_unstated_causality_goes_by_layer_type(tmp_path):
    silent = {key: value for key, value in NEW.items() if key != "is_causal"}
    silent["dflash_config"] = {key: value for key, value in NEW["dflash_config"].items() if key != "causal"}
    config = read(tmp_path, silent)
    assert config.is_causal is None and [config.layer_is_causal(i) for i in (0, 4)] == [True, False]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"is_causal": None, "layer_types": (SLIDING, FULL), "sliding_window": 16},
        {"is_causal": True, "attention_bias": True, "eos_token_id": (3, 4), "bos_token_id": 1, "dtype": "bfloat16"},
    ],
)
def test_config_survives_a_round_trip_and_is_written_for_both_generations(tmp_path, tiny_config, overrides):
    config = tiny_config(**overrides)
    written = config_to_json(config)
    assert read(tmp_path, written) == config
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e4
    assert written["tie_word_embeddings"] is False and written["architectures"] == ["DFlashDraftModel"]
    assert written["dflash_config"]["tap_convention"] == "decoder_layer_output_0_based"
    assert written.get("is_causal") == written["dflash_config"].get("causal") == config.is_causal


def without(*keys, base=OLD):
    return {key: value for key, value in base.items() if key not in keys}


def with_own(**own):
    return {**OLD, "dflash_config": {**OLD["dflash_config"], **own}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{not json", "is not valid JSON"),
        ("[1]", "must be an object"),
        ({**OLD, "dflash_config": []}, "must be an object"),
        (without("head_dim"), "head_dim: is missing"),
        (without("rope_theta"), "rope_theta: is missing"),
        (without("num_target_layers"), "num_target_layers: is missing"),
        (without("block_size"), "block_size: is missing"),
        (without("dflash_config"), "target_layer_ids: is missing"),
        ({**OLD, "hidden_size": "4096"}, "hidden_size: must be of type int"),
        ({**OLD, "hidden_size": True}, "hidden_size: must be of type int"),
        ({**OLD, "hidden_size": 4096.0}, "hidden_size: must be of type int"),
        (with_own(block_size=8), "block_size: given twice with different values: [8, 16]"),
        ({**OLD, "rope_parameters": {"rope_theta": 5.0}}, "rope_theta: given twice"),
        (
            {**OLD, "is_causal": True, "dflash_config": {**OLD["dflash_config"], "causal": False}},
            "is_causal: given twice",
        ),
        (with_own(target_layer_ids=[1, 35]), "target_layer_ids: [35] out of range for a target of 36 layers"),
        (with_own(target_layer_ids=[1, "9"]), "target_layer_ids: must be a list of int"),
        ({**OLD, "layer_types": [{}] * 5}, "layer_types: must be a list of str"),
        ({**OLD, "rope_parameters": 3}, "rope_parameters: must be of type dict"),
        ({**OLD, "eos_token_id": "</s>"}, "eos_token_id: must be of type int"),
        ({**OLD, "architectures": "DFlashDraftModel"}, "architectures: must be of type list"),
        (with_own(mask_token_id=151936), "mask_token_id: 151936 is outside the embedding table"),
        (
            with_own(tap_convention="hidden_states_index"),
            "dflash_config.tap_convention: 'hidden_states_index' is not known",
        ),
        (with_own(conv_kernel_size=2), "dflash_config.conv_kernel_size: not a key of a plain DFlash drafter"),
        ({**OLD, "architectures": ["DFlash2DraftModel"]}, "architectures: ['DFlash2DraftModel']"),
        ({**OLD, "speculators_model_type": "dflash"}, "speculators_model_type: 'dflash' is not supported"),
        ({**OLD, "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: "),
        ({**OLD, "rope_parameters": {"rope_theta": 1000000, "rope_type": "yarn"}}, "rope_parameters.rope_type: 'yarn'"),
        ({**OLD, "hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({**OLD, "dtype": "int8"}, "dtype: must be one of"),
        ({**without("layer_types"), "use_sliding_window": True}, "layer_types: missing"),
        ({**OLD, "layer_types": [FULL]}, "layer_types: 1 entries for 5 layers"),
    ],
)
def test_wrong_configurations_name_file_and_key(tmp_path, content, words):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    assert caught.value.what.startswith(str(tmp_path / "config.json")) and words in caught.value.what


def test_only_the_two_files_of_the_format_are_written(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    names = set(load_file(folder / "model.safetensors"))
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_dtype_of_file_and_model(folder, tiny_config):
    model = load_drafter(folder)
    assert model.dtype == torch.float32 and all(parameter.requires_grad for parameter in model.parameters())
    assert load_drafter(folder, dtype=torch.float64).dtype == torch.float64
    save_drafter(model, folder, dtype=torch.bfloat16)
    assert load_drafter(folder).dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_missing_tensor(folder):
    rewrite(folder, lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"))
    assert "missing tensors: layers.1.mlp.up_proj.weight" in failure(folder).what


def test_unexpected_tensor(folder):
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2)}))
    assert "unexpected tensors: lm_head.weight" in failure(folder).what


def test_wrong_shape(folder):
    rewrite(folder, lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 32)}))
    assert "wrong shapes: fc.weight is [32, 32], expected [32, 64]" in failure(folder).what


def test_many_problems_are_counted(folder):
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name])
    assert "and 2 more" in failure(folder).what


def test_integer_weights(folder):
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(32, dtype=torch.int8)}))
    assert "norm.weight is torch.int8" in failure(folder).what


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "the file is damaged" in failure(folder).what


def test_pickle_is_never_read(folder):
    torch.save({"fc.weight": torch.zeros(32, 64)}, folder / "model.safetensors")
    assert "the file is damaged" in failure(folder).what


def test_a_loaded_drafter_no_longer_needs_its_file(folder):
    model = load_drafter(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert all(parameter.sum().isfinite() for parameter in model.parameters())


def test_absent_files(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "there is no such file" in failure(folder).what
    (folder / "config.json").unlink()
    assert "there is no config.json" in failure(folder).what


def test_weights_of_another_shape_than_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": [FULL] * 3}))
    assert "missing tensors: layers.2." in failure(folder).what


@pytest.mark.parametrize("failing_write", [1, 2])
def test_a_full_disk_leaves_the_previous_checkpoint(folder, tiny_config, monkeypatch, failing_write):
    before = load_drafter(folder).state_dict()
    writes = 0

    def full(descriptor):
        nonlocal writes
        writes += 1
        if writes == failing_write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="could not be saved") as caught:
        save_drafter(DFlashDrafter(tiny_config()), folder)
    assert "No space left" in caught.value.why
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    after = load_drafter(folder).state_dict()
    if failing_write == 1:
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_tensors_are_named_in_safetensors_metadata_as_torch(folder):
    header = (folder / "model.safetensors").read_bytes()[:200]
    assert b'"format":"pt"' in header
