"""What a run achieved, as one JSON object: from its events, its evaluation and its stages.

Everything comes from the target and is read with suspicion: a value of the wrong type counts as absent, and what is
absent is named in `missing` instead of stopping the report. A run that failed half-way still has a report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.environment.snapshot import Snapshot
from orchestrator.errors import RunError
from orchestrator.report.collect import Json, RunFiles, mapping, mappings, number, numbers, shares, text_at
from orchestrator.runs.part import laptop_disk
from orchestrator.runs.run import RunStatus

SCHEMA = "dfo-report/1"
VERSION = 1
#: Numbers of evaluation.json, and how a person calls what is missing without them.
HEADLINES = {
    "accept_length_untrained": "the accept length of the untrained drafter",
    "accept_length_trained": "the accept length of the trained drafter",
    "tau": "τ, the tokens per verification cycle of speculative decoding",
    "plain_tokens_per_s": "the speed of plain decoding",
    "speculative_tokens_per_s": "the speed of speculative decoding",
}


def build(
    files: RunFiles,
    *,
    target: str,
    now: float,
    snapshot: Snapshot | None = None,
    clock_from: float | None = None,
) -> dict[str, Any]:
    """The report. `now` and `clock_from` are unix seconds; `seconds` is the time between them, else the run's own.

    Raises RunError `report_incomplete` when the run left nothing to report.
    """
    steps, evals = _by_step(files.of("step")), _by_step(files.of("eval"))
    if not (steps or evals or files.evaluation):
        raise RunError(
            "report_incomplete",
            f"run {files.status.run} has nothing to report yet",
            why=f"no step, no evaluation; {files.status.sentence(target)}",
            fix=f"`dfo logs {files.status.run} -f`, and report when it has trained",
        )
    return {
        "schema": SCHEMA,
        "v": VERSION,
        "written": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        "target": target,
        **_run(files.status, target),
        **_headlines(files.evaluation, evals),
        "train_steps": _train_steps(files.evaluation, steps),
        "seconds": _seconds(files.status, now, clock_from),
        "model": text_at(files.config, "target", "gguf_file") or text_at(files.config, "target", "path"),
        **_curves(steps, evals),
        "throughput": _throughput(list(steps.values())),
        **_evaluation(files.evaluation, evals),
        "stages": stage_times(files.stages),
        "environment": snapshot.as_dict() if snapshot is not None else None,
    }


def missing(report: Json) -> list[str]:
    """What a whole report would have and this one has not, in words."""
    absent = [words for key, words in HEADLINES.items() if report[key] is None]
    for key, words in {
        "lossless": "whether speculative and plain decoding gave the same text",
        "loss": "the loss over time",
        "acceptance_by_offset": "the acceptance by block offset",
        "prompts": "the held-out prompts and their answers",
        "data": "the counts and hashes of the training and held-out sets",
        "stages": "how long each stage took",
        "environment": "the environment (`dfo env-snapshot --to FILE`, then `--snapshot FILE`)",
    }.items():
        value = report[key].values() if key == "data" else report[key]
        if value is None or (key != "lossless" and not any(value)):
            absent.append(words)
    return absent


def write(report: Json, page: str, folder: Path) -> tuple[Path, Path]:
    """report.json and report.html in `folder`, each replaced in one go."""
    # A lone surrogate is no UTF-8, but its escape is JSON.
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    written = []
    for name, body in (("report.json", text), ("report.html", page)):
        path = folder / name
        with laptop_disk(path):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.write_bytes(body.encode("utf-8", "backslashreplace"))
            temporary.replace(path)
        written.append(path)
    return written[0], written[1]


# --- parts of the report -----------------------------------------------------------------------------------------


def _by_step(events: Sequence[Json]) -> dict[int, Json]:
    """By step, in order; of a step that was done again after a resume, the last."""
    found = {int(step): event for event in events if (step := number(event, "step")) is not None}
    return dict(sorted(found.items()))


def _headlines(evaluation: Json, evals: Mapping[int, Json]) -> dict[str, float | bool | None]:
    found = {key: number(evaluation, key) for key in HEADLINES}
    # What the evaluation stage did not get to was measured while training, on the same held-out blocks.
    if found["accept_length_untrained"] is None and 0 in evals:
        found["accept_length_untrained"] = number(evals[0], "accept_length")
    if found["accept_length_trained"] is None and any(evals):
        found["accept_length_trained"] = number(evals[max(evals)], "accept_length")
    plain, speculative = found["plain_tokens_per_s"], found["speculative_tokens_per_s"]
    lossless = evaluation.get("lossless")
    return {
        **found,
        "lossless": lossless if isinstance(lossless, bool) else None,
        "speedup": speculative / plain if plain and speculative else None,
    }


def _curves(steps: Mapping[int, Json], evals: Mapping[int, Json]) -> dict[str, object]:
    return {
        "loss": [{"step": step, "loss": number(event, "loss")} for step, event in steps.items()],
        "accept_length": [
            {
                "step": step,
                "train": number(steps.get(step, {}), "accept_length"),
                "held_out": number(evals.get(step, {}), "accept_length"),
            }
            for step in sorted({*steps, *evals})
        ],
    }


def _throughput(steps: Sequence[Json]) -> dict[str, Any]:
    """Means over the run, without its first step, which pays for what happens once."""
    usual = steps[1:] or steps
    names = ("targets_tokens_per_s", "drafters_tokens_per_s", "queue_wait_s")
    shares_of = [mapping(step.get("device_idle")) for step in usual]
    devices = dict.fromkeys(device for shares_ in shares_of for device in shares_)
    return {
        **{name: _mean([number(step, name) for step in usual]) for name in names},
        "device_idle": {device: _mean([number(found, device) for found in shares_of]) for device in devices},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _evaluation(evaluation: Json, evals: Mapping[int, Json]) -> dict[str, object]:
    after, before = (shares(evaluation.get(f"acceptance_by_offset{which}")) for which in ("", "_untrained"))
    return {
        "acceptance_by_offset": after or _offsets(evals, last=True),
        "acceptance_by_offset_untrained": before or _offsets(evals, last=False),
        "agreed_by_offset": shares(evaluation.get("agreed_by_offset")),
        "settings": {
            **{key: number(evaluation, key) for key in ("block_size", "max_new_tokens", "temperature")},
            "dtype": text_at(evaluation, "dtype"),
        },
        "prompts": [_prompt(item, place) for place, item in enumerate(mappings(evaluation.get("prompts")))],
        "data": {name: _data_set(evaluation, name) for name in ("train", "heldout")},
    }


def _offsets(evals: Mapping[int, Json], *, last: bool) -> list[float]:
    if not evals or (not last and 0 not in evals):
        return []
    return shares(evals[max(evals) if last else 0].get("acceptance_by_offset"))


def _run(status: RunStatus, target: str) -> dict[str, object]:
    return {
        "run": status.run,
        "release": status.release,
        "state": str(status.state),
        "reason": None if status.reason is None else str(status.reason),
        "sentence": status.sentence(target),
        "devices": list(status.devices),
        "started": status.started,
        "ended": status.ended,
    }


def _train_steps(evaluation: Json, steps: Mapping[int, Json]) -> int | None:
    done = number(evaluation, "train_steps")
    return int(done) if done is not None else max(steps, default=None)


def _seconds(status: RunStatus, now: float, clock_from: float | None) -> float | None:
    if clock_from is not None:
        return round(now - clock_from, 3)
    if status.started is None:
        return None
    return round((status.ended or status.now) - status.started, 3)


def _prompt(item: Json, place: int) -> dict[str, Any]:
    pieces, identical = item.get("pieces"), item.get("identical")
    tokens = number(item, "tokens")
    return {
        "id": number(item, "id") or place + 1,
        "prompt": text_at(item, "prompt"),
        "text": text_at(item, "text"),
        "tokens": int(tokens) if tokens is not None else None,
        "tau": number(item, "tau"),
        "identical": identical if isinstance(identical, bool) else None,
        "accepted": [int(count) for count in numbers(item.get("accepted"))],
        "pieces": pieces if isinstance(pieces, list) and all(isinstance(piece, str) for piece in pieces) else [],
        "plain_seconds": number(item, "plain_seconds"),
        "speculative_seconds": number(item, "speculative_seconds"),
    }


def _data_set(evaluation: Json, name: str) -> dict[str, object] | None:
    found = mapping(mapping(evaluation.get("data")).get(name))
    return {"samples": number(found, "samples"), "sha256": text_at(found, "sha256")} if found else None


def stage_times(lines: Sequence[Json]) -> list[dict[str, Any]]:
    """Name, seconds and exit code of each stage in the order they began; None where it never ended."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        stage, moment = text_at(line, "stage"), number(line, "t")
        if stage is None or moment is None:
            continue
        if line.get("event") == "begin":
            found[stage] = {"stage": stage, "began": moment, "seconds": None, "exit_code": None}
        elif line.get("event") == "end" and stage in found:
            found[stage]["seconds"] = round(moment - found[stage]["began"], 3)
            found[stage]["exit_code"] = number(line, "exit_code")
    return list(found.values())
