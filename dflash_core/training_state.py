"""Checkpoints: safetensors for tensors, JSON for the rest, nothing that executes code when it is read.

    checkpoints/
      latest                       text: the name of the newest complete checkpoint
      step-000120/
        drafter/                   the drafter in serving format, in the compute type
        train_state.safetensors    masters, moments, Adam's counters, generator states
        train_state.json           step, next batch number, schedule, configuration

A checkpoint is written under a hidden name, flushed to disk and renamed, so every `step-*` folder is complete and
a kill at any moment loses only what was never reported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash_core.errors import CheckpointError

FORMAT_VERSION = 1
LATEST = "latest"
STATE_TENSORS = "train_state.safetensors"
STATE_JSON = "train_state.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(kw_only=True)
class TrainState:
    """Where a run stands.

    `stream`: where the data stands, `StreamState.to_dict()` of the first batch not yet in the weights; batches in
    flight when a run ends are simply computed again. `elapsed_s`: training seconds over all processes of the run.
    `progress`: schedule position of the last update, in [0, 1]. `total_steps`: the end that it was computed for.
    """

    step: int = 0
    stream: dict[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0
    progress: float = 0.0
    total_steps: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    data_fingerprint: str = ""
    target_fingerprint: str = ""
    config: dict[str, Any] = field(default_factory=dict)


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    found = [(int(m.group(1)), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The folder named by `latest`, or None when the run has no checkpoint.

    Raises CheckpointError when `latest` names a folder that is not there.
    """
    pointer = run_dir / "checkpoints" / LATEST
    if not pointer.is_file():
        # A kill between the rename of a first checkpoint and the pointer: the folder itself is complete.
        complete = list_checkpoints(run_dir)
        return complete[-1] if complete else None
    name = pointer.read_text(encoding="utf-8").strip()
    folder = pointer.parent / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        raise CheckpointError(
            what=f"{pointer} names the checkpoint {name!r}, which is not there",
            why=f"checkpoints found: {_names(run_dir)}",
            fix=f"write the name of one of them into {pointer}",
        )
    return folder


def write_checkpoint(
    run_dir: Path,
    state: TrainState,
    tensors: Mapping[str, torch.Tensor],
    *,
    save_drafter: Callable[[Path], None],
    keep: int,
) -> Path:
    """Write one checkpoint atomically, point `latest` at it, delete all but the newest `keep`.

    Raises CheckpointError (disk full, no rights); the checkpoints already there stay as they are.
    """
    parent = run_dir / "checkpoints"
    final = parent / checkpoint_name(state.step)
    staging = parent / f".{final.name}.partial"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(".step-*.partial"):
            shutil.rmtree(leftover)
        _fill(staging, state, tensors, save_drafter)
        replaced = parent / f".{final.name}.replaced.partial"
        if final.exists():
            final.rename(replaced)
        staging.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _write_pointer(parent, final.name)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            what=f"cannot write the checkpoint {final}",
            why=error.why if isinstance(error, CheckpointError) else str(error),
            fix="free disk space or fix the rights of that folder, then resume; older checkpoints are intact",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for old in list_checkpoints(run_dir)[: -max(keep, 1)]:
        if old != final:
            shutil.rmtree(old)
    return final


def _fill(
    staging: Path,
    state: TrainState,
    tensors: Mapping[str, torch.Tensor],
    save_drafter: Callable[[Path], None],
) -> None:
    """Write all files of a checkpoint into a new folder, down to the disk."""
    staging.mkdir()
    save_drafter(staging / "drafter")
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, staging / STATE_TENSORS)
    document = {"v": FORMAT_VERSION, **asdict(state)}
    (staging / STATE_JSON).write_text(json.dumps(document, indent=1), encoding="utf-8")
    _flush_tree(staging)


def read_state(folder: Path) -> TrainState:
    """Read `train_state.json`. Raises CheckpointError for a file that is missing, torn or of another version."""
    path = folder / STATE_JSON
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document.pop("v")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}, this program reads {FORMAT_VERSION}")
        return TrainState(**document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable(path, error) from error


def read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read `train_state.safetensors` and require exactly the given names and shapes (extras under `rng.` allowed).

    Raises CheckpointError naming the file and the tensors that are missing, unknown or of another shape.
    """
    path = folder / STATE_TENSORS
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    expected = dict(shapes)
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in expected and not name.startswith("rng.")]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        raise CheckpointError(
            what=f"{path} does not fit this drafter",
            why="; ".join(problems[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else ""),
            fix="resume with the configuration that wrote it, or start a new run directory",
        )
    return tensors


def generator_states() -> dict[str, torch.Tensor]:
    """States of torch's global generators, CPU and every CUDA device, as `rng.*` tensors."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"rng.cuda{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return states


def restore_generators(tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the generators from `rng.*`; a device that this machine lacks is skipped."""
    if "rng.cpu" in tensors:
        torch.set_rng_state(tensors["rng.cpu"])
    for i in range(torch.cuda.device_count()):
        if f"rng.cuda{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng.cuda{i}"], i)


def _names(run_dir: Path) -> str:
    return ", ".join(path.name for path in list_checkpoints(run_dir)) or "none"


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    others = [p.name for p in list_checkpoints(path.parents[2]) if p != path.parent]
    pointer = path.parents[1] / LATEST
    fix = (
        f"write {others[-1]} into {pointer} and resume from there"
        if others
        else "start a new run directory; this run has no other checkpoint"
    )
    return CheckpointError(what=f"cannot read {path}", why=f"{type(error).__name__}: {error}", fix=fix)


def _write_pointer(parent: Path, name: str) -> None:
    temporary = parent / f".{LATEST}.partial"
    temporary.write_text(name + "\n", encoding="utf-8")
    _flush(temporary)
    temporary.replace(parent / LATEST)
    _flush(parent)


def _flush_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
