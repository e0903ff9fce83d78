"""A target folder with compile caches in it, made by hand: files that look like compiled code, and records."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.resolve import load_inventory
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

STORE = "py3.12-torch2.11.0-triton3.6.0"
FINGERPRINT: dict[str, Any] = {
    "python": "3.12",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "driver": "580.95.05",
    "devices": {"cpu": "x86_64", "cuda:0": "NVIDIA H200"},
    "options": {},
    "settings": {"tokens_per_batch": 8192},
    "sources": {"kernels/rms_norm.py": "0123456789abcdef"},
}


def record_of(created: float, **parts: Any) -> dict[str, Any]:
    """A record as the core writes it."""
    fingerprint = {**FINGERPRINT, **parts}
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    entries = [{"worker": "drafter-0 (cuda:0)", "seconds": 30.0, "compiles": 3, "misses": 3}]
    files = {"inductor": 2, "triton": 1}
    body = {"v": 2, "created": created, "digest": digest, "fingerprint": fingerprint, "entries": entries}
    return {**body, "seconds": 30.0, "files": files}


@dataclass
class CacheTarget:
    """`root` on the target, `project` on the laptop."""

    root: Path
    project: Path

    @property
    def session(self) -> Session:
        return Session("lab", LocalTransport(), str(self.root), sys.executable)

    @property
    def inventory(self) -> Path:
        path = self.project / "inventory" / "dfo.yaml"
        if not path.exists():
            path.parent.mkdir(parents=True)
            lab = {"transport": "local", "python": sys.executable, "deploy": {"root": str(self.root)}}
            lab["launch"] = {"config": "run.yaml"}
            path.write_text(yaml.safe_dump({"version": 1, "targets": {"lab": lab}}))
            self.write_config()
        return path

    @property
    def target(self) -> ResolvedTarget:
        return load_inventory(find_inventory(self.inventory, environ={})).resolve("lab", environ={}).target

    def write_config(self, **train: Any) -> Path:
        """A run that would compile something."""
        path = self.project / "run.yaml"
        path.write_text(
            yaml.safe_dump({"version": 1, "target": {"path": "x"}, "train": {"attention": "flex", **train}})
        )
        return path

    def store(self, name: str = STORE) -> Path:
        return self.root / "shared" / "cache" / "compile" / name

    def fill(self, name: str = STORE, *, age: float = 60.0, **parts: Any) -> dict[str, Any]:
        """Put a cache there, or one more record into it; returns the record."""
        store, record = self.store(name), record_of(time.time() - age, **parts)
        for path, body in {
            "inductor/fxgraph/ab/cdef": b"a graph\0" * 50,
            "inductor/xy/cxy.so": b"\x7fELF" + b"code" * 500,
            "triton/ABC/kernel.cubin": b"\x7fELF" + b"cubin" * 100,
        }.items():
            (store / path).parent.mkdir(parents=True, exist_ok=True)
            (store / path).write_bytes(body)
        (store / "inductor" / "xy" / "cxy.so").chmod(0o755)
        (store / "inductor" / f"warmup-{record['digest'][:16]}.json").write_text(json.dumps(record))
        return record

    def tree(self, name: str = STORE) -> dict[str, tuple[bytes, int]]:
        """Path → (content, mode) of all files of a cache but its locks."""
        store = self.store(name)
        files = [path for path in sorted(store.rglob("*")) if path.is_file() and path.suffix != ".lock"]
        return {str(path.relative_to(store)): (path.read_bytes(), path.stat().st_mode & 0o777) for path in files}
