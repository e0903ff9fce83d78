"""The environment of a target as a file: taken by a program there, validated here, compared in `drift`."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.environment.caches import CacheRecord, Installed
from orchestrator.environment.node import NodeRecord, look
from orchestrator.errors import UsageError
from orchestrator.session import Session, unreadable
from orchestrator.words import first_problem

SCHEMA: Literal["dfo-environment/1"] = "dfo-environment/1"
#: Importing torch from a cold disk is what takes long.
DEADLINE = 240.0


class _Facts(BaseModel):
    # What the target says is input from outside: known fields with known types, or it is not a snapshot.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Python(_Facts):
    version: str
    implementation: str
    executable: str
    prefix: str


class Package(_Facts):
    """`origin`: `index`, `editable URL`, `vcs URL@COMMIT` or `url URL`."""

    name: str
    version: str
    origin: str


class Torch(_Facts):
    """Build facts of torch, or why it does not import."""

    version: str | None = None
    git_version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    cudnn: int | None = None
    cxx11_abi: bool | None = None
    arch_list: list[str] = []
    cuda_available: bool = False
    gpu_count: int = 0
    cpu_capability: str | None = None
    import_error: str | None = None


class Driver(_Facts):
    """Versions of the node's kernel module and of the container's library."""

    kernel_module: str | None
    library: str | None


class Folder(_Facts):
    path: str
    exists: bool
    bytes: int
    files: int


class Caches(_Facts):
    """The cache that was filled last, and the records of all warm-ups, oldest first."""

    inductor: Folder
    triton: Folder
    file_system: str | None
    warmup_fingerprint: str | None
    records: list[CacheRecord] = []


class Cpu(_Facts):
    model: str
    cores: int
    usable: int


class Memory(_Facts):
    """Bytes; `limit` is the cgroup's."""

    total: int
    limit: int | None


class Disk(_Facts):
    total: int
    free: int
    file_system: str | None


class System(_Facts):
    name: str
    kernel: str
    machine: str
    libc: str
    init: str | None


class Snapshot(_Facts):
    """Everything that decides whether training works there, and whether a warm cache is worth anything."""

    schema_: Literal["dfo-environment/1"] = SCHEMA
    target: str
    taken: str
    python: Python
    packages: list[Package]
    torch: Torch | None
    gpus: list[dict[str, str]]
    driver: Driver
    caches: Caches
    cpu: Cpu
    memory: Memory
    disk: Disk
    os: System
    variables: dict[str, str]
    node: NodeRecord | None = None

    def version_of(self, package: str) -> str | None:
        return next((p.version for p in self.packages if p.name == package), None)

    @property
    def installed(self) -> Installed:
        """What decides whether compiled code can be used."""
        return Installed(
            versions={
                "python": ".".join(self.python.version.split(".")[:2]),
                "torch": self.version_of("torch"),
                "triton": self.version_of("triton"),
                "cuda": self.torch.cuda if self.torch else None,
            },
            gpus=frozenset(gpu.get("name", "") for gpu in self.gpus),
        )

    def as_dict(self) -> dict[str, object]:
        body = self.model_dump()
        return {"schema": body.pop("schema_"), **body}


def take(session: Session) -> Snapshot:
    """Ask the target, and the node of a container. Raises `PreflightError` when its answer is not a snapshot."""
    facts = session.call("snapshot", deadline=DEADLINE)
    node = look(session.transport)
    taken = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return Snapshot.model_validate({"target": session.name, "taken": taken, **facts, "node": node})
    except ValidationError as error:
        raise unreadable(f"the snapshot of `{session.name}`", error) from error


def save(snapshot: Snapshot, path: Path) -> str:
    """Write atomically; returns the SHA-256 of the file."""
    text = json.dumps(snapshot.as_dict(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: Path) -> Snapshot:
    """Read a saved snapshot. Raises `UsageError` when it is missing, damaged or of another schema."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict):
            raise ValueError("it is not a JSON object")
        if body.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {body.get('schema')!r}, not {SCHEMA!r}")
        return Snapshot.model_validate({("schema_" if k == "schema" else k): v for k, v in body.items()})
    except (OSError, ValueError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
        raise UsageError(
            "snapshot_invalid",
            f"`{path}` is not a snapshot",
            why=why,
            fix="take one with `dfo env-snapshot`",
        ) from error


def default_path(project: Path, snapshot: Snapshot) -> Path:
    stamp = datetime.fromisoformat(snapshot.taken).strftime("%Y%m%d-%H%M%S")
    return project / "snapshots" / f"{snapshot.target}-{stamp}.json"


def summary(snapshot: Snapshot) -> list[str]:
    """The lines a person wants to see, newest knowledge first."""
    torch = snapshot.torch
    built = "torch is not installed" if torch is None else torch.import_error or f"torch {torch.version}"
    versions = [f"{name} {snapshot.version_of(name) or 'missing'}" for name in ("triton", "transformers")]
    cards = f"{len(snapshot.gpus)} x {snapshot.gpus[0].get('name')}" if snapshot.gpus else "no GPU"
    driver = snapshot.driver
    caches = [
        f"{name} {folder.bytes / 1e9:.1f} GB {folder.files} files" if folder.exists else f"{name} none"
        for name, folder in (("inductor", snapshot.caches.inductor), ("triton", snapshot.caches.triton))
    ]
    return [
        f"python {snapshot.python.version}, {built}, {', '.join(versions)}, {len(snapshot.packages)} packages",
        f"{cards}, driver {driver.library or '-'} (kernel module {driver.kernel_module or '-'}), "
        f"{snapshot.cpu.usable} of {snapshot.cpu.cores} cores ({snapshot.cpu.model}), "
        f"{snapshot.memory.total / 2**30:.0f} GiB memory",
        f"cache {', '.join(caches)} on {snapshot.caches.file_system or 'an unknown file system'}, "
        f"warm-up {(snapshot.caches.warmup_fingerprint or 'not done')[:12]}",
        *([snapshot.node.summary] if snapshot.node else []),
    ]
