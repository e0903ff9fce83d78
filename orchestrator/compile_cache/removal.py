"""Removing caches: only what somebody named, and only what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.compile_cache.status import CacheStatus, Store
from orchestrator.errors import UsageError
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.owner import owner_for
from orchestrator.runs.launch import core_environment
from orchestrator.session import Session

DEADLINE = 600.0


@dataclass(frozen=True, kw_only=True)
class Doomed:
    """A cache that is to be removed, and why it is among them."""

    store: Store
    why: str


def choose(
    found: CacheStatus, *, digests: Sequence[str] = (), stale: bool = False, keep: int | None = None
) -> list[Doomed]:
    """The caches that are meant, each as a whole, because its files are not kept apart by warm-up.

    `digests`: those that hold these warm-ups. `stale`: those of which nothing can ever be used again with what is
    installed. `keep`: all but the `keep` most recently filled ones. Raises UsageError `usage`, `unknown_cache`.
    """
    if not digests and not stale and keep is None:
        raise UsageError(
            "usage",
            "which caches are to be removed?",
            why="nothing is ever removed without being told",
            fix="`--stale`, `--keep N`, or `--digest DIGITS` of `dfo cache status`",
        )
    doomed = [Doomed(store=found.find(digits)[0], why=f"holds warm-up {digits}") for digits in digests]
    if stale:
        doomed += _useless(found)
    if keep is not None:
        by_age = sorted(found.stores, key=_filled)
        doomed += [
            Doomed(store=store, why=f"not among the {keep} filled last")
            for store in by_age[: max(0, len(by_age) - keep)]
        ]
    return list({one.store.name: one for one in reversed(doomed)}.values())[::-1]


def remove(session: Session, target: ResolvedTarget, doomed: Sequence[Doomed], *, lock_wait: float = 0.0) -> list[str]:
    """Remove them; returns the names that are gone. Raises LockError, PreflightError, TransferError `plan_stale`."""
    request = {
        "op": "prune",
        "owner": owner_for(session, "dfo cache prune"),
        "wait_s": lock_wait,
        "stores": {one.store.name: [record.digest for record in one.store.records] for one in doomed},
        "environment": core_environment(session, target),
    }
    removed = session.call("cache", request, deadline=DEADLINE + lock_wait)["removed"]
    return [str(name) for name in removed] if isinstance(removed, list) else []


def _useless(found: CacheStatus) -> list[Doomed]:
    if found.answer is None:
        raise UsageError(
            "usage",
            "nobody can say which caches are stale",
            why="there is no release with a run configuration to ask: " + (found.complaint.strip()[-200:] or "none"),
            fix="deploy first, or name caches with `--digest`",
        )
    doomed = []
    for store in found.stores:
        worths = [found.worth(record) for record in store.records]
        if worths and all(state == "useless" for state, _ in worths):
            doomed.append(Doomed(store=store, why=worths[-1][1]))
    return doomed


def _filled(store: Store) -> float:
    """When the cache was last filled; one without a record has never been."""
    return max((record.created for record in store.records), default=0.0)
