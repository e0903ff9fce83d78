"""Beginning or continuing a run: the state, the optimizer and the schedule that go with it."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from dflash_core.budget import Budget
from dflash_core.data.packing import BatchStream, StreamState
from dflash_core.errors import CheckpointError
from dflash_core.events import EventLog
from dflash_core.optim import MasterAdamW
from dflash_core.session import Session
from dflash_core.training_state import (
    TrainState,
    latest_checkpoint,
    list_checkpoints,
    read_state,
    read_tensors,
    restore_generators,
)

FIXED_SETTINGS = (
    "seed",
    "drafter.num_hidden_layers",
    "drafter.block_size",
    "drafter.num_target_taps",
    "drafter.target_layer_ids",
    "drafter.mask_token_id",
    "drafter.layer_types",
    "drafter.sliding_window",
    "drafter.is_causal",
    "data.max_length",
    "data.tokens_per_batch",
    "data.on_overlong",
    "train.batches_per_step",
)
"""What a checkpoint's weights, moments and data position are meaningless without."""

BUDGET_SETTINGS = ("train.steps", "train.epochs", "train.max_seconds")
FINGERPRINT_BYTES = 1 << 16


def open_state(
    session: Session,
    run_dir: Path,
    stream: BatchStream,
    optimizer: MasterAdamW,
    events: EventLog,
    *,
    resume: bool,
) -> tuple[TrainState, Budget]:
    """The state to train from and the budget to train to; `optimizer` is restored when there is a checkpoint.

    Raises CheckpointError: a run directory that already holds checkpoints without `resume`, a damaged checkpoint,
    or one of another target, drafter or data set.
    """
    fresh = TrainState(
        stream=StreamState().to_dict(),
        config=session.config.to_dict(),
        data_fingerprint=data_fingerprint(stream.index.files),
        target_fingerprint=session.target_fingerprint(),
    )
    folder = latest_checkpoint(run_dir)
    if folder is None:
        return fresh, _new_budget(fresh, session, stream)
    if not resume:
        raise CheckpointError(
            f"{run_dir} already holds checkpoints ({', '.join(p.name for p in list_checkpoints(run_dir))})",
            "training anew would mix two runs in one directory",
            "add --resume to go on with that run, or choose another --run-dir",
        )
    return _continue(folder, fresh, session, stream, optimizer, events)


def _continue(
    folder: Path,
    fresh: TrainState,
    session: Session,
    stream: BatchStream,
    optimizer: MasterAdamW,
    events: EventLog,
) -> tuple[TrainState, Budget]:
    """Restore the checkpoint in `folder` and tell what has changed since it was written."""
    state = read_state(folder)
    check_compatible(folder, state, fresh)
    tensors = read_tensors(folder, optimizer.shapes())
    optimizer.load_state_tensors(tensors)
    restore_generators(tensors)
    changed = {key: [old, new] for key, old, new in _differences(state.config, fresh.config)}
    state.config = fresh.config
    budget = _continued_budget(state, session, stream, changed)
    events.emit(
        "resume",
        step=state.step,
        checkpoint=folder,
        changed=changed,
        total_steps=state.total_steps,
        progress=budget.floor,
    )
    return state, budget


def check_compatible(folder: Path, state: TrainState, now: TrainState) -> None:
    """Raise CheckpointError that lists every reason why `now` cannot continue from `state`."""
    problems = [
        f"{key} was {old!r} and is {new!r}"
        for key, old, new in _differences(state.config, now.config)
        if key in FIXED_SETTINGS
    ]
    if state.data_fingerprint != now.data_fingerprint:
        problems.append("the training files are not those of the checkpoint")
    if state.target_fingerprint != now.target_fingerprint:
        problems.append("the target's weights, type or taps are not those of the checkpoint")
    if problems:
        raise CheckpointError(
            f"{folder} cannot be continued with this configuration",
            "; ".join(problems),
            "restore those settings, or begin a new run with another --run-dir",
        )


def data_fingerprint(files: list[Path]) -> str:
    """Hash of the files' sizes and both ends; names do not count, so a moved file is the same file."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(FINGERPRINT_BYTES)
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(f"{size}|".encode() + head + file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def _new_budget(state: TrainState, session: Session, stream: BatchStream) -> Budget:
    settings = session.config.train
    total = settings.steps
    if total is None:
        total = math.ceil(stream.count_batches(settings.epochs).batches / settings.batches_per_step)
    state.total_steps = total
    return Budget(total_steps=total, max_seconds=settings.max_seconds)


def _continued_budget(
    state: TrainState, session: Session, stream: BatchStream, changed: dict[str, list[Any]]
) -> Budget:
    """The recorded budget and progress, or a new schedule when the user has changed the budget."""
    if not any(key in changed for key in BUDGET_SETTINGS):
        return Budget(total_steps=state.total_steps, max_seconds=session.config.train.max_seconds, floor=state.progress)
    return _new_budget(state, session, stream)


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old, new) wherever two configurations differ."""
    found: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append((f"{prefix}{key}", before, after))
    return found
