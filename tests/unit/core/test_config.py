"""run.yaml: strict reading, and errors that name their place."""

import subprocess
import sys
import textwrap

import pytest
import yaml

from dflash_core.config import DataConfig, RunConfig, TrainConfig, default_gamma, load_run_config, resolve_path
from dflash_core.errors import ConfigError, CoreError

SMALLEST = "version: 1\ntarget: {path: some/folder}\n"
EVERYTHING = """
version: 1
seed: 3
target: {path: "package:yaml", gguf_file: a.gguf, dtype: float32, chat_template: t.jinja}
drafter:
  num_hidden_layers: 2
  block_size: 8
  num_target_taps: 2
  target_layer_ids: [1, 27]
  mask_token_id: 5
  intermediate_size: 10
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 8
  layer_types: [sliding_attention, full_attention]
  sliding_window: 64
  is_causal: null
  init_from: d
data: {train: [a.jsonl, b.jsonl], heldout: [c.jsonl], max_length: 100, tokens_per_batch: 200,
       feature_store: f, on_overlong: skip}
topology: {targets: [cpu, "cuda:1"], drafters: [cpu, cpu, cpu], queue_size: 2}
train:
  steps: 10
  epochs: 2
  max_seconds: 150
  loss: dpace
  gamma: 3.5
  lr: 6e-4
  betas: [0.9, 0.99]
  eps: 1e-8
  threads: 2
evaluate: {prompts: [p.jsonl], num_prompts: 3, temperature: 0, dtype: float64}
generate: {prompts: [p.jsonl], output: o.jsonl, top_p: 0.9, num_prompts: 4}
"""


def load(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_run_config(path)


def error_of(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value


def test_defaults(tmp_path):
    config = load(tmp_path, SMALLEST)
    assert config.train == TrainConfig() and config.data == DataConfig()
    assert (config.drafter.num_hidden_layers, config.drafter.block_size, config.drafter.is_causal) == (5, 16, False)
    assert (config.train.lr, config.train.warmup_ratio, config.train.clip) == (6e-4, 0.04, 1.0)
    assert config.gamma == 7.0


def test_everything_set_survives_a_round_trip(tmp_path):
    config = load(tmp_path, EVERYTHING)
    assert config.train.lr == 6e-4 and config.train.eps == 1e-8 and config.train.max_seconds == 150.0
    assert config.data.train == ("a.jsonl", "b.jsonl") and config.topology.targets == ("cpu", "cuda:1")
    assert config.drafter.is_causal is None and config.gamma == 3.5
    plain = config.to_dict()
    assert load(tmp_path, yaml.safe_dump(plain)) == config
    assert load(tmp_path, yaml.safe_dump(load(tmp_path, SMALLEST).to_dict())).to_dict()["train"]["betas"] == [0.9, 0.95]


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0), (32, 16.0)])
def test_default_gamma(block_size, gamma):
    assert default_gamma(block_size) == gamma


PLACED = [
    # text after the smallest file, line:column, key path, words of the message, words of the fix
    ("train: {lrr: 1}", "3:9", "train.lrr", "unknown key", "did you mean 'lr'"),
    ("trian: {lr: 1}", "3:1", "trian", "unknown key", "did you mean 'train'"),
    ("zzz: 1", "3:1", "zzz", "unknown key", "known keys here: version, seed"),
    ("train:\n  lr: 1e-4\n  lr: 1e-3", "5:3", "train.lr", "appears twice", "remove one"),
    ("seed: 1\nseed: 2", "4:1", "seed", "appears twice", "remove one"),
    ("train: {lr: '1e-4'}", "3:13", "train.lr", "must be a number, got the text '1e-4'", ""),
    ("train: {lr: [1]}", "3:13", "train.lr", "must be a number, got a list", ""),
    ("train: {lr: .inf}", "3:13", "train.lr", "must be a number, got the text '.inf'", ""),
    ("train: {steps: 10.0}", "3:16", "train.steps", "must be a whole number, got the float 10.0", ""),
    ("train: {steps: true}", "3:16", "train.steps", "must be a whole number, got the bool true", ""),
    ("train: {lr: null}", "3:13", "train.lr", "must be a number, got nothing", ""),
    ("drafter: {is_causal: yes}", "3:22", "drafter.is_causal", "must be true or false, got the text 'yes'", ""),
    ("target2: 1", "3:1", "target2", "unknown key", "did you mean 'target'"),
    ("data: {train: a.jsonl}", "3:15", "data.train", "must be a list", "write [a, b]"),
    ("data: {train: [a, 3]}", "3:19", "data.train[1]", "must be text, got the int 3", "quotes"),
    ("data: []", "3:7", "data", "must be a mapping", ""),
    ("data: {on_overlong: trunc}", "3:21", "data.on_overlong", "must be one of truncate, skip", "'truncate'"),
    ("train: {betas: [0.9]}", "3:16", "train.betas", "must have 2 entries, got 1", ""),
    ("train: {betas: [0.9, 1.5]}", "3:9", "train.betas", "must both lie in [0, 1)", ""),
    ("train: {lr: 0}", "3:9", "train.lr", "must be greater than 0, got 0.0", ""),
    ("train: {dpace_alpha: 1.5}", "3:9", "train.dpace_alpha", "between 0 and 1", ""),
    ("drafter: {block_size: 1}", "3:11", "drafter.block_size", "must be at least 2", ""),
    ("drafter: {mask_token_id: -1}", "3:11", "drafter.mask_token_id", "must not be negative", ""),
    ("drafter: {head_dim: 7}", "3:11", "drafter.head_dim", "positive and even", ""),
    ("drafter: {layer_types: [full]}", "3:25", "drafter.layer_types[0]", "must be one of full_attention", ""),
    ("topology: {drafters: [gpu]}", "3:12", "topology.drafters", "'cpu', 'cuda' or 'cuda:N'", ""),
    ("topology: {drafters: []}", "3:12", "topology.drafters", "must be a list", ""),
    ("data: {max_length: 9000}", "3:7", "data.tokens_per_batch", "smaller than max_length", "raise"),
    ("train: {lr: *nowhere}", "3:13", "", "not valid YAML: found undefined alias", ""),
    ("train: {lr: 1", "4:1", "", "not valid YAML", "correct the syntax"),
    ("train: {lr: !!python/name:os.system x}", "3:13", "train.lr", "is not supported", ""),
    ("? [a, b]\n: 1", "3:3", "", "keys must be plain words", ""),
    ("<<: {seed: 1}", "3:1", "<<", "unknown key", ""),
]


@pytest.mark.parametrize(("text", "place", "key", "problem", "fix"), PLACED, ids=[case[0] for case in PLACED])
def test_errors_name_file_line_column_and_key(tmp_path, text, place, key, problem, fix):
    error = error_of(tmp_path, SMALLEST + text + "\n")
    assert error.what.startswith(f"{tmp_path / 'run.yaml'}:{place}: {key}")
    assert problem in error.what and fix in error.fix
    assert error.kind == "config" and error.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml:1:1: the file is empty"),
        ("# nothing\n", "run.yaml:1:1: the file is empty"),
        ("[1]", "run.yaml:1:1: must be a mapping"),
        ("target: {path: x}", "the key 'version' is missing"),
        ("version: 1", "the key 'target' is missing"),
        ("version: 1\ntarget: {dtype: float32}", "run.yaml:2:9: target: the key 'path' is missing"),
        ("version: 2\ntarget: {path: x}", "run.yaml:1:1: version: must be 1, got 2"),
        ("version: '1'\ntarget: {path: x}", "version: must be a whole number"),
        ("version: 1\n---\nversion: 1", "run.yaml:2:1: not valid YAML"),
        ("version: 1\n\ttarget: 3", "run.yaml:2:1: not valid YAML"),
    ],
)
def test_errors_of_the_whole_file(tmp_path, text, message):
    assert message in error_of(tmp_path, text).what


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run_config(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"version: \xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_run_config(tmp_path / "binary.yaml")


def test_leading_zeros_are_not_octal_and_words_stay_words(tmp_path):
    config = load(tmp_path, "version: 1\nseed: 010\ntarget: {path: on, gguf_file: 'null'}")
    assert config.seed == 10 and config.target.path == "on" and config.target.gguf_file == "null"


def test_the_same_ranges_hold_in_python():
    with pytest.raises(ConfigError, match="must be greater than 0") as caught:
        TrainConfig(lr=-1.0)
    assert caught.value.key == "lr"


def test_resolve_path():
    assert str(resolve_path("a/b")) == "a/b"
    folder = resolve_path("package:yaml")
    assert (folder / "__init__.py").is_file()
    assert resolve_path("package:yaml/sub") == folder / "sub"
    for name in ("package:no_such_package_here", "package:", "package:../etc", "package:json.decoder"):
        with pytest.raises(ConfigError, match="no importable package"):
            resolve_path(name)


def test_the_error_text_has_three_parts():
    assert str(CoreError("what", "why", "fix")) == "what\n  why: why\n  fix: fix"


def test_reading_a_configuration_needs_no_torch():
    code = "import sys, dflash_core.config, dflash_core.errors; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_setting_says_what_it_means():
    from dflash_core.strict_yaml import settings_of

    for section in [setting.kind for setting in settings_of(RunConfig).values() if isinstance(setting.kind, type)]:
        if section not in (int, str):
            assert all(setting.meaning for setting in settings_of(section).values())
