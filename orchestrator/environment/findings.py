"""One line of `dfo env-diff`: what differs or is wrong, and how much that hurts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How much a finding hurts; higher is worse. `mark` is how it prints."""

    NOTE = 0
    RISK = 1
    COLD = 2
    BROKEN = 3

    @property
    def mark(self) -> str:
        return {0: "~", 1: "?", 2: "!", 3: "x"}[self.value]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `dfo env-diff`. `before` and `after` are None where there is nothing."""

    severity: Severity
    what: str
    before: str | None
    after: str | None
    consequence: str

    @property
    def change(self) -> str:
        if self.before is None:
            return f"{self.after}"
        return f"{self.before} -> {self.after if self.after is not None else 'gone'}"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "severity": self.severity.name.lower()}


def changed(rows: list[tuple[Severity, str, object, object, str]]) -> Iterator[Finding]:
    """A finding for each row (severity, what, before, now, consequence) whose two values differ."""
    for severity, what, was, is_, consequence in rows:
        if was != is_:
            shown = [None if value is None else str(value) for value in (was, is_)]
            yield Finding(severity, what, shown[0], shown[1], consequence)
