"""What compiled code belongs to, part by part, and what has changed since, in words.

Of this project's sources only those count that are traced or are kernels, file by file: editing a README, the command
line or the data code leaves a cache warm. Where the sources lie does not count either, because no compile cache keys
on it: Inductor hashes graphs, Triton the text of a kernel (and the line it begins at). A test looks that this stays so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_core.compile.environment import compile_options

TRACED_PACKAGES = ("attention", "drafter", "objective", "kernels")
SHOWN = 5
"""How many files are named before the rest is only counted."""
_PACKAGE = Path(__file__).resolve().parents[1]
_NAMED = ("python", "torch", "triton", "cuda", "driver")

Fingerprint = dict[str, Any]


def fingerprint(settings: Mapping[str, Any], devices: Sequence[str]) -> Fingerprint:
    """Versions, devices, options, `settings` (shapes and types) and sources, as JSON can hold them."""
    import torch

    found = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "devices": {device: _device_name(device) for device in dict.fromkeys(devices)},
        "options": compile_options(),
        "settings": settings,
        "sources": source_hashes(),
    }
    plain: Fingerprint = json.loads(json.dumps(found))
    return plain


def digest(found: Mapping[str, Any]) -> str:
    """SHA-256 of a fingerprint."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def source_hashes(package: Path = _PACKAGE) -> dict[str, str]:
    """Path → first 16 digits of its SHA-256, for the sources that are traced or are kernels."""
    return {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name in TRACED_PACKAGES
        for path in sorted((package / name).rglob("*.py"))
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words: `torch 2.11.0 -> 2.13.0`, `sources: kernels/rms_norm.py changed`."""
    words = [
        f"{name} {_word(before.get(name))} -> {_word(now[name])}" for name in _NAMED if before.get(name) != now[name]
    ]
    for part in ("devices", "options", "settings"):
        words += _changed(_leaves(before.get(part)), _leaves(now[part]))
    if files := list(_changed_files(_leaves(before.get("sources")), now["sources"])):
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        words.append(f"sources: {', '.join(files[:SHOWN])}{more}")
    return words


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name} {_word(before.get(name))} -> {_word(now.get(name))}"


def _changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            yield f"{path} {'is new' if path not in before else 'is gone' if path not in now else 'changed'}"


def _leaves(value: object, name: str = "") -> dict[str, Any]:
    """Dotted key → value; what is no mapping at all has none."""
    if not isinstance(value, Mapping):
        return {name: value} if name else {}
    found: dict[str, Any] = {}
    for key, below in value.items():
        found |= _leaves(below, f"{name}.{key}" if name else str(key))
    return found


def _word(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


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
