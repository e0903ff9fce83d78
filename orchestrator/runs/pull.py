"""Copying the files of a run to the laptop: by manifest, verified by hash, resumable, and never where they like.

A file arrives in `.NAME.HASH.part` beside its place and is renamed when its hash is right, so a name that exists
is a file that is whole. The hash in the name says which version the part belongs to: after a drop, or in the next
`dfo pull`, the copy goes on where it stopped.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import ConnectError, PreflightError, TransferError
from orchestrator.remote.wire import Record
from orchestrator.runs.part import Entry, Part, entry_from, is_there, laptop_disk
from orchestrator.runs.reconnect import SILENCE, Backoff, is_transient, listen
from orchestrator.runs.selection import Layout, Selection, group_of
from orchestrator.session import Session
from orchestrator.terminal import printable
from orchestrator.words import count, size

#: How often a file may change under our hands before we give up on it.
ROUNDS = 3
#: Attempts in a row that bring nothing.
PATIENCE = 6
#: Seconds between two words of progress.
TELL_EVERY = 0.2
HEADER = ("WHAT", "FILES", "COPIED", "SIZE", "TIME")
T = TypeVar("T")


@dataclass(frozen=True)
class Manifest:
    run: int
    state: str
    files: tuple[Entry, ...]
    skipped: tuple[tuple[str, str], ...]
    older: int


@dataclass
class Row:
    """One group of the result: `files` of which `copied` had to be, `bytes` of those, `seconds` they took."""

    files: int = 0
    copied: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Pulled:
    run: int
    folder: Path
    rows: Mapping[str, Row]
    skipped: tuple[tuple[str, str], ...]
    older: int
    drops: int

    @property
    def summary(self) -> str:
        copied, num_bytes = (sum(getattr(row, name) for row in self.rows.values()) for name in ("copied", "bytes"))
        equal = sum(row.files for row in self.rows.values()) - copied
        return f"{count(copied, 'file')}, {size(num_bytes)}, hashes equal" + (f"; {equal} were here" if equal else "")

    def table(self) -> list[list[str]]:
        """Rows below `HEADER`."""
        return [
            [name, f"{row.files:,}", f"{row.copied:,}", size(row.bytes), f"{row.seconds:.1f} s"]
            for name, row in self.rows.items()
        ]

    def as_dict(self) -> dict[str, object]:
        return {
            "run": self.run,
            "folder": str(self.folder),
            "groups": {name: {**vars(row), "seconds": round(row.seconds, 3)} for name, row in self.rows.items()},
            "skipped": [{"path": path, "why": why} for path, why in self.skipped],
            "older_left_out": self.older,
            "drops": self.drops,
        }


@dataclass
class Puller:
    """One `dfo pull`. `on_progress` gets a few words as bytes arrive, `on_drop` each lost connection."""

    session: Session
    selection: Selection
    layout: Layout
    backoff: Backoff = field(default_factory=Backoff)
    silence: float = SILENCE
    on_progress: Callable[[str], None] = lambda text: None
    on_drop: Callable[[ConnectError, float], None] = lambda error, delay: None
    drops: int = 0
    _run: int | None = None
    _rows: dict[str, Row] = field(default_factory=dict)
    _mark: float = 0.0
    _done: int = 0
    _total: int = 0
    _told: float = 0.0

    def pull(self) -> Pulled:
        """Copy everything selected; what is here already and equal is not sent again.

        Raises `TransferError` (`damaged`, `pull_failed`), `PreflightError` (`disk_full`), `ConnectError` after
        several attempts that brought nothing; what had arrived stays and is used by the next `dfo pull`.
        """
        self._run = self.selection.run
        for _ in range(ROUNDS):
            manifest = self._retrying(self._manifest)
            todo = [entry for entry in manifest.files if not is_there(self._place(manifest, entry), entry)]
            self._check_space(manifest, todo)
            wrong = self._copy([Part(entry, self._place(manifest, entry)) for entry in todo])
            if not wrong:
                return self._result(manifest)
        raise TransferError(
            "damaged",
            f"{count(len(wrong), 'file')} of run {manifest.run} did not arrive as the target has them",
            why=f"after {ROUNDS} attempts the hashes still differ for {', '.join(islice(sorted(wrong), 3))}",
            fix="if the run is still writing them, pull again when it has ended; else check the disks",
        )

    def _place(self, manifest: Manifest, entry: Entry) -> Path:
        return self.layout.place(manifest.run, entry.path)

    def _result(self, manifest: Manifest) -> Pulled:
        rows: dict[str, Row] = {}
        for entry in manifest.files:
            rows.setdefault(group_of(entry.path), self._rows.get(group_of(entry.path), Row())).files += 1
        folder = self.layout.folder(manifest.run)
        return Pulled(manifest.run, folder, rows, manifest.skipped, manifest.older, self.drops)

    # --- over the wire ----------------------------------------------------------------------------------------------

    def _retrying(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                return attempt()
            except ConnectError as error:
                if not is_transient(error) or self.backoff.failures >= PATIENCE:
                    raise
                self.drops += 1
                self.on_drop(error, self.backoff.next_delay)
                self.backoff.pause()

    def _manifest(self) -> Manifest:
        chosen = self.selection
        request = {"op": "manifest", "run": self._run, "include": chosen.include, "newest": chosen.newest}
        with self.session.open("fetch", request) as records:
            for record in listen(records, silence=self.silence):
                if record is not None and record.type == "done":
                    found = _manifest_from(record.fields["result"], chosen.include)
                    # "The newest" is decided once: another one may start while we copy.
                    self._run = found.run
                    return found
        raise AssertionError("the records end with `done` or raise")

    def _copy(self, parts: Sequence[Part]) -> set[str]:
        """Fetch all parts; the paths of those that were not what the manifest said."""
        pending = {part.entry.path: part for part in parts}
        wrong: set[str] = set()
        self._mark, self._done, self._total = time.monotonic(), 0, sum(part.entry.size for part in parts)
        try:
            self._retrying(lambda: self._one_connection(pending, wrong))
        finally:
            for part in parts:
                part.close()
        return wrong

    def _one_connection(self, pending: dict[str, Part], wrong: set[str]) -> None:
        for part in list(pending.values()):
            if part.complete:
                self._finish(part, pending, wrong)
        wanted = [
            {"path": part.entry.path, "offset": part.offset, "size": part.entry.size} for part in pending.values()
        ]
        if not wanted:
            return
        self._done = self._total - sum(part.entry.size - part.offset for part in pending.values())
        with self.session.open("fetch", {"op": "bytes", "run": self._run, "files": wanted}) as records:
            for record in listen(records, silence=self.silence):
                if record is not None:
                    self._take(record, pending, wrong)
        if pending:
            raise TransferError(
                "truncated",
                f"{count(len(pending), 'file')} did not come",
                why=f"the target said it was done before `{printable(next(iter(pending)))}` was whole",
                fix="run it again with `-vv`; if it repeats, report it with that output",
            )

    def _take(self, record: Record, pending: dict[str, Part], wrong: set[str]) -> None:
        part = pending.get(str(record.fields.get("path")))
        if part is None:
            return
        if record.type == "gone":
            part.discard()
            wrong.add(pending.pop(part.entry.path).entry.path)
        elif record.type == "data":
            part.write(int(str(record.fields["offset"])), record.data)
            self._done += len(record.data)
            self.backoff.progressed()
            self._tell()
            if part.complete:
                self._finish(part, pending, wrong)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told > TELL_EVERY:
            self._told = now
            self.on_progress(f"{size(self._done)} of {size(self._total)}")

    def _finish(self, part: Part, pending: dict[str, Part], wrong: set[str]) -> None:
        del pending[part.entry.path]
        row = self._rows.setdefault(group_of(part.entry.path), Row())
        if not part.finish():
            wrong.add(part.entry.path)
            return
        now = time.monotonic()
        row.copied += 1
        row.bytes += part.entry.size
        row.seconds += now - self._mark
        self._mark = now

    def _check_space(self, manifest: Manifest, todo: Sequence[Entry]) -> None:
        place = self.layout.folder(manifest.run)
        existing = next(folder for folder in (place, *place.parents) if folder.is_dir())
        with laptop_disk(existing):
            free = shutil.disk_usage(existing).free
        need = sum(entry.size - Part(entry, self._place(manifest, entry)).offset for entry in todo)
        if need > free:
            raise PreflightError(
                "disk_full",
                f"not enough space for run {manifest.run} under `{place}`",
                why=f"{size(need)} are to be copied, {size(free)} are free on this machine",
                fix="free some space, give another folder with `--to`, or choose with `--what`",
            )


def _manifest_from(result: object, include: Sequence[str]) -> Manifest:
    """What the target says, checked: it decides nothing about where we write."""
    assert isinstance(result, Mapping)
    found: dict[str, Any] = dict(result)
    files = tuple(entry_from(item, include) for item in found["files"])
    if len({entry.path for entry in files}) < len(files):
        raise TransferError(
            "pull_failed",
            "the target's list of files names one of them twice",
            why="two versions of a file cannot both be right",
            fix="run it again with `-vv`; if it repeats, look at the target",
        )
    skipped = tuple((printable(str(item["path"])), printable(str(item["why"]))) for item in found["skipped"])
    return Manifest(int(found["run"]), str(found["state"]), files, skipped, int(found["older"]))
