import json
import threading
from pathlib import Path

import pytest

from dflash_core.events import EventLog, human_count, human_duration, progress_line, read_events


def test_every_line_is_one_versioned_object(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path) as log:
        log.emit("step", step=3, loss=1.5, ids=[1, 2], nested={"a": float("nan")}, where=Path("x/y"), none=None)
    [line] = path.read_text().splitlines()
    record = json.loads(line)
    assert record.pop("t") > 1.6e9
    assert record == {
        "v": 1,
        "event": "step",
        "step": 3,
        "loss": 1.5,
        "ids": [1, 2],
        "nested": {"a": None},
        "where": "x/y",
        "none": None,
    }


def test_events_of_many_threads_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        threads = [
            threading.Thread(target=lambda n=n: [log.emit("batch", worker=n, text="x" * 500) for _ in range(50)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len([e for e in read_events(path) if e["worker"] == n]) for n in range(4)] == [50] * 4


def test_a_torn_last_line_is_ended_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("step", step=1)
    with path.open("a") as file:
        file.write('{"v": 1, "event": "st')
    with EventLog(path) as log:
        log.emit("step", step=2)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_an_event_refuses_what_json_cannot_carry(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log, pytest.raises(TypeError, match="object"):
        log.emit("step", value=object())


def test_tensorboard_gets_the_scalars(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with EventLog(None, tensorboard=tmp_path / "tb") as log:
        log.emit("step", step=7, loss=2.5, note="text", grad_norm=float("inf"))
        log.emit("checkpoint", step=7, path="x")
    seen = event_accumulator.EventAccumulator(str(tmp_path / "tb"))
    seen.Reload()
    assert seen.Tags()["scalars"] == ["step/loss"]
    assert [(s.step, s.value) for s in seen.Scalars("step/loss")] == [(7, 2.5)]


def test_progress_line() -> None:
    line = progress_line(
        step=120, last_step=800, loss=2.1139, accept_length=1.817, lr=5.91e-4, tokens_per_s=41234, eta_s=373
    )
    assert line == "step 120/800  loss 2.114  accept 1.82  lr 5.9e-4  41.2k tok/s  eta 6 min"
    line = progress_line(step=9, last_step=80, loss=2, accept_length=1, lr=0, tokens_per_s=1, eta_s=3, estimated=True)
    assert line.startswith("step 9/~80  ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (89.4, "89 s"), (90, "2 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min"), (2e5, "2 d 7 h")],
)
def test_human_duration(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_human_duration_of_the_unknown() -> None:
    assert human_duration(float("inf")) == "?"


@pytest.mark.parametrize(("value", "text"), [(950.2, "950"), (41234, "41.2k"), (3e6, "3.0M"), (2.5e9, "2.5G")])
def test_human_count(value: float, text: str) -> None:
    assert human_count(value) == text
