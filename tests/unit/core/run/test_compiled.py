"""A run whose attention is compiled, from warm-up to resume: nothing may be compiled after the barrier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.attention import BACKENDS, BackendKind
from dflash_core.attention.flex import FlexAttention
from dflash_core.compile.environment import prepare_process, variables
from dflash_core.drafter import load_drafter
from dflash_core.errors import ConfigError
from dflash_core.events import EventLog, read_events
from dflash_core.preflight import preflight
from dflash_core.trainer import train
from dflash_core.training_state import latest_checkpoint
from dflash_core.warm_up import warm_up


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The operator's backward works on a CPU with "aot_eager"; torch and the backend's table only forbid it."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    kind = BackendKind(make=lambda: FlexAttention(compiler="aot_eager"), devices=("cpu",))
    monkeypatch.setitem(BACKENDS, "flex", kind)
    for name, value in variables(tmp_path / "compile").items():
        monkeypatch.setenv(name, value)
    prepare_process(tmp_path / "compile")
    torch._dynamo.reset()


def go(run: Any, quiet: Any, **options: Any) -> None:
    with EventLog(run.run_dir / "events.jsonl") as events:
        train(run.config, run.run_dir, events, say=quiet, **options)


def events_of(run: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.run_dir / "events.jsonl") if event["event"] == name]


def drafter_of(run: Any) -> dict[str, torch.Tensor]:
    folder = latest_checkpoint(run.run_dir)
    assert folder is not None
    return load_drafter(folder / "drafter", dtype=torch.float32).state_dict()


def test_nothing_is_compiled_after_the_barrier(tiny_run: Any, quiet: Any, flex_on_cpu: None) -> None:
    topology = {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2}
    settings = {"dtype": "float32", "steps": 4, "batches_per_step": 2, "eval_every": 3, "checkpoint_every": 2}
    plain = tiny_run.in_dir("plain").change(topology=topology, train={**settings, "attention": "reference"})
    tiny_run.change(topology=topology, train={**settings, "attention": "flex"})
    for run in (plain, tiny_run):
        go(run, quiet)
        go(run.change(train={"steps": 6}), quiet, resume=True)

    starts, ends = events_of(tiny_run, "warm"), events_of(tiny_run, "compiles")
    assert len(starts) == len(ends) == 2 and all(start["compiles"] > 0 for start in starts)
    assert [(end["after_warm"], end["refused"]) for end in ends] == [(0, 0)] * 2
    assert all(step["compiles"] == 0 for step in events_of(tiny_run, "step"))
    assert [event["step"] for event in events_of(tiny_run, "eval")] == [0, 3, 4, 6]
    expected = drafter_of(plain)
    for name, tensor in drafter_of(tiny_run).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)


def test_the_warm_up_covers_the_held_out_evaluation(tiny_run: Any, quiet: Any, flex_on_cpu: None) -> None:
    tiny_run.change(train={"attention": "flex"})
    with EventLog(tiny_run.run_dir / "events.jsonl") as events:
        record = warm_up(tiny_run.config, tiny_run.run_dir, events, say=quiet)
    entries = {entry["worker"]: entry["compiles"] for entry in record["entries"]}
    assert list(entries) == ["target-0 (cpu)", "drafter-0 (cpu)", "held-out (cpu)"]
    # A block mask, the forward and its backward; the evaluation has no backward.
    assert list(entries.values()) == [0, 3, 2]


def test_flex_on_a_cpu_is_refused_before_anything_is_loaded(tiny_run: Any, quiet: Any) -> None:
    tiny_run.change(train={"attention": "flex"}, target={"path": "nowhere"})
    with EventLog(tiny_run.run_dir / "events.jsonl") as events, pytest.raises(ConfigError) as refused:
        preflight(tiny_run.config, tiny_run.run_dir, events, say=quiet)
    assert refused.value.key == "train.attention" and "cannot train on cpu" in refused.value.what


def test_preflight_says_what_auto_means(tiny_run: Any, quiet: Any) -> None:
    with EventLog(tiny_run.run_dir / "events.jsonl") as events:
        facts = dict(preflight(tiny_run.config, tiny_run.run_dir, events, say=quiet))
    assert facts["attention"] == "reference"
