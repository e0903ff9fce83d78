"""Target features of whole samples, computed once and used in every epoch.

Features are kept per sample and not per packed row, so that a new epoch may shuffle and pack the samples anew and
still find all of them. A sample's file is named by a hash of its token ids, in a folder named by a hash of the
target's weights, the tapped layers and the numeric type: an edited data file or another target can never be served
stale features. Files are a cache: one that is damaged or cannot be written costs time, never the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SAMPLED_VALUES = 1024
FORMAT = "1"
_NOT_THE_MODEL = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}


def default_ram_budget() -> int:
    """A quarter of this machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def target_fingerprint(
    model: torch.nn.Module, layer_ids: Sequence[int], dtype: torch.dtype, config: Mapping[str, Any]
) -> str:
    """Hash of what determines the features: tapped layers, type, the model's configuration and its weights.

    Of each weight tensor, at most `SAMPLED_VALUES` evenly spaced values are hashed: enough to tell any two training
    states apart, and quick for a model of any size.
    """
    settings = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL and key[0] != "_"}
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.sha256(f"{FORMAT}|{list(layer_ids)}|{dtype}|{text}".encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        stride = max(1, flat.numel() // SAMPLED_VALUES)
        sample = flat[::stride][: SAMPLED_VALUES + 1].to("cpu", torch.float32)
        digest.update(f"{name}|{tuple(weight.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


class FeatureStore:
    """Features `[tokens, width]` by token ids; safe to use from several threads.

    `folder=None` keeps features in RAM only. Features are held in RAM up to `ram_budget` bytes; beyond that they are
    read from disk again. Counters: `hits`, `misses`, `damaged` (files that were there but not usable).
    """

    def __init__(
        self, folder: Path | None, fingerprint: str, *, width: int, dtype: torch.dtype, ram_budget: int
    ) -> None:
        self.fingerprint = fingerprint
        self.folder = folder / fingerprint[:16] if folder is not None else None
        self.hits = 0
        self.misses = 0
        self.damaged = 0
        self.write_error: OSError | SafetensorError | None = None
        self._width = width
        self._dtype = dtype
        self._ram_left = ram_budget
        self._ram: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def get(self, input_ids: np.ndarray) -> torch.Tensor | None:
        """Features of a sample on the CPU, or None when they must be computed."""
        key = _key(input_ids)
        with self._lock:
            found = self._ram.get(key)
        if found is None and self.folder is not None:
            found = self._read(key, len(input_ids))
            if found is not None:
                self._keep(key, found)
        with self._lock:
            self.hits += found is not None
            self.misses += found is None
        return found

    def put(self, input_ids: np.ndarray, features: torch.Tensor) -> None:
        """Keep the features of a sample. A full disk is remembered in `write_error` and ends writing, not the run."""
        assert features.shape == (len(input_ids), self._width) and features.dtype == self._dtype
        key = _key(input_ids)
        # A clone, because a slice would keep the whole row it was cut from alive.
        kept = features.detach().to("cpu", copy=True).contiguous()
        self._keep(key, kept)
        if self.folder is not None and self.write_error is None:
            try:
                self._write(key, kept)
            except (OSError, SafetensorError) as error:
                self.write_error = error

    def _keep(self, key: str, features: torch.Tensor) -> None:
        size = features.numel() * features.element_size()
        with self._lock:
            if key not in self._ram and size <= self._ram_left:
                self._ram[key] = features
                self._ram_left -= size

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.safetensors"

    def _read(self, key: str, tokens: int) -> torch.Tensor | None:
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                features: torch.Tensor = file.get_tensor("features")
                checksum = (file.metadata() or {}).get("crc32")
        except (OSError, SafetensorError):
            features, checksum = torch.empty(0), None
        sound = (
            features.shape == (tokens, self._width)
            and features.dtype == self._dtype
            and checksum == _checksum(features)
        )
        if sound:
            return features
        with self._lock:
            self.damaged += 1
        return None

    def _write(self, key: str, features: torch.Tensor) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            save_file({"features": features}, temporary, metadata={"crc32": _checksum(features)})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _key(input_ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(input_ids, dtype=np.int64).tobytes()).hexdigest()[:32]


def _checksum(features: torch.Tensor) -> str:
    return str(zlib.crc32(features.contiguous().view(torch.uint8).numpy().data))
