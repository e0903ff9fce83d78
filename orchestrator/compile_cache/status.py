"""The caches of a target, and what each recorded warm-up is worth for what is deployed and installed there."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.environment.caches import INSTALLED, CacheRecord, Installed, gone, gpu_models
from orchestrator.errors import PreflightError, UsageError
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.runs.launch import core_environment
from orchestrator.runs.run_config import read_run_config
from orchestrator.session import Session, unreadable
from orchestrator.terminal import printable
from orchestrator.words import ago, size

#: Importing torch from a cold disk is what takes long.
DEADLINE = 300.0
HEADER = ("CACHE", "SIZE", "WARM-UP", "MADE", "TOOK", "STATE")
#: Where these are set by hand, the cache is not where we look for it.
PLACES = ("DFLASH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

State = Literal["valid", "stale", "useless", "unknown"]


class _Answer(BaseModel):
    # What a target says is input from outside; newer programs may say more than we know.
    model_config = ConfigDict(frozen=True, strict=True)


class Store(_Answer):
    """One cache: a folder for one set of compilers, with the records of its warm-ups, oldest first."""

    name: str
    path: str
    bytes: int
    files: int
    records: list[CacheRecord]


class Core(_Answer):
    """What the core of the release says about the run configuration. `records`: what differs from each of them."""

    state: Literal["valid", "stale", "missing"]
    changes: list[str]
    compiles: bool
    folder: str
    digest: str
    fingerprint: dict[str, Any]
    records: dict[str, list[str]]

    @property
    def installed(self) -> Installed:
        """As far as the fingerprint of this configuration tells: a run on CPUs says nothing about GPUs."""
        versions = {name: self.fingerprint.get(name) for name in INSTALLED}
        return Installed(
            versions={name: None if version is None else str(version) for name, version in versions.items()},
            gpus=frozenset(gpu_models(self.fingerprint)) or None,
        )


class CacheStatus(_Answer):
    """`core` is None when nothing is deployed, there is no run configuration, or (`complaint`) it cannot answer."""

    release: str | None
    answer: Core | None
    complaint: str
    stores: list[Store]
    time: float

    def worth(self, record: CacheRecord) -> tuple[State, str]:
        """What a record is worth now, and why not more: `useless` with what is installed, `stale` for this code."""
        if self.answer is None:
            return "unknown", ""
        if lost := gone(record, self.answer.installed):
            return "useless", "; ".join(lost)
        changes = self.answer.records.get(record.digest)
        if record.digest == self.answer.digest:
            changes = self.answer.changes  # which also knows of files that the cache has lost
        if changes is None:
            return "unknown", ""
        return ("stale", printable("; ".join(changes))) if changes else ("valid", "")

    def find(self, digits: str) -> tuple[Store, CacheRecord]:
        """The record whose digest begins so, and its cache. Raises UsageError `unknown_cache`."""
        found = [(s, r) for s in self.stores for r in s.records if digits and r.digest.startswith(digits.lower())]
        if len({record.digest for _, record in found}) == 1:
            return found[-1]
        known = ", ".join(record.name for store in self.stores for record in store.records)
        raise UsageError(
            "unknown_cache",
            f"which warm-up is `{digits}`?",
            why=f"{len(found)} digests begin so" if found else f"the target has {known or 'none'}",
            fix="`dfo cache status` lists them",
        )

    def live(self) -> Store | None:
        """The cache that the current release uses."""
        folder = None if self.answer is None else self.answer.folder
        return next((store for store in self.stores if folder == f"{store.path}/inductor"), None)

    def as_dict(self) -> dict[str, object]:
        live = self.live()
        return {
            "release": self.release,
            "state": None if self.answer is None else self.answer.state,
            "changes": [] if self.answer is None else self.answer.changes,
            "compiles": None if self.answer is None else self.answer.compiles,
            "live": None if live is None else live.name,
            "stores": [
                {**store.model_dump(exclude={"records"}), "records": [self._record(r) for r in store.records]}
                for store in self.stores
            ],
        }

    def _record(self, record: CacheRecord) -> dict[str, object]:
        state, why = self.worth(record)
        return {**record.model_dump(), "state": state, "why": why}


def fetch(session: Session, target: ResolvedTarget) -> CacheStatus:
    """Ask the target, with its run configuration if it has one. Raises PreflightError, UsageError `config_invalid`."""
    refuse_other_places(target)
    config = None if target.launch.config is None else read_run_config(target).text
    request = {"op": "status", "config": config, "environment": core_environment(session, target)}
    try:
        return CacheStatus.model_validate(session.call("cache", request, deadline=DEADLINE))
    except ValidationError as error:
        raise unreadable(f"what `{session.name}` says about its caches", error) from error


def refuse_other_places(target: ResolvedTarget) -> None:
    """A cache that the inventory has moved is its owner's to look after. Raises PreflightError `cache_elsewhere`."""
    if moved := [name for name in PLACES if name in target.env]:
        raise PreflightError(
            "cache_elsewhere",
            f"the compile cache of `{target.name}` is not in its usual place",
            why=f"`env` sets {' and '.join(moved)}",
            fix="remove it from `env`, or look after that folder yourself",
        )


def rows(found: CacheStatus) -> list[list[str]]:
    """One line per warm-up below `HEADER`, newest first; the first of a cache names it."""
    lines = []
    for store in found.stores:
        head = [printable(store.name), size(store.bytes)]
        for record in reversed(store.records):
            state, why = found.worth(record)
            made, took = f"{ago(found.time - record.created)} ago", f"{record.seconds:.0f} s"
            lines.append([*head, record.name, made, took, f"{state}: {why}" if why else state])
            head = ["", ""]
        if not store.records:
            lines.append([*head, "-", "-", "-", "no warm-up is recorded"])
    return lines


def sentence(found: CacheStatus) -> str:
    """What the next launch will find."""
    answer = found.answer
    if found.release is None:
        return "nothing is deployed, so nothing can be said about the next launch"
    if answer is None:
        return f"the release cannot say what it needs: {_last(found.complaint)}"
    if not answer.compiles:
        return "the run configuration compiles nothing"
    if answer.state == "stale":
        return f"the next launch compiles again: {printable('; '.join(answer.changes))}"
    return {"valid": "the next launch is warm", "missing": "the next launch is cold"}[answer.state]


def _last(complaint: str) -> str:
    lines = complaint.strip().splitlines()
    return printable(lines[-1])[:200] if lines else "the target has no `launch.config`"
