"""Where the runs of a target stand, and how to say so in a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import DfoError
from orchestrator.runs.reconnect import listen
from orchestrator.runs.run import RunState, RunStatus, duration
from orchestrator.session import Session
from orchestrator.words import token_rate

HEADER = ("TARGET", "RUN", "STATE", "STAGE", "RELEASE", "SINCE", "DEVICES", "LAST LINE")
#: Of the table over several targets.
OVERVIEW = ("TARGET", "RUN", "STATE", "STAGE", "SINCE", "DEVICES", "RATE", "WAIT", "IDLE", "LAST LINE")
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
        "unit": run.unit,
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
    return _read(session.call("status", {"run": run, "last": last}))


def watch_status(session: Session, *, every: float) -> Iterator[TargetStatus]:
    """The newest run and all that are alive, every so many seconds, through one program: a call of `pct` costs the node
    half a second. Goes on until it raises: ConnectError also for a link that fell silent.
    """
    with session.open("status", {"last": 1, "every": every}) as records:
        for record in listen(records):
            if record is not None and record.type == "status":
                yield _read(record.fields)


def _read(answer: Mapping[str, Any]) -> TargetStatus:
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


def overview(found: TargetStatus | None, target: str) -> list[list[str]]:
    """The lines of one target in the table over several, see `OVERVIEW`; `found` None: not looked at yet.

    What is alive, else the newest run. Rate, wait for features and idle share of the devices are of the last step.
    """
    if found is None or not found.runs:
        return [[target, *["-"] * 8, "…" if found is None else "nothing was launched yet"]]
    chosen = [run for run in found.runs if run.alive] or found.runs[-1:]
    return [_overview_row(found, run, target) for run in chosen]


def trouble(error: DfoError, target: str) -> list[str]:
    """The line of a target that could not be asked."""
    return [target, "-", error.kind, *["-"] * 6, _short(error.what)]


def _overview_row(found: TargetStatus, run: RunStatus, target: str) -> list[str]:
    _, number, state, stage, _, since, devices, _ = row(found, run, target)
    step = {} if run.step is None or run.state.ended else run.step
    rate, wait, idle = (step.get(key) for key in ("tokens_per_s", "queue_wait_s", "device_idle"))
    shares = [share for share in idle.values() if isinstance(share, int | float)] if isinstance(idle, Mapping) else []
    return [
        *(target, number, state, stage, since, devices),
        token_rate(rate) if isinstance(rate, int | float) else "-",
        f"{wait:.2g} s" if isinstance(wait, int | float) else "-",
        f"{sum(shares) / len(shares):.0%}" if shares else "-",
        _short(run.last_line),
    ]


def details(found: TargetStatus, run: RunStatus, target: str) -> list[str]:
    """All about one run, one fact a line."""
    pairs = [
        ("run", f"{run.run} on {target}: {_state(run)}"),
        ("why", run.sentence(target) if run.reason is not None else ""),
        ("stage", run.stage or ""),
        ("release", run.release),
        ("devices", _devices(found, run)),
        ("runs as", _mechanism(run)),
        ("started", _moment(run, run.started)),
        ("ended", _moment(run, run.ended)),
        ("took", duration((run.ended or run.now) - run.started) if run.started else ""),
        ("exit code", "" if run.exit_code is None else str(run.exit_code)),
        ("continues", "" if run.resume_from is None else f"run {run.resume_from}"),
        ("step", _step(run)),
        ("rates", _rates(run)),
        ("compiles", _compiles(run)),
        ("last line", run.last_line),
        ("left over", ", ".join(f"pid {pid}" for pid in run.leftovers)),
    ]
    return [f"{name:<10}{text}" for name, text in pairs if text]


def _mechanism(run: RunStatus) -> str:
    if run.started is None:
        return ""
    return f"systemd unit {run.unit}" if run.unit else "a process of its own"


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
    return _short(run.last_line if run.step is None or run.state.ended else _step(run))


def _short(text: str) -> str:
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
        parts.append(token_rate(rate))
    return "  ".join(parts)


def _rates(run: RunStatus) -> str:
    """`targets 41.2k tok/s, drafters 41.2k tok/s, queue wait 0.02 s, idle cuda:0 12%, cuda:5 3%`."""
    step = run.step or {}
    roles = {role: step.get(f"{role}_tokens_per_s") for role in ("targets", "drafters")}
    parts = [f"{role} {token_rate(rate)}" for role, rate in roles.items() if isinstance(rate, int | float)]
    wait, idle = step.get("queue_wait_s"), step.get("device_idle")
    if isinstance(wait, int | float):
        parts.append(f"queue wait {wait:.2g} s")
    shares = idle.items() if isinstance(idle, Mapping) else ()
    listed = [f"{device} {share:.0%}" for device, share in shares if isinstance(share, int | float)]
    return ", ".join([*parts, *([f"idle {', '.join(listed)}"] if listed else [])])


def _compiles(run: RunStatus) -> str:
    """Said only when something is wrong."""
    late = (run.step or {}).get("compiles")
    return f"{late} after the warm-up: some shape was not warmed up" if isinstance(late, int) and late > 0 else ""


def _moment(run: RunStatus, when: float | None) -> str:
    if when is None:
        return ""
    local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    return f"{local} ({duration(run.now - when)} ago)"
