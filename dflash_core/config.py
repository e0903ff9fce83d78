"""The run configuration: every setting, its default, its meaning and its range, in one place.

`load_run_config` reads `run.yaml` strictly (see `dflash_core.strict_yaml`): unknown keys, duplicate keys
and wrong types are errors that name file, line, column and key path. The same dataclasses can be built in
Python and check the same ranges. This module imports no torch, so a check takes milliseconds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from dflash_core.cache_folder import cache_folder
from dflash_core.errors import ConfigError
from dflash_core.strict_yaml import Check, load_dataclass, settings_of

CONFIG_VERSION = 1
GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}

DtypeName = Literal["bfloat16", "float16", "float32", "float64"]
LayerType = Literal["full_attention", "sliding_attention"]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
POSITIVE = Check("must be greater than 0", lambda v: v > 0)
NON_NEGATIVE = Check("must not be negative", lambda v: v >= 0)
AT_LEAST_TWO = Check("must be at least 2", lambda v: v >= 2)
POSITIVE_EVEN = Check("must be positive and even", lambda v: v > 0 and v % 2 == 0)
FRACTION = Check("must lie between 0 and 1", lambda v: 0 <= v <= 1)
NUCLEUS = Check("must lie in (0, 1]", lambda v: 0 < v <= 1)
BETAS = Check("must both lie in [0, 1)", lambda v: all(0 <= beta < 1 for beta in v))
NOT_EMPTY = Check("must not be empty", lambda v: len(v) > 0)
DEVICES = Check(
    "must be a list of 'cpu', 'cuda' or 'cuda:N'",
    lambda v: len(v) > 0 and all(_DEVICE.fullmatch(device) for device in v),
)
THIS_VERSION = Check(f"must be {CONFIG_VERSION}", lambda v: v == CONFIG_VERSION)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all sections: checks every field that has a `Check`; `None` means "not set"."""

    def __post_init__(self) -> None:
        for name, (_, meaning, check) in settings_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and check is not None and not check.holds(value):
                raise ConfigError(f"{check.rule}, got {value!r}", f"it is {meaning}", key=name)


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Section):
    """The frozen model whose tokens are drafted."""

    path: Annotated[str, "the folder of the target model, or package:NAME[/sub]", NOT_EMPTY]
    gguf_file: Annotated[str | None, "the GGUF file inside that folder, when the weights are a GGUF"] = None
    dtype: Annotated[DtypeName, "the numeric type of the target's weights"] = "bfloat16"
    chat_template: Annotated[str | None, "a Jinja file that replaces the tokenizer's chat template"] = None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Section):
    """The shape of the drafter; whatever is null comes from the target."""

    num_hidden_layers: Annotated[int, "the number of drafter layers", POSITIVE] = 5
    block_size: Annotated[
        int,
        "the block length B: the known token and B-1 drafted ones",
        AT_LEAST_TWO,
    ] = 16
    num_target_taps: Annotated[int | None, "how many target layers are tapped (null: num_hidden_layers)", POSITIVE] = (
        None
    )
    target_layer_ids: Annotated[
        tuple[int, ...] | None, "the tapped decoder layers, 0-based, by their outputs", NOT_EMPTY
    ] = None
    mask_token_id: Annotated[int | None, "the id whose embedding fills the unknown offsets", NON_NEGATIVE] = None
    intermediate_size: Annotated[
        int | None, "the MLP width (null: the target's; three times hidden_size for MoE)", POSITIVE
    ] = None
    num_attention_heads: Annotated[int | None, "the number of query heads (null: the target's)", POSITIVE] = None
    num_key_value_heads: Annotated[int | None, "the number of key/value heads (null: the target's)", POSITIVE] = None
    head_dim: Annotated[
        int | None,
        "the width of one head (null: the target's)",
        POSITIVE_EVEN,
    ] = None
    layer_types: Annotated[tuple[LayerType, ...] | None, "one attention type per layer (null: all full)", NOT_EMPTY] = (
        None
    )
    sliding_window: Annotated[int | None, "the window W of sliding layers, in tokens", POSITIVE] = None
    is_causal: Annotated[bool | None, "whether attention inside a block is causal (null: on sliding layers only)"] = (
        False
    )
    init_from: Annotated[str | None, "a drafter folder to start from", NOT_EMPTY] = None


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Chats and how they become batches."""

    train: Annotated[tuple[str, ...], "the JSONL chat files to train on"] = ()
    heldout: Annotated[tuple[str, ...], "the JSONL chat files that are only evaluated"] = ()
    max_length: Annotated[int, "the longest sample, in tokens", AT_LEAST_TWO] = 3072
    tokens_per_batch: Annotated[int, "the length of one packed row, in tokens", POSITIVE] = 8192
    feature_store: Annotated[str | None, "a folder that keeps the target's features between epochs", NOT_EMPTY] = None
    on_overlong: Annotated[Literal["truncate", "skip"], "what happens to samples above max_length"] = "truncate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens_per_batch < self.max_length:
            raise ConfigError(
                f"tokens_per_batch ({self.tokens_per_batch}) is smaller than max_length ({self.max_length})",
                "a sample is never split over two rows, so the longest one must fit into one",
                "raise data.tokens_per_batch or lower data.max_length",
                key="tokens_per_batch",
            )


@dataclass(frozen=True, kw_only=True)
class TopologyConfig(Section):
    """Which devices compute target features and which train the drafter; repeats are allowed."""

    targets: Annotated[tuple[str, ...], "the devices of the target workers", DEVICES] = ("cpu",)
    drafters: Annotated[tuple[str, ...], "the devices of the drafter workers", DEVICES] = ("cpu",)
    queue_size: Annotated[int, "how many batches of features may wait", POSITIVE] = 8


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Objective, optimizer, schedule and bookkeeping."""

    steps: Annotated[int | None, "the number of optimizer steps (null: from epochs)", POSITIVE] = None
    epochs: Annotated[int, "how often the training data is seen when steps is null", POSITIVE] = 6
    max_seconds: Annotated[float | None, "the wall-clock limit of training, in seconds", POSITIVE] = None
    batches_per_step: Annotated[int, "the packed rows per optimizer step", POSITIVE] = 1
    anchors_per_batch: Annotated[int, "the number of blocks per packed row", POSITIVE] = 512
    loss: Annotated[Literal["decay", "dpace"], "the weighting of offsets within a block"] = "decay"
    gamma: Annotated[float | None, "the decay length of the weights exp(-(k-1)/gamma)", POSITIVE] = None
    dpace_alpha: Annotated[float, "the smoothing of D-PACE confidences", FRACTION] = 0.5
    lr: Annotated[float, "the peak learning rate", POSITIVE] = 6e-4
    betas: Annotated[
        tuple[float, float],
        "the AdamW betas",
        BETAS,
    ] = (0.9, 0.95)
    eps: Annotated[float, "the AdamW epsilon", POSITIVE] = 1e-8
    weight_decay: Annotated[float, "the AdamW weight decay", NON_NEGATIVE] = 0.0
    warmup_ratio: Annotated[float, "the share of steps with a rising learning rate", FRACTION] = 0.04
    min_lr_ratio: Annotated[float, "the final learning rate as a share of the peak", FRACTION] = 0.0
    clip: Annotated[float, "the largest global gradient norm", POSITIVE] = 1.0
    dtype: Annotated[DtypeName, "the numeric type of the computation; masters stay at least fp32"] = "bfloat16"
    attention: Annotated[
        Literal["auto", "reference", "flex", "triton"],
        "the attention backend of the drafters; auto is the fastest that the device can train with",
    ] = "auto"
    log_every: Annotated[int, "the steps between two log lines", POSITIVE] = 10
    eval_every: Annotated[int, "the steps between two evaluations", POSITIVE] = 200
    checkpoint_every: Annotated[int, "the steps between two checkpoints", POSITIVE] = 500
    keep_checkpoints: Annotated[int, "how many checkpoints are kept", POSITIVE] = 2
    threads: Annotated[int | None, "the CPU threads of one operation (null: torch decides)", POSITIVE] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """Speculative decoding of held-out prompts and the teacher-forced accept length."""

    prompts: Annotated[tuple[str, ...], "the JSONL prompt files"] = ()
    num_prompts: Annotated[int, "how many prompts are decoded", POSITIVE] = 64
    max_new_tokens: Annotated[int, "the new tokens per prompt", POSITIVE] = 256
    temperature: Annotated[float, "the sampling temperature; 0 is greedy", NON_NEGATIVE] = 0.0
    dtype: Annotated[DtypeName, "the numeric type of target and drafter while decoding"] = "float32"
    anchors_per_sample: Annotated[int, "the blocks per held-out sample", POSITIVE] = 64


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Section):
    """Answers written by the target itself, to train on."""

    prompts: Annotated[tuple[str, ...], "the JSONL prompt files"] = ()
    output: Annotated[str | None, "the JSONL file that receives the chats", NOT_EMPTY] = None
    batch_size: Annotated[int, "the prompts that are answered at once", POSITIVE] = 8
    max_new_tokens: Annotated[int, "the longest answer, in tokens", POSITIVE] = 256
    temperature: Annotated[float, "the sampling temperature; 0 is greedy", NON_NEGATIVE] = 0.0
    top_p: Annotated[float, "the nucleus that is sampled from", NUCLEUS] = 1.0
    num_prompts: Annotated[int | None, "how many prompts are answered (null: all)", POSITIVE] = None


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Everything about one run. Paths are relative to the current folder, or `run:NAME`, `cache:NAME` and
    `package:NAME/sub`; see `placed` and `resolve_path`."""

    version: Annotated[int, "the version of this file format", THIS_VERSION]
    seed: Annotated[int, "the seed of every random choice", NON_NEGATIVE] = 0
    target: TargetConfig
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)

    def placed(self, run_dir: Path) -> RunConfig:
        """The same with `run:NAME` and `cache:NAME` replaced by paths in the run's folder and in the cache folder."""
        return _placed(self, {"run:": run_dir, "cache:": cache_folder("")})

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars; written as YAML and loaded again they give an equal `RunConfig`."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @property
    def gamma(self) -> float:
        """The decay length in use: `train.gamma`, else `default_gamma` of the block size."""
        return self.train.gamma if self.train.gamma is not None else default_gamma(self.drafter.block_size)


def default_gamma(block_size: int) -> float:
    """Decay length per block size: 16→7, 10→5, 8→4 (arXiv 2602.06036), and half the block size elsewhere."""
    return GAMMA_BY_BLOCK_SIZE.get(block_size, block_size / 2)


def load_run_config(path: str | Path) -> RunConfig:
    """Read and check a `run.yaml`. Raises `ConfigError` that names file, line, column and key path."""
    return load_dataclass(Path(path), RunConfig)


def resolve_path(path: str) -> Path:
    """The path itself, or for `package:NAME[/sub]` an installed package's folder. Raises `ConfigError`."""
    if not path.startswith("package:"):
        return Path(path)
    name, _, sub = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{path}: there is no importable package {name!r}",
            "package:NAME stands for the folder of an installed Python package, by its import name",
            f"install the package that provides {name!r} into this environment, or give a folder",
        )
    return Path(next(iter(spec.submodule_search_locations))) / sub


def _placed(value: Any, bases: dict[str, Path]) -> Any:
    if isinstance(value, Section):
        names = [f.name for f in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _placed(getattr(value, name), bases) for name in names})
    if isinstance(value, tuple):
        return tuple(_placed(item, bases) for item in value)
    for prefix, base in bases.items():
        if isinstance(value, str) and value.startswith(prefix):
            return str(base / value.removeprefix(prefix))
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
