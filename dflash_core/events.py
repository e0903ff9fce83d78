"""What happened, as JSON lines a program can read and one line a person can read.

Every line is one object `{"v": 1, "t": <unix seconds>, "event": <name>, ...}`. The file is append-only: a run
that is killed leaves at most one torn last line, and the next process that opens the file ends that line first,
so a reader that skips unparsable lines loses nothing that was reported.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

SCHEMA_VERSION = 1


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, value: float, step: int) -> object: ...

    def close(self) -> None: ...


class EventLog:
    """Appends events to `path`; safe to call from any thread, flushed line by line.

    `tensorboard`: folder for TensorBoard scalars of `step` and `eval` events; ignored when TensorBoard is not
    installed. `path=None` keeps nothing and is for library use and tests.
    """

    def __init__(self, path: Path | None, *, tensorboard: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._file = _open_for_append(path) if path is not None else None
        self._scalars = _scalar_writer(tensorboard) if tensorboard is not None else None

    def emit(self, event: str, **fields: object) -> None:
        """Write one event; non-finite numbers become null because JSON has no spelling for them."""
        record = {"v": SCHEMA_VERSION, "t": round(time.time(), 3), "event": event}
        safe = {name: json_safe(value) for name, value in fields.items()}
        line = json.dumps(record | safe, ensure_ascii=False, allow_nan=False)
        with self._lock:
            if self._file is not None and not self._file.closed:
                self._file.write(line + "\n")
                self._file.flush()
            if self._scalars is not None and event in {"step", "eval"}:
                self._write_scalars(event, fields)

    def _write_scalars(self, event: str, fields: Mapping[str, object]) -> None:
        assert self._scalars is not None
        step = fields.get("step")
        if not isinstance(step, int):
            return
        for name, value in fields.items():
            parts = (
                {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
            )
            for tag, part in parts.items():
                if tag != "step" and isinstance(part, int | float) and math.isfinite(part):
                    self._scalars.add_scalar(f"{event}/{tag}", float(part), step)

    def close(self) -> None:
        """Close the file and the TensorBoard writer; later events are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            if self._scalars is not None:
                self._scalars.close()
                self._scalars = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in order, skipping a line torn by a kill."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def progress_line(
    *,
    step: int,
    last_step: int,
    loss: float,
    accept_length: float,
    lr: float,
    tokens_per_s: float,
    eta_s: float,
    estimated: bool = False,
) -> str:
    """One plain line for a person, for example `step 120/800  loss 2.114  accept 1.82  ...  eta 6 min`.

    `estimated`: `last_step` is an estimate, because time ends the run; shown as `120/~800`.
    """
    rate = f"{lr:.1e}".replace("e-0", "e-")
    return (
        f"step {step}/{'~' if estimated else ''}{last_step}  loss {loss:.3f}  accept {accept_length:.2f}  lr {rate}  "
        f"{human_count(tokens_per_s)} tok/s  eta {human_duration(eta_s)}"
    )


def human_count(value: float) -> str:
    """`950`, `41.2k`, `3.0M`."""
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / divisor:.1f}{suffix}" if suffix else f"{value:.0f}"
    return f"{value / 1e9:.1f}G"


def human_duration(seconds: float) -> str:
    """`45 s`, `6 min`, `2 h 05 min`, `3 d 4 h`; `?` when unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def _open_for_append(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = False
    if path.exists() and path.stat().st_size > 0:
        with path.open("rb") as existing:
            existing.seek(-1, 2)
            torn = existing.read(1) != b"\n"
    handle = path.open("a", encoding="utf-8")
    if torn:
        handle.write("\n")
    return handle


def _scalar_writer(folder: Path) -> _ScalarWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def json_safe(value: object) -> object:
    """What JSON can say of a value: floats rounded to 7 digits, null for those that are not finite, paths as text."""
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [json_safe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"an event cannot carry a {type(value).__name__}")
