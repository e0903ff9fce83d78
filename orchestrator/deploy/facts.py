"""What a plan needs to know about the target: one remote call, one typed answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.deploy.sources import Entry
from orchestrator.errors import PreflightError
from orchestrator.remote.wire import Record
from orchestrator.session import Session
from orchestrator.words import count, size

DEADLINE = 120.0


class _Fact(BaseModel):
    # Input from outside, but newer programs may say more than we know.
    model_config = ConfigDict(frozen=True, strict=True)


class Python(_Fact):
    version: tuple[int, int, int]
    implementation: str
    executable: str

    @property
    def minor(self) -> tuple[int, int]:
        return self.version[:2]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


class Root(_Fact):
    """Space and rights at `place`: the root folder, or the nearest folder above it that exists."""

    exists: bool
    place: str
    is_folder: bool
    current_is_link: bool
    writable: bool
    read_only: bool
    free_bytes: int
    free_inodes: int | None


class Release(_Fact):
    id: str
    content: str | None
    files: int
    bytes: int
    created: float | None
    by: str | None
    python: str | None


class Lock(_Fact):
    """Who holds the lock. `alive` is false when the holder is gone and the lock may be taken over."""

    user: str | None = None
    host: str | None = None
    command: str | None = None
    message: str | None = None
    manual: bool = False
    started: float | None = None
    expires: float | None = None
    age_s: float
    beat_age_s: float
    alive: bool

    @property
    def holder(self) -> str:
        return f"{self.user or 'somebody'}@{self.host or 'an unknown host'}"


class LiveRun(_Fact):
    run: int
    state: str
    release: str
    devices: list[str]


class Gpu(_Fact):
    index: int
    name: str
    used_mb: int | None
    total_mb: int | None


class Modules(_Fact):
    """`missing`: module → why it cannot be imported. `versions`: of installed packages."""

    missing: dict[str, str]
    versions: dict[str, str]


class Facts(_Fact):
    """`damaged`: release → files that are no longer as deployed, for the current release and for the ones with the
    content that was asked about. `parsed`: path → None, or where the target's Python cannot parse the file.
    `lock_error`: what to say to somebody who needs the lock, when it is held. `time` is the target's clock.
    `fingerprint` changes when a plan made from these facts no longer holds.
    """

    v: Literal[1]
    time: float
    python: Python
    os: str
    init: str | None
    root: Root
    lock: Lock | None
    lock_error: dict[str, Any] | None
    leftovers: list[str]
    runs: list[LiveRun]
    switches: list[tuple[str, str]]
    modules: Modules
    parsed: dict[str, tuple[int, int, str] | None]
    gpus: list[Gpu] | None
    releases: list[Release]
    current: str | None
    current_files: dict[str, Entry]
    damaged: dict[str, list[str]]
    fingerprint: str

    def summary(self) -> str:
        """One line: system, Python, space, GPUs, runs."""
        gpus = "" if self.gpus is None else f", {count(len(self.gpus), 'GPU')}"
        return (
            f"{self.os}, {self.init or 'unknown init'}, Python {self.python}, {size(self.root.free_bytes)} free"
            f"{gpus}, {count(len(self.runs), 'live run')}"
        )


def gather(
    session: Session,
    owner: Mapping[str, object],
    *,
    content: str | None = None,
    modules: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    parse: Mapping[str, bytes] | None = None,
    gpus: bool = False,
    lock_wait: float = 0.0,
    on_record: Callable[[Record], None] | None = None,
) -> Facts:
    """Ask the target. Changes nothing there.

    `owner`: who asks (`owner.owner_for`). `content`: identity of the release that is about to be deployed.
    `modules`: dotted names to look for, by a Python with this `environment` added. `parse`: sources that only the
    target's Python can judge. `lock_wait`: seconds to wait for a running command that holds the lock, before the
    facts are taken.
    """
    request = {
        "owner": owner,
        "content": content,
        "modules": sorted(modules),
        "environment": dict(environment or {}),
        "parse": {path: base64.b64encode(data).decode() for path, data in (parse or {}).items()},
        "gpus": gpus,
        "wait_s": lock_wait,
    }
    answer = session.call("facts", request, deadline=DEADLINE + lock_wait, on_record=on_record)
    try:
        return Facts.model_validate_json(json.dumps(answer))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PreflightError(
            "remote_failed",
            f"the facts of `{session.name}` make no sense",
            why=f"`{place}`: {first['msg']}",
            fix="run it again; if it repeats, report it with `--json` output",
        ) from error
