"""Where the runs of a target stand, and how to say so in a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.runs.run import RunState, RunStatus, duration
from orchestrator.session import Session

HEADER = ("TARGET", "RUN", "STATE", "STAGE", "RELEASE", "SINCE", "DEVICES", "LAST LINE")
LINE_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class TargetStatus:
    """The current release, the runs (oldest first) and the GPUs, as one look at the target found them."""

    release: str | None
    runs: tuple[RunStatus, ...]
    gpus: Sequence[Mapping[str, Any]]

    def as_dict(self, target: str) -> dict[str, object]:
        """The `result` of `dfo status --json`."""
        return {
            "target": target,
            "release": self.release,
            "runs": [run_as_dict(run, target) for run in self.runs],
            "gpus": [dict(gpu) for gpu in self.gpus],
        }


def run_as_dict(run: RunStatus, target: str) -> dict[str, object]:
    """One run for `--json`: stable keys."""
    return {
        "run": run.run,
        "state": str(run.state),
        "reason": None if run.reason is None else str(run.reason),
        "sentence": run.sentence(target),
        "stage": run.stage,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "release": run.release,
        "devices": list(run.devices),
        "started": run.started,
        "ended": run.ended,
        "updated": run.updated,
        "resume_from": run.resume_from,
        "leftovers": list(run.leftovers),
        "last_line": run.last_line,
        "step": None if run.step is None else dict(run.step),
    }


def fetch_status(session: Session, *, run: int | None = None, last: int = 5) -> TargetStatus:
    """Ask the target. `run` None: the newest `last` runs and all that are alive. Raises `unknown_run`."""
    answer: dict[str, Any] = session.call("status", {"run": run, "last": last})
    return TargetStatus(
        release=answer["release"],
        runs=tuple(RunStatus.from_dict(described) for described in answer["runs"]),
        gpus=answer["gpus"],
    )


def row(found: TargetStatus, run: RunStatus, target: str) -> list[str]:
    """One line of the table; see `HEADER`."""
    since = run.ended if run.state.ended and run.ended else run.started
    return [
        target,
        str(run.run),
        _state(run),
        run.stage or "-",
        f"…{run.release[-6:]}",
        duration(run.now - since) if since else "-",
        _devices(found, run),
        _last(run),
    ]


def details(found: TargetStatus, run: RunStatus, target: str) -> list[str]:
    """All about one run, one fact a line."""
    pairs = [
        ("run", f"{run.run} on {target}: {_state(run)}"),
        ("why", run.sentence(target) if run.reason is not None else ""),
        ("stage", run.stage or ""),
        ("release", run.release),
        ("devices", _devices(found, run)),
        ("started", _moment(run, run.started)),
        ("ended", _moment(run, run.ended)),
        ("took", duration((run.ended or run.now) - run.started) if run.started else ""),
        ("exit code", "" if run.exit_code is None else str(run.exit_code)),
        ("continues", "" if run.resume_from is None else f"run {run.resume_from}"),
        ("step", _step(run)),
        ("last line", run.last_line),
        ("left over", ", ".join(f"pid {pid}" for pid in run.leftovers)),
    ]
    return [f"{name:<10}{text}" for name, text in pairs if text]


def _state(run: RunStatus) -> str:
    if run.state is RunState.SUCCEEDED or run.reason is None:
        return str(run.state)
    return f"{run.state} ({run.reason})"


def _devices(found: TargetStatus, run: RunStatus) -> str:
    numbers = {int(device[5:]) for device in run.devices if device.startswith("cuda:")}
    gpus = [gpu for gpu in found.gpus if gpu["index"] in numbers]
    if not gpus or run.state.ended:
        return ",".join(run.devices)
    busy = [gpu["busy_percent"] for gpu in gpus if gpu["busy_percent"] is not None]
    used = sum(gpu["used_mb"] or 0 for gpu in gpus) / 1000
    percent = f" {sum(busy) / len(busy):.0f}%" if busy else ""
    return f"{len(gpus)} GPU{percent} {used:.0f} GB"


def _last(run: RunStatus) -> str:
    text = run.last_line if run.step is None or run.state.ended else _step(run)
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable if len(printable) <= LINE_WIDTH else printable[: LINE_WIDTH - 1] + "…"


def _step(run: RunStatus) -> str:
    """`step 140  loss 2.101  41.2k tok/s`, from the last `step` event of the core."""
    if run.step is None:
        return ""
    parts = [f"step {run.step.get('step')}"]
    loss, rate = run.step.get("loss"), run.step.get("tokens_per_s")
    if isinstance(loss, int | float):
        parts.append(f"loss {loss:.3f}")
    if isinstance(rate, int | float):
        parts.append(f"{rate / 1000:.1f}k tok/s" if rate >= 1000 else f"{rate:.0f} tok/s")
    return "  ".join(parts)


def _moment(run: RunStatus, when: float | None) -> str:
    if when is None:
        return ""
    local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    return f"{local} ({duration(run.now - when)} ago)"
