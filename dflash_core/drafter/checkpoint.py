"""Drafter folders: `config.json` and one `model.safetensors` with z-lab's tensor names, nothing else, never pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dflash_core.config import DtypeName
from dflash_core.drafter.model import DFlashDrafter
from dflash_core.drafter.zlab import config_from_json, config_to_json
from dflash_core.errors import CheckpointError

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_DTYPES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def save_drafter(model: DFlashDrafter, folder: Path | str, *, dtype: torch.dtype | None = None) -> None:
    """Write ``model`` into ``folder`` (created if absent), weights in ``dtype`` (None: as they are).

    Each file is written beside its final name, synced, and renamed; the weights first, so a folder with a
    `config.json` is complete. A full disk or a kill leaves the previous files in place. Raises `CheckpointError`.
    """
    folder = Path(folder)
    kept = dtype or model.dtype
    tensors = {name: tensor.detach().to("cpu", kept).contiguous() for name, tensor in model.state_dict().items()}
    config = config_to_json(model.config) | {"dtype": _DTYPES[kept]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(folder / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        _write_atomically(folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the drafter could not be saved", str(error), "free some space or choose another folder"
        ) from error


def load_drafter(
    folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> DFlashDrafter:
    """Read a drafter folder written by this project or published in z-lab's format; exactly its tensors, or an error.

    Returns the model in ``dtype`` (None: as stored) on ``device``, in training mode. Raises `CheckpointError` for
    damaged, missing, superfluous or misshapen tensors, `ConfigError` for its `config.json`.
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder}: there is no {CONFIG_FILE}",
            "a drafter is a folder with its config and weights",
            "give that folder",
        )
    config = config_from_json(folder / CONFIG_FILE)
    with torch.device("meta"):
        model = DFlashDrafter(config)
    tensors = _read_tensors(folder / WEIGHTS_FILE, model.state_dict())
    wanted = dtype or tensors["fc.weight"].dtype
    # Copies, because the tensors are views of the mapped file: one that is overwritten would crash the process.
    placed = {name: tensor.to(device, wanted, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(placed, assign=True)
    return model


def _read_tensors(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file", "only safetensors weights in one file are read")
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _compare(path, shapes, {name: tuple(tensor.shape) for name, tensor in expected.items()})
            tensors = {name: file.get_tensor(name) for name in expected}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: the file is damaged", str(error), "copy it again, or take an earlier checkpoint"
        ) from error
    strange = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in _DTYPES]
    if strange:
        raise CheckpointError(
            f"{path}: not floating-point weights: {_some(strange)}", "quantised drafters cannot be trained"
        )
    return tensors


def _compare(path: Path, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    shapes = [
        f"{name} is {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    problems = {"missing tensors": missing, "unexpected tensors": extra, "wrong shapes": shapes}
    for problem, names in problems.items():
        if names:
            raise CheckpointError(
                f"{path}: {problem}: {_some(names)}",
                f"the weights do not belong to the {CONFIG_FILE} beside them",
                "take both files from the same checkpoint",
            )


def _some(items: list[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
