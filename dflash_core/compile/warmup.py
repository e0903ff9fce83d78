"""The record of a warm-up: what was compiled, for what, and whether it still counts.

The fingerprint covers everything that compiled code depends on, and of this project's sources only those that are
traced or are kernels: editing a README, the command line or the data code leaves a cache warm.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
TRACED_PACKAGES = ("attention", "drafter", "objective", "kernels", "compile")
_PACKAGE = Path(__file__).resolve().parents[1]


def source_hash(package: Path = _PACKAGE) -> str:
    """SHA-256 over the sources that are traced or are kernels."""
    digest = hashlib.sha256()
    for name in TRACED_PACKAGES:
        for path in sorted((package / name).rglob("*.py")):
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(settings: Mapping[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Versions, devices, `settings` (shapes and options) and sources that the compiled code belongs to."""
    import torch

    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "devices": {device: _device_name(device) for device in dict.fromkeys(devices)},
        "settings": dict(settings),
        "sources": source_hash(),
    }


def digest(found: Mapping[str, Any]) -> str:
    """SHA-256 of a fingerprint."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def cache_root() -> Path:
    """The folder of the compile cache, as the environment names it (see `compile.environment`)."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def read_record(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a warm-up with exactly this fingerprint, or None. It lies in the cache and goes with it."""
    try:
        record = json.loads(_record_path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(record, dict) and record.get("v") == SCHEMA_VERSION
    return record if is_ours and record.get("fingerprint") == found else None


def write_record(found: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keep the record of a finished warm-up in the cache; returns it."""
    record = {
        "v": SCHEMA_VERSION,
        "created": round(time.time(), 3),
        "digest": digest(found),
        "fingerprint": dict(found),
        "entries": [dict(entry) for entry in entries],
        "seconds": round(sum(entry["seconds"] for entry in entries), 3),
    }
    write_json(_record_path(found), record)
    return record


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file in one go."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


@contextmanager
def alone() -> Iterator[None]:
    """One warm-up at a time on this cache; the kernel releases the lock of a process that dies."""
    with (cache_root() / "warmup.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record_path(found: Mapping[str, Any]) -> Path:
    return cache_root() / f"warmup-{digest(found)[:16]}.json"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
