"""What must hold before a run is worth starting, checked in seconds and without loading any weights."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash_core.attention import backend_name, check_backend
from dflash_core.config import RunConfig
from dflash_core.data.chats import ChatIndex, PromptIndex
from dflash_core.data.encode import SampleRefused, encode_chat
from dflash_core.drafter import DFlashConfig, DFlashDrafter, config_from_target
from dflash_core.errors import CheckpointError, ConfigError, DataError, PreflightError
from dflash_core.events import EventLog, human_count
from dflash_core.prompt_sets import prompt_sets
from dflash_core.resume import check_compatible, data_fingerprint
from dflash_core.target import load_target_config, load_tokenizer
from dflash_core.training_state import TrainState, latest_checkpoint, read_state

FIRST_LINES = 64
SETS_COMPARED_UP_TO = 200_000
MASTER_BYTES = 12
"""fp32 master and two moments."""

Fact = tuple[str, str]


def preflight(
    config: RunConfig,
    run_dir: Path,
    events: EventLog,
    *,
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> list[Fact]:
    """Check everything a run depends on and print a table of facts; returns the facts.

    Raises the first problem: ConfigError, TargetError, DataError, CheckpointError, PreflightError.
    """
    facts: list[Fact] = []
    for name, value in _facts(config, run_dir, resume=resume):
        facts.append((name, value))
        say(f"{name:<18} {value}")
    events.emit("preflight", facts=dict(facts))
    return facts


def _facts(config: RunConfig, run_dir: Path, *, resume: bool) -> Iterator[Fact]:
    yield "python, torch", f"{platform.python_version()}, {torch.__version__}, transformers {transformers.__version__}"
    yield "devices", _devices(config)
    yield "attention", _attention(config)
    tokenizer = load_tokenizer(config.target)
    target_config = load_target_config(config.target)
    drafter = config_from_target(target_config, config.drafter, tokenizer, dtype=config.train.dtype)
    yield "target", _target(config, target_config)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in DFlashDrafter(drafter).parameters())
    yield "drafter", _drafter(drafter, parameters)
    yield from _data(config, tokenizer)
    yield "disk", _disk(config, run_dir, parameters)
    yield "run directory", _run_dir(config, run_dir, resume=resume)


def _devices(config: RunConfig) -> str:
    wanted = list(dict.fromkeys([*config.topology.targets, *config.topology.drafters]))
    count = torch.cuda.device_count()
    for device in wanted:
        if device != "cpu" and (torch.device(device).index or 0) >= count:
            raise PreflightError(
                f"topology: there is no device {device}",
                f"torch {torch.__version__} sees {count} CUDA devices",
                "choose other devices in topology, or check the driver and CUDA_VISIBLE_DEVICES",
            )
    names = [f"{d} ({torch.cuda.get_device_name(d)})" if d != "cpu" else "cpu" for d in wanted]
    return (
        f"{', '.join(names)}; {len(config.topology.targets)} target and {len(config.topology.drafters)} drafter workers"
    )


def _attention(config: RunConfig) -> str:
    devices = dict.fromkeys(config.topology.drafters)
    for device in devices:
        check_backend(config.train.attention, device)
    names = dict.fromkeys(backend_name(config.train.attention, device) for device in devices)
    return ", ".join(names)


def _target(config: RunConfig, target_config: Any) -> str:
    text = target_config.get_text_config()
    shape = f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, vocabulary {text.vocab_size}"
    return f"{config.target.path}: {text.model_type}, {shape}, {config.target.dtype}"


def _drafter(drafter: DFlashConfig, parameters: int) -> str:
    return (
        f"{human_count(parameters)} parameters, {drafter.num_hidden_layers} layers, block {drafter.block_size}, "
        f"taps {list(drafter.target_layer_ids)}, mask token {drafter.mask_token_id}"
    )


def _data(config: RunConfig, tokenizer: Any) -> Iterator[Fact]:
    if not config.data.train:
        raise ConfigError(
            "data.train is empty", "there is nothing to train on", "name at least one JSONL file", key="data.train"
        )
    train = ChatIndex(config.data.train)
    yield "training chats", f"{len(train)}; {_first_usable(train, config, tokenizer)}"
    size = len(train)
    if config.data.heldout:
        heldout = ChatIndex(config.data.heldout)
        size += len(heldout)
        yield "held-out chats", f"{len(heldout)}; {_first_usable(heldout, config, tokenizer)}"
    if config.evaluate.prompts:
        prompts = PromptIndex(config.evaluate.prompts)
        size += len(prompts)
        for number in range(min(FIRST_LINES, len(prompts))):
            prompts[number]
        yield "held-out prompts", str(len(prompts))
    if size <= SETS_COMPARED_UP_TO:
        sets = prompt_sets(config)
        trained, held_out = (sets[name]["samples"] for name in ("train", "heldout"))
        yield "prompt sets", f"{trained} trained on, {held_out} held out, none in both"


def _first_usable(index: ChatIndex, config: RunConfig, tokenizer: Any) -> str:
    """Parse and encode the first chats; raises DataError when a line is broken or none of them is usable."""
    data, refused = config.data, []
    checked = min(FIRST_LINES, len(index))
    longest = 0
    for number in range(checked):
        chat = index[number]
        try:
            encoded = encode_chat(
                chat.messages, tokenizer, data.max_length, data.on_overlong, complete=chat.complete, place=chat.place
            )
            longest = max(longest, len(encoded))
        except SampleRefused as refusal:
            refused.append(refusal)
    if len(refused) == checked:
        first = refused[0]
        raise DataError(f"none of the first {checked} chats is usable: {first.what}", first.why, first.fix)
    return f"first {checked}: {checked - len(refused)} usable, longest {longest} tokens"


def _disk(config: RunConfig, run_dir: Path, parameters: int) -> str:
    """Room for the kept checkpoints, one more while it is written, and the export."""
    width = torch.empty(0, dtype=getattr(torch, config.train.dtype)).element_size()
    needed = parameters * ((MASTER_BYTES + width) * (config.train.keep_checkpoints + 1) + width)
    existing = next(path for path in (run_dir, *run_dir.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{human_count(free)}B free, {human_count(needed)}B needed for {config.train.keep_checkpoints} checkpoints"
    if free < needed:
        raise PreflightError(
            f"{run_dir}: too little disk space",
            text,
            "free space, or lower train.keep_checkpoints",
        )
    return text


def _run_dir(config: RunConfig, run_dir: Path, *, resume: bool) -> str:
    """Whether a run may start or go on here."""
    folder = latest_checkpoint(run_dir)
    if folder is None:
        return "no checkpoint, the run begins at step 0"
    state = read_state(folder)
    if not resume:
        raise CheckpointError(
            f"{run_dir} already holds the checkpoint {folder.name}",
            "training anew would mix two runs in one directory",
            "add --resume to go on with that run, or choose another --run-dir",
        )
    now = TrainState(
        config=config.to_dict(),
        data_fingerprint=data_fingerprint(ChatIndex(config.data.train).files),
        target_fingerprint=state.target_fingerprint,  # known once the weights are loaded
    )
    check_compatible(folder, state, now)
    return f"goes on from {folder.name}, step {state.step} of {state.total_steps}"
