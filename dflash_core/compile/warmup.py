"""The record of a warm-up: for what a cache was made, and whether it still counts.

Records lie in the cache and go with it. One process at a time fills a cache; the kernel takes the lock back from one
that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_core.compile.fingerprint import differences, digest

SCHEMA_VERSION = 2
LOCK_FILE = "warmup.lock"
LOCK_POLL_S = 0.2
_FOLDERS = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}


@dataclass(frozen=True, kw_only=True)
class Validity:
    """Whether a cache is warm for a fingerprint.

    `changes` says in words what has changed since the nearest `record`, which a "missing" one has not.
    """

    state: Literal["valid", "stale", "missing"]
    changes: tuple[str, ...] = ()
    record: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if self.state == "missing":
            return f"missing: no warm-up is recorded in {cache_root()}"
        return f"stale: {'; '.join(self.changes)}" if self.state == "stale" else "valid"


def cache_root() -> Path:
    """The folder of the compile cache, as the environment names it (see `compile.environment`)."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def check(found: Mapping[str, Any]) -> Validity:
    """Whether a warm-up with exactly this fingerprint has filled the cache, and all of its files are still there."""
    known = digest(found)
    records = read_records()
    for record in records:
        if record["digest"] == known:
            lost = tuple(_lost(record["files"]))
            return Validity(state="stale" if lost else "valid", changes=lost, record=record)
    if not records:
        return Validity(state="missing")
    # Records come oldest first, and of equally near ones the newest is of interest.
    nearest = min(reversed(records), key=lambda record: len(differences(record["fingerprint"], found)))
    return Validity(state="stale", changes=tuple(differences(nearest["fingerprint"], found)), record=nearest)


def read_records() -> list[dict[str, Any]]:
    """All records in the cache, oldest first; damaged ones and those of another version do not count."""
    found = []
    for path in cache_root().glob("warmup-*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if _is_whole(record):
            found.append(record)
    return sorted(found, key=lambda record: record["created"])


def write_record(found: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keep the record of a finished warm-up in the cache; returns it."""
    record = {
        "v": SCHEMA_VERSION,
        "created": round(time.time(), 3),
        "digest": digest(found),
        "fingerprint": dict(found),
        "entries": [dict(entry) for entry in entries],
        "seconds": round(sum(entry["seconds"] for entry in entries), 3),
        "files": {name: count_files(Path(os.environ[variable])) for name, variable in _FOLDERS.items()},
    }
    write_json(cache_root() / f"warmup-{record['digest'][:16]}.json", record)
    return record


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file in one go."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


@contextmanager
def alone(
    *, poll: Callable[[], None] = lambda: None, on_wait: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """One process at a time fills this cache. A process that dies, however, leaves the lock to the next.

    `on_wait` is told once who holds it; `poll` is called while waiting and may raise. No compile worker inherits the
    lock: Python's files close in a program that is started.
    """
    with (cache_root() / LOCK_FILE).open("a+", encoding="utf-8") as file:
        if not _taken(file.fileno()):
            file.seek(0)
            on_wait(file.read(64).strip() or "unknown")
            while not _taken(file.fileno()):
                poll()
                time.sleep(LOCK_POLL_S)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def count_files(folder: Path) -> int:
    """How many files of compiled code a cache folder has; locks, records and unfinished ones are none."""
    count = 0
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith("tmp.")]  # where Triton is writing
        unfinished = (".lock", ".tmp", ".partial")
        count += sum(not name.endswith(unfinished) and not name.startswith("warmup-") for name in names)
    return count


def _is_whole(record: object) -> bool:
    """Whether this is a record of ours; it may have come from another machine."""
    kinds: dict[str, Any] = {
        "created": (int, float),
        "seconds": (int, float),
        "entries": list,
        "files": dict,
        "fingerprint": dict,
    }
    return (
        isinstance(record, dict)
        and record.get("v") == SCHEMA_VERSION
        and all(isinstance(record.get(key), kind) for key, kind in kinds.items())
        and record.get("digest") == digest(record["fingerprint"])
    )


def _lost(files: Mapping[str, int]) -> Iterator[str]:
    """Which parts of the cache have fewer files than the warm-up left there."""
    for name, variable in _FOLDERS.items():
        there, were = count_files(Path(os.environ[variable])), files.get(name, 0)
        if there < were:
            yield f"{name} cache: {there} of {were} files are left"


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
