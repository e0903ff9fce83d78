"""Saving a cache of a target to this machine, and putting a saved one into its place on a target."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.compile_cache.archive import Manifest, blocks_of, verify, write_manifest
from orchestrator.compile_cache.status import refuse_other_places
from orchestrator.errors import TransferError
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.owner import owner_for
from orchestrator.remote.wire import Record
from orchestrator.runs.launch import core_environment
from orchestrator.runs.part import laptop_disk
from orchestrator.runs.reconnect import listen
from orchestrator.session import Session, unreadable
from orchestrator.words import size

DEADLINE = 120.0
#: Bytes per second below which we call a transfer hung.
SLOWEST = 20_000

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """`fresh` is False when this very archive was there already. `left_out`: what was no regular file."""

    archive: Path
    manifest: Manifest
    fresh: bool
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """`there`: the target had it already. `aside`: the name of the cache that made room. `moved`: its path differs."""

    path: str
    there: bool
    aside: str | None
    moved: bool


def save(session: Session, store: str, folder: Path, *, report: Report = lambda text: None) -> Saved:
    """Copy a cache of the target into `folder`, as an archive with a manifest. Equal caches give equal archives.

    Raises UsageError `unknown_cache`, PreflightError `cache_busy` while a warm-up fills it, TransferError `damaged`,
    ConnectError; an archive that is not whole never has its name.
    """
    temporary = folder / f".{store}.{os.getpid()}.part"
    try:
        answer = _receive(session, store, temporary, report)
        manifest = _manifest(session, store, answer)
        archive = folder / manifest.archive
        fresh = not archive.exists()
        with laptop_disk(archive):
            temporary.replace(archive)
        write_manifest(manifest, archive)
    finally:
        temporary.unlink(missing_ok=True)
    left_out = tuple(map(str, answer.get("left_out") or ()))
    return Saved(archive=archive, manifest=manifest, fresh=fresh, left_out=left_out)


def restore(
    session: Session,
    target: ResolvedTarget,
    archive: Path,
    manifest: Manifest,
    *,
    replace: bool = False,
    lock_wait: float = 0.0,
    report: Report = lambda text: None,
) -> Restored:
    """Put a saved cache into its place. The archive is hashed here before it is sent, and there before it is opened.

    Raises TransferError `damaged` or `truncated`, PreflightError `cache_exists`, `cache_busy`, `run_alive`,
    `disk_full`, LockError; the target's cache is then as it was.
    """
    refuse_other_places(target)
    verify(archive, manifest, report=report)
    request = {
        "owner": owner_for(session, "dfo cache restore"),
        "wait_s": lock_wait,
        "store": manifest.store,
        "sha256": manifest.sha256,
        "bytes": manifest.bytes,
        "unpacked": manifest.unpacked,
        "files": manifest.files,
        "digests": [record.digest for record in manifest.records],
        "replace": replace,
        "environment": core_environment(session, target),
    }

    def sent(num_bytes: int) -> None:
        report(f"{size(num_bytes)} of {size(manifest.bytes)}")

    deadline = DEADLINE + lock_wait + (manifest.bytes + manifest.unpacked) / SLOWEST
    payload = blocks_of(archive, report=sent)
    answer: dict[str, Any] = session.call("cache_restore", request, payload=payload, deadline=deadline)
    path = str(answer["path"])
    aside = None if answer["aside"] is None else str(answer["aside"])
    return Restored(path=path, there=answer["state"] == "there", aside=aside, moved=path != manifest.path)


def _receive(session: Session, store: str, place: Path, report: Report) -> Mapping[str, Any]:
    """Write what comes, and compare it with the hash that the target says at the end."""
    digest, done, total = hashlib.sha256(), 0, 0
    with laptop_disk(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    with laptop_disk(place), place.open("xb") as file, session.open("cache_save", {"store": store}) as records:
        for record in listen(records):
            if record is None:
                continue
            if record.type == "begin":
                total = _number(record, "unpacked")
            elif record.type == "data":
                file.write(record.data)
                digest.update(record.data)
                done += len(record.data)
                report(f"{size(_number(record, 'unpacked'))} of {size(total)}")
            elif record.type == "done":
                file.flush()
                os.fsync(file.fileno())
                answer = record.fields["result"]
                assert isinstance(answer, dict)
                if (answer.get("sha256"), answer.get("bytes")) != (digest.hexdigest(), done):
                    raise TransferError(
                        "damaged",
                        "the cache did not arrive as it was sent",
                        why=f"{done:,} bytes came, {answer.get('bytes')} were sent, and their hashes differ",
                        fix="run the command again; nothing is kept of this attempt",
                    )
                return answer
    raise AssertionError("the records end with `done` or raise")


def _number(record: Record, key: str) -> int:
    value = record.fields.get(key)
    return value if isinstance(value, int) else 0


def _manifest(session: Session, store: str, answer: Mapping[str, Any]) -> Manifest:
    try:
        described = Manifest(
            archive="x.tar.gz",
            target=session.name,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            store=store,
            **{key: answer.get(key) for key in ("sha256", "bytes", "unpacked", "files", "path", "records")},  # type: ignore[arg-type]
        )
    except ValidationError as error:
        raise unreadable(f"what `{session.name}` says about its cache", error) from error
    newest = described.records[-1].name if described.records else "cold"
    # The end of the name is of the content: what was saved before is never overwritten by something else.
    return described.model_copy(update={"archive": f"{store}-{newest}-{described.sha256[:8]}.tar.gz"})
