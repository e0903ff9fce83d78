"""The runbook lines of one remote transaction, from the records it sends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.remote.wire import Record


class RemoteSteps:
    """Shows a step from its record until the next one. Steps that are not in `details` belong to the one before."""

    def __init__(self, console: Console, details: Mapping[str, str]) -> None:
        self._console = console
        self._details = details
        self._open = ExitStack()

    def __enter__(self) -> RemoteSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def __call__(self, record: Record) -> None:
        name = str(record.fields.get("name"))
        if record.type == "step" and name in self._details:
            self._open.close()
            self._open.enter_context(self._console.step(name)).detail = self._details[name]
        elif record.type == "note":
            self._console.say(f"  {'note':<10}{record.fields.get('text')}")
        elif record.type == "waiting":
            show_waiting(self._console, record)
        self._console.debug(f"    {record.fields}", level=2)


def show_waiting(console: Console, record: Record) -> None:
    """Who has the lock that we wait for."""
    holder = record.fields.get("holder")
    if record.type == "waiting" and isinstance(holder, dict):
        who = f"{holder.get('user')}@{holder.get('host')}"
        console.say(f"  {'lock':<10}held by {who} (`{holder.get('command')}`), waiting")
