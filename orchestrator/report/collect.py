"""What a report is made from: the files of a run, read with suspicion.

They come from the target. A value of the wrong type, or one that no measurement can have, counts as absent.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.runs.pull import Puller
from orchestrator.runs.run import RunStatus
from orchestrator.runs.selection import Layout, Selection
from orchestrator.runs.status import fetch_status
from orchestrator.session import Session

#: What is larger is no measurement.
LARGEST = 1e18

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What was read of one run; empty where a file is missing or damaged."""

    status: RunStatus
    events: Sequence[Json] = ()
    stages: Sequence[Json] = ()
    evaluation: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)

    def of(self, name: str) -> list[Json]:
        """The events of one name, in order."""
        return [event for event in self.events if event.get("event") == name]


def collect(session: Session, run: int | None) -> RunFiles:
    """Pull what a report needs. Raises what `Puller.pull` raises."""
    with tempfile.TemporaryDirectory(prefix="dfo-report-") as folder:
        place = Path(folder)
        layout = Layout(target=session.name, project=place, to=place)
        pulled = Puller(session=session, selection=Selection.of(run, "report", ()), layout=layout).pull()
        return read_files(place, fetch_status(session, run=pulled.run).runs[0])


def read_files(folder: Path, status: RunStatus) -> RunFiles:
    """A pulled run (`dfo pull --what report`)."""
    evaluation = _lines(folder / "evaluation.json", whole=True)
    return RunFiles(
        status=status,
        events=_lines(folder / "events.jsonl"),
        stages=_lines(folder / "stages.jsonl"),
        evaluation=evaluation[0] if evaluation else {},
        config=_config(folder / "run.yaml"),
    )


def number(data: Json, key: str) -> float | None:
    """A number that a measurement can be, else None: no NaN, no infinity, nothing that a chart cannot scale."""
    value = data.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return value if good else None


def numbers(value: object) -> list[float]:
    """A list of finite numbers; empty if anything else is among them."""
    items = value if isinstance(value, list) else []
    found = [item for item in items if number({"": item}, "") is not None]
    return found if len(found) == len(items) else []


def shares(value: object) -> list[float]:
    """A list of numbers from 0 to 1; empty if anything else is among them."""
    found = numbers(value)
    return found if all(0 <= share <= 1 for share in found) else []


def text_at(data: Json, *path: str) -> str | None:
    value: object = data
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None


def mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def mappings(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _lines(path: Path, *, whole: bool = False) -> list[Json]:
    """The objects of a JSON lines file (or of a file that is one); a line torn by a kill is skipped."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    found: list[Json] = []
    for line in [text] if whole else text.split("\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _config(path: Path) -> Json:
    try:
        return mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
