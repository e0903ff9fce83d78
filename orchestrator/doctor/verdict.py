"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from orchestrator.doctor.facts import Missing

T = TypeVar("T")


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """`saw` is a measured fact, or for `skipped` the reason; `fix` is there for `warning` and `failed`."""

    status: Status
    saw: str
    fix: str | None = None


def ok(saw: str) -> Verdict:
    return Verdict(Status.OK, saw)


def warning(saw: str, fix: str) -> Verdict:
    return Verdict(Status.WARNING, saw, fix)


def failed(saw: str, fix: str) -> Verdict:
    return Verdict(Status.FAILED, saw, fix)


def skipped(why: str) -> Verdict:
    return Verdict(Status.SKIPPED, why)


#: The checks of one group by name, all over the same kind of facts.
Checks = Sequence[tuple[str, Callable[[T], Verdict]]]


@dataclass(frozen=True)
class Finding:
    """One check's verdict. `group`: `laptop`, `hop root@pve1`, `node`, `container`, `gpu` or `api`."""

    group: str
    name: str
    verdict: Verdict

    @property
    def status(self) -> Status:
        return self.verdict.status

    def as_dict(self) -> dict[str, object]:
        return {
            "group": self.group,
            "check": self.name,
            "status": str(self.status),
            "saw": self.verdict.saw,
            "fix": self.verdict.fix,
        }


def judge(group: str, checks: Checks[T], facts: T | Missing) -> list[Finding]:
    """Every check of a group; all are skipped where there is nothing to judge."""
    if isinstance(facts, Missing):
        return [Finding(group, name, skipped(facts.why)) for name, _ in checks]
    return [Finding(group, name, check(facts)) for name, check in checks]
