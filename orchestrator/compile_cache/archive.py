"""A saved cache on this machine: `NAME.tar.gz`, and `NAME.json` which says what is in it.

The manifest is written last, so an archive that has one is whole. It has come from outside once it has been on another
machine: what it says is checked, and nothing here looks into the archive.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.environment.caches import CacheRecord, Digest
from orchestrator.errors import TransferError, UsageError
from orchestrator.runs.part import laptop_disk
from orchestrator.words import first_problem, size

SCHEMA = "dfo-cache/1"
BLOCK = 1 << 20
#: What no compile cache comes near; a manifest that says more is not believed.
MAX_FILES = 500_000
MAX_BYTES = 200_000_000_000
STORE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9.+_-]{0,150}$"


class Manifest(BaseModel):
    """`path`: where the cache lay on `target`; compiled code may hold it. `unpacked`, `bytes`: sizes in bytes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    archive: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]{0,220}\.tar\.gz$")]
    sha256: Digest
    bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)]
    unpacked: Annotated[int, Field(ge=0, le=MAX_BYTES)]
    files: Annotated[int, Field(ge=0, le=MAX_FILES)]
    store: Annotated[str, Field(pattern=STORE_PATTERN)]
    path: str
    target: str
    saved: str
    records: list[CacheRecord]

    def as_dict(self) -> dict[str, object]:
        return {"schema": SCHEMA, **self.model_dump()}


def default_folder(target: str) -> Path:
    """Where the saved caches of a target lie, unless told otherwise."""
    from platformdirs import user_data_path

    return user_data_path("dfo") / "caches" / target


def manifest_of(archive: Path) -> Path:
    return archive.with_name(archive.name.removesuffix(".tar.gz") + ".json")


def write_manifest(manifest: Manifest, archive: Path) -> Path:
    """Beside the archive, in one go."""
    path = manifest_of(archive)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with laptop_disk(path):
        temporary.write_text(json.dumps(manifest.as_dict(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)
    return path


def read_manifest(path: Path) -> Manifest:
    """Read the manifest at `path`. Raises UsageError `archive_invalid`."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        return Manifest.model_validate(body)
    except (OSError, ValueError, RecursionError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
        raise UsageError(
            "archive_invalid",
            f"`{path}` does not describe a saved cache",
            why=why,
            fix="name the .tar.gz that `dfo cache save` wrote, with its .json beside it",
        ) from error


def saved_in(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Archive and manifest of every saved cache in a folder, oldest first; what is no such thing is passed over."""
    found = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            manifest = read_manifest(path)
        except UsageError:
            continue
        archive = path.with_name(manifest.archive)
        if archive.is_file() and manifest_of(archive) == path:
            found.append((archive, manifest))
    yield from sorted(found, key=lambda pair: (pair[1].saved, pair[0].name))


def choose(word: str, folder: Path) -> tuple[Path, Manifest]:
    """The saved cache that `word` means: a path, or the first digits of a warm-up's digest in `folder`.

    Raises UsageError `archive_invalid`, `unknown_cache`.
    """
    path = Path(word).expanduser()
    if path.suffix == ".json" or path.name.endswith(".tar.gz") or path.exists():
        manifest = read_manifest(path if path.suffix == ".json" else manifest_of(path))
        return path.with_name(manifest.archive) if path.suffix == ".json" else path, manifest
    found = [pair for pair in saved_in(folder) if any(r.digest.startswith(word.lower()) for r in pair[1].records)]
    if found:
        return found[-1]
    raise UsageError(
        "unknown_cache",
        f"there is no saved cache `{word}`",
        why=f"it is no file, and no warm-up saved in `{folder}` has a digest that begins so",
        fix="`dfo cache status` lists what is saved; or give the path of an archive",
    )


def verify(archive: Path, manifest: Manifest, *, report: Callable[[str], None] = lambda text: None) -> None:
    """Raise TransferError `damaged` unless the archive has the size and the hash that its manifest says."""
    digest, done = hashlib.sha256(), 0
    with laptop_disk(archive), archive.open("rb") as file:
        while done <= manifest.bytes and (block := file.read(BLOCK)):
            digest.update(block)
            done += len(block)
            report(f"{size(done)} of {size(manifest.bytes)}")
    if done != manifest.bytes or digest.hexdigest() != manifest.sha256:
        raise TransferError(
            "damaged",
            f"`{archive}` is not what was saved",
            why=f"{done:,} bytes read, {manifest.bytes:,} expected; SHA-256 {digest.hexdigest()[:12]}…, "
            f"not {manifest.sha256[:12]}…",
            fix="restore another one (`dfo cache status`), or warm up again; nothing was sent",
        )


def blocks_of(archive: Path, *, report: Callable[[int], None]) -> Iterator[bytes]:
    """The archive in pieces for a transport, telling how many bytes are out."""
    sent = 0
    with laptop_disk(archive), archive.open("rb") as file:
        while block := file.read(256 * 1024):
            yield block
            sent += len(block)
            report(sent)
