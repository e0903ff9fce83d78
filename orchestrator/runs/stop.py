"""Stopping a run: the target asks, waits and kills; the laptop tells what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import RunError
from orchestrator.owner import owner_for
from orchestrator.remote.wire import Record
from orchestrator.runs.run import RunStatus
from orchestrator.runs.status import run_as_dict
from orchestrator.session import Session

#: For the answer beyond every grace; the program itself gives up much earlier.
DEADLINE = 120.0
#: Where only the target knows the grace.
LONGEST_GRACE = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """How the run stands now. `ended` are the pids that it had when it was asked."""

    status: RunStatus
    already: bool
    ended: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def summary(self) -> str:
        if self.already:
            return f"run {self.status.run} had ended already"
        return f"run {self.status.run}: {len(self.ended)} processes ended, none left"

    def as_dict(self, target: str) -> dict[str, object]:
        """The `result` of `dfo stop --json`."""
        return {
            "already": self.already,
            "ended": list(self.ended),
            "warnings": list(self.warnings),
            **run_as_dict(self.status, target),
        }


def stop_run(
    session: Session,
    *,
    run: int | None,
    grace: float | None,
    on_wait: Callable[[Mapping[str, object]], None] = lambda fields: None,
) -> Stopped:
    """Stop `run` (None: the newest). `grace` None: what the run was launched with; 0: kill at once.

    `on_wait` hears about once a second for how long it has `waited` and for which `stage`.

    Raises UsageError `unknown_run`, RunError `run_not_stopped` when a process could not be ended.
    """

    def tell(record: Record) -> None:
        if record.type == "waiting":
            on_wait(record.fields)

    owner = owner_for(session, "dfo stop")
    request = {"run": run, "grace": grace, "by": f"{owner['user']}@{owner['host']}", "command": owner["command"]}
    deadline = DEADLINE + 2 * (grace if grace is not None else LONGEST_GRACE)
    answer: dict[str, Any] = session.call("stop", request, deadline=deadline, on_record=tell)
    status = RunStatus.from_dict(answer["run"])
    if answer["left"]:
        raise _stuck(status.run, answer["left"], session.name)
    return Stopped(
        status=status,
        already=answer["already"],
        ended=tuple(answer["ended"]),
        warnings=tuple(f"GPU {gpu['index']} still has {gpu['used_mb']} MB in use by others" for gpu in answer["busy"]),
    )


def _stuck(run: int, pids: list[int], target: str) -> RunError:
    return RunError(
        "run_not_stopped",
        f"run {run} could not be stopped completely",
        why=f"pid {', '.join(map(str, pids))} survived SIGKILL, as a process stuck in the kernel does (disk, driver)",
        fix=f"`dfo status {run}` shows whether it is gone later; else restart `{target}`",
        run=run,
        pids=pids,
    )
