"""What a run is: its states, why it ended, and what each end means for the person who started it.

    queued → preparing → warming → running → succeeded | failed | stopped
                                           ↘ lost (we cannot see it; the next contact tells the truth)

`OUTCOMES` says everything about a reason in one place; a test holds it total. The programs on the target write
states and reasons as plain text, and `RunStatus.from_dict` is where that text becomes these types.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.errors import KINDS, DfoError


class RunState(StrEnum):
    QUEUED = "queued"
    PREPARING = "preparing"
    WARMING = "warming"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        """Whether the run is over for good. `lost` is not an end: it is only what we do not know."""
        return self in {RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED}


class EndReason(StrEnum):
    FINISHED = "finished"
    EXIT_CODE = "exit_code"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    PREFLIGHT_FAILED = "preflight_failed"
    WARMUP_FAILED = "warmup_failed"
    WARMUP_DEADLINE = "warmup_deadline"
    DEADLINE = "deadline"
    STOPPED_BY_USER = "stopped_by_user"
    TERMINATED = "terminated"
    NEVER_STARTED = "never_started"
    SUPERVISOR_DIED = "supervisor_died"
    CONTAINER_STOPPED = "container_stopped"
    CONTAINER_RESTARTED = "container_restarted"
    NODE_REBOOTED = "node_rebooted"
    UNREACHABLE = "unreachable"


class Retry(StrEnum):
    """Whether starting the same thing again makes sense."""

    NO = "no"
    AFTER_FIX = "after_fix"
    RESUME = "resume"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one reason means. The texts are templates over the fields of `RunStatus.facts`.

    `kind` is the stable error kind for programs; None where nothing is wrong.
    """

    state: RunState
    exit_code: int
    kind: str | None
    retry: Retry
    what: str
    why: str
    fix: str


_LOOK = "`dfo logs {run} --stage {stage} --tail 50`"
_RESUME = "`dfo launch --resume {run}`"

OUTCOMES: dict[EndReason, Outcome] = {
    EndReason.FINISHED: Outcome(
        state=RunState.SUCCEEDED,
        exit_code=0,
        kind=None,
        retry=Retry.NO,
        what="run {run} finished",
        why="every stage ended with exit code 0",
        fix="`dfo pull {run}` brings its results home",
    ),
    EndReason.EXIT_CODE: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.AFTER_FIX,
        what="run {run} ended: {stage} failed",
        why="exit code {exit_code}{said}",
        fix=f"{_LOOK}; after the fix {_RESUME}",
    ),
    EndReason.SIGNAL: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.RESUME,
        what="run {run} ended: {stage} was killed by {signal_name}",
        why="it did not come from `dfo`, and the kernel counts no out-of-memory kill{said}",
        fix=f"{_LOOK}; go on with {_RESUME}",
    ),
    EndReason.OUT_OF_MEMORY: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.AFTER_FIX,
        what="run {run} ended: {stage} was killed, out of memory",
        why="it got SIGKILL and the kernel's count of out-of-memory kills rose by {oom_kills}",
        fix=f"give `{{target}}` more memory or lower `data.tokens_per_batch`; go on with {_RESUME}",
    ),
    EndReason.DISK_FULL: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.AFTER_FIX,
        what="run {run} ended: {stage} failed with the disk full",
        why="exit code {exit_code}, and {disk_free} bytes were free{said}",
        fix=f"free some space (`dfo releases --prune 2`), then {_RESUME}",
    ),
    EndReason.PREFLIGHT_FAILED: Outcome(
        state=RunState.FAILED,
        exit_code=5,
        kind="remote_failed",
        retry=Retry.AFTER_FIX,
        what="run {run} ended: preflight failed, training was not started",
        why="exit code {exit_code}{said}",
        fix="`dfo logs {run} --stage preflight`, then `dfo launch` again",
    ),
    EndReason.WARMUP_FAILED: Outcome(
        state=RunState.FAILED,
        exit_code=10,
        kind="warmup_failed",
        retry=Retry.AFTER_FIX,
        what="run {run} ended: warm-up failed, training was not started",
        why="exit code {exit_code}{said}",
        fix="`dfo logs {run} --stage {stage} --tail 50`; the compile cache is kept",
    ),
    EndReason.WARMUP_DEADLINE: Outcome(
        state=RunState.FAILED,
        exit_code=10,
        kind="warmup_failed",
        retry=Retry.AFTER_FIX,
        what="run {run} ended: warm-up took too long, training was not started",
        why="it was still compiling at its deadline of {warmup_timeout:g} s",
        fix="raise `launch.warmup.timeout`; what was compiled is kept, so the next one is shorter",
    ),
    EndReason.DEADLINE: Outcome(
        state=RunState.STOPPED,
        exit_code=124,
        kind="deadline",
        retry=Retry.RESUME,
        what="run {run} ended: it reached `launch.max_runtime`",
        why="it was asked to stop after {max_runtime:g} s, in stage {stage}",
        fix=f"raise `launch.max_runtime` and go on with {_RESUME}",
    ),
    EndReason.STOPPED_BY_USER: Outcome(
        state=RunState.STOPPED,
        exit_code=8,
        kind="run_stopped",
        retry=Retry.RESUME,
        what="run {run} was stopped",
        why="{stopped_by} asked for it in stage {stage}",
        fix=f"go on with {_RESUME}",
    ),
    EndReason.TERMINATED: Outcome(
        state=RunState.STOPPED,
        exit_code=8,
        kind="run_stopped",
        retry=Retry.RESUME,
        what="run {run} was ended from outside",
        why="its supervisor got SIGTERM that `dfo stop` did not send: a shutdown, or `kill`",
        fix=f"go on with {_RESUME}",
    ),
    EndReason.NEVER_STARTED: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.RESUME,
        what="run {run} never started",
        why="its folder exists but no supervisor ever reported a state",
        fix="`dfo launch` again; if it repeats, read `logs/launch.log` of the run",
    ),
    EndReason.SUPERVISOR_DIED: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.RESUME,
        what="run {run} ended: its supervisor died",
        why="{supervisor_end} and left no final state; last sign of life {updated_text}, in stage {stage}",
        fix=f"`dfo stop {{run}}` ends what may be left of it; go on with {_RESUME}",
    ),
    EndReason.CONTAINER_STOPPED: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.RESUME,
        what="run {run} ended: `{target}` was stopped",
        why="its container does not run any more, and the run was in stage {stage} a moment before",
        fix=f"`dfo deploy {{target}} --start` starts the container; go on with {_RESUME}",
    ),
    EndReason.CONTAINER_RESTARTED: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.RESUME,
        what="run {run} ended: `{target}` was restarted",
        why="it has booted anew since the run's last sign of life {updated_text}, in stage {stage}",
        fix=f"go on with {_RESUME}",
    ),
    EndReason.NODE_REBOOTED: Outcome(
        state=RunState.FAILED,
        exit_code=8,
        kind="run_failed",
        retry=Retry.RESUME,
        what="run {run} ended: the machine of `{target}` was rebooted",
        why="another kernel has booted since the run's last sign of life {updated_text}, in stage {stage}",
        fix=f"go on with {_RESUME}",
    ),
    EndReason.UNREACHABLE: Outcome(
        state=RunState.LOST,
        exit_code=8,
        kind="run_lost",
        retry=Retry.NO,
        what="run {run} is out of sight",
        why="`{target}` does not answer; the run itself goes on if its machine does",
        fix="`dfo status {run}` once `{target}` can be reached again",
    ),
}


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The truth about one run, as far as the target knows it. Times are unix seconds on the target's clock.

    `leftovers` are pids that still belong to a run whose supervisor is gone. `step` is the last `step` event of
    the core, `error` its last `error` event. `now` is the target's clock when it was asked. `unit` is the systemd unit
    that the run is; None for a process of its own.
    """

    run: int
    state: RunState
    reason: EndReason | None
    stage: str | None
    exit_code: int | None
    signal: int | None
    release: str
    devices: tuple[str, ...]
    now: float
    unit: str | None = None
    started: float | None = None
    ended: float | None = None
    updated: float | None = None
    resume_from: int | None = None
    leftovers: tuple[int, ...] = ()
    last_line: str = ""
    step: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    details: Mapping[str, Any] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunStatus:
        """Read what the remote programs report for a run; unknown keys are kept out, unknown words refused."""
        reason = data.get("reason")
        return cls(
            run=int(data["run"]),
            state=RunState(data["state"]),
            reason=None if reason is None else EndReason(reason),
            devices=tuple(data["devices"]),
            leftovers=tuple(data.get("leftovers", ())),
            stage=data.get("stage"),
            exit_code=data.get("exit_code"),
            signal=data.get("signal"),
            release=data["release"],
            now=data["now"],
            **{key: data[key] for key in _OPTIONAL if data.get(key) is not None},
        )

    @property
    def alive(self) -> bool:
        """Whether anything of the run may still be working."""
        return not self.state.ended or bool(self.leftovers)

    def facts(self, target: str) -> dict[str, object]:
        """The fields that the texts of `OUTCOMES` use."""
        said = (self.error or {}).get("what") or self.last_line
        return {
            "run": self.run,
            "target": target,
            "stage": self.stage or "launch",
            "exit_code": self.exit_code,
            "signal_name": _signal_name(self.signal),
            "said": f": {said}" if said else "",
            "updated_text": f"{duration(self.now - self.updated)} ago" if self.updated else "unknown",
            "oom_kills": 1,
            "disk_free": 0,
            "warmup_timeout": 0.0,
            "max_runtime": 0.0,
            "stopped_by": "somebody",
            "supervisor_end": _end_of_supervisor(self.details or {}),
            **(self.details or {}),
        }

    def sentence(self, target: str) -> str:
        """How it stands, in one line."""
        if self.reason is None:
            where = f" ({self.stage})" if self.stage else ""
            return f"run {self.run} is {self.state.value}{where}"
        outcome = OUTCOMES[self.reason]
        facts = self.facts(target)
        return f"{outcome.what.format_map(facts)}: {outcome.why.format_map(facts)}"

    def as_error(self, target: str) -> DfoError | None:
        """The bad end as the error to raise; None while it goes on or when all went well."""
        outcome = OUTCOMES[self.reason] if self.reason is not None else None
        if outcome is None or outcome.kind is None:
            return None
        facts = self.facts(target)
        return KINDS[outcome.kind](
            outcome.kind,
            outcome.what.format_map(facts),
            why=outcome.why.format_map(facts),
            fix=outcome.fix.format_map(facts),
            run=self.run,
            reason=str(self.reason),
            run_exit_code=self.exit_code,
            run_signal=self.signal,
            retry=str(outcome.retry),
        )

    @property
    def exit_like_run(self) -> int:
        """What `--exit-like-run` exits with: the run's own code where it has one, else that of its reason."""
        if self.reason is None:
            return 0
        if self.state is not RunState.SUCCEEDED and self.exit_code:
            return self.exit_code
        return OUTCOMES[self.reason].exit_code


_OPTIONAL = ("unit", "started", "ended", "updated", "resume_from", "last_line", "step", "error", "details")


def duration(seconds: float) -> str:
    """A length of time as people say it: `12 s`, `4 min`, `3 h 10 min`, `2 d 4 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _end_of_supervisor(details: Mapping[str, Any]) -> str:
    number = details.get("supervisor_signal")
    return "the process is gone" if number is None else f"{_signal_name(number)} ended it, says systemd; it is gone"


def _signal_name(number: int | None) -> str:
    if number is None:
        return "a signal"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
