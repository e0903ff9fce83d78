"""Who did what to the target, when: the last lines of its audit file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from orchestrator.session import Session
from orchestrator.terminal import printable

DEADLINE = 60.0
_KNOWN = frozenset({"t", "event", "by", "command"})


@dataclass(frozen=True)
class AuditEntry:
    """One line. `details`: what is particular to its event."""

    time: float
    event: str
    by: str
    details: dict[str, object]

    def row(self) -> tuple[str, str, str, str]:
        """When (local time), who, what, and the rest in words."""
        when = f"{datetime.fromtimestamp(self.time).astimezone():%Y-%m-%d %H:%M:%S}"
        rest = [f"{name} {_text(value)}" for name, value in self.details.items() if value not in (None, "", [])]
        return when, printable(self.by), self.event.replace("_", " "), printable(", ".join(rest))


def read(session: Session, *, lines: int) -> list[AuditEntry]:
    """The newest entries, oldest first."""
    answer = session.call("audit", {"lines": lines}, deadline=DEADLINE)["entries"]
    assert isinstance(answer, list)
    return [
        AuditEntry(
            time=float(entry.get("t", 0.0)),
            event=str(entry.get("event")),
            by=str(entry.get("by", "unknown")),
            details={name: value for name, value in entry.items() if name not in _KNOWN},
        )
        for entry in answer
    ]


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
