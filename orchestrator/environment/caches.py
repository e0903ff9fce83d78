"""Records of warm-ups, as a target or a saved archive tells them, and what has made one useless.

A record is about sources and settings too, but what is installed decides first: with another torch or other GPUs
nothing that was compiled can be used, whatever is deployed. A driver is no such part: compiled code outlives its
upgrades.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.terminal import printable

#: Parts of a fingerprint that an installation decides.
INSTALLED = ("python", "torch", "triton", "cuda")
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class CacheRecord(BaseModel):
    """One warm-up: which fingerprint it filled the cache for, when, and what it cost. It is input from outside."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    digest: Digest
    created: float
    seconds: float
    entries: int
    fingerprint: dict[str, Any]

    @property
    def name(self) -> str:
        """Enough of the digest to tell records apart, and to say on the command line."""
        return self.digest[:12]

    @property
    def gpus(self) -> set[str]:
        """The GPU models that it was made on."""
        return gpu_models(self.fingerprint)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What decides whether compiled code can be used at all: versions by name, and models of GPUs (None: not known)."""

    versions: Mapping[str, str | None]
    gpus: frozenset[str] | None


def gpu_models(fingerprint: Mapping[str, Any]) -> set[str]:
    """The models of the GPUs among the devices of a fingerprint."""
    devices = fingerprint.get("devices")
    found = devices.items() if isinstance(devices, Mapping) else ()
    return {printable(str(model)) for device, model in found if str(device).startswith("cuda")}


def gone(record: CacheRecord, now: Installed) -> list[str]:
    """What the record was made with and is no longer there, in words; empty while it can be of use."""
    words = []
    for name in INSTALLED:
        was, is_ = record.fingerprint.get(name), now.versions.get(name)
        if was != is_:
            words.append(f"{name} {_word(was)} -> {_word(is_)}")
    # Of a cache for two models one part is of use as long as one of them is there.
    if now.gpus is not None and record.gpus and not record.gpus & now.gpus:
        words.append(f"GPU {_listed(record.gpus)} -> {_listed(now.gpus)}")
    return words


def _word(value: object) -> str:
    return "none" if value is None else printable(str(value))[:60]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
