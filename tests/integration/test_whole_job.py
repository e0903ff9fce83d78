"""The whole job through the commands a user types, with the real core on a tiny target: nothing is faked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.json_keys import check_keys
from support.tiny_target import make_tokenizer, write_chats, write_target

INVENTORY = """\
version: 1
targets:
  here:
    transport: local
    env: {OMP_NUM_THREADS: "1"}
    launch: {config: run.yaml, stages: [generate, preflight, train, evaluate, export]}
"""


@dataclass(frozen=True)
class Project:
    """A user's folder with an inventory, a run configuration and a tiny target."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / ".dfo" / "target"

    def dfo(self, *words: str, code: int = 0) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *words, "--json"],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("DFO_")},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == code, f"dfo {' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if code == 0:
            check_keys(words, answer)
        return answer

    def events(self, run: int, name: str) -> list[dict[str, Any]]:
        text = (self.root / "runs" / str(run) / "events.jsonl").read_text()
        return [event for event in map(json.loads, text.splitlines()) if event["event"] == name]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "dfo.yaml").write_text(INVENTORY)
    write_target(tmp_path / "target", make_tokenizer())
    write_chats(tmp_path / "train.jsonl", 12, seed=1)
    write_chats(tmp_path / "heldout.jsonl", 4, seed=2)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say the cat"}\n{"prompt": "say two dogs"}\n')
    settings = {
        "version": 1,
        "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
        "drafter": {"num_hidden_layers": 1, "num_target_taps": 2, "block_size": 4, "intermediate_size": 48},
        "data": {
            "train": [str(tmp_path / "train.jsonl"), "run:answers.jsonl"],
            "heldout": [str(tmp_path / "heldout.jsonl")],
            "max_length": 96,
            "tokens_per_batch": 192,
            "feature_store": "cache:features",
        },
        "train": {
            "steps": 12, "anchors_per_batch": 12, "dtype": "float32", "lr": 2e-3,
            "log_every": 1, "eval_every": 6, "checkpoint_every": 4,
        },
        "evaluate": {"num_prompts": 3, "max_new_tokens": 12, "anchors_per_sample": 6},
        "generate": {"prompts": [str(tmp_path / "prompts.jsonl")], "output": "run:answers.jsonl", "max_new_tokens": 8},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return Project(tmp_path)


def wait_for(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_deploy_warm_up_train_follow_evaluate_report_pull(project: Project) -> None:
    project.dfo("deploy")
    launched = project.dfo("launch", "--warmup-first")["result"]
    assert launched["run"] == 1
    project.dfo("logs", "1", "-f", "--exit-like-run")
    status = project.dfo("status", "1")["result"]["runs"][0]
    assert status["state"] == "succeeded"
    project.dfo("report", "1", "--to", "report")
    report = json.loads((project.folder / "report" / "report.json").read_text())
    assert report["train_steps"] == 12
    assert report["lossless"] is True
    assert report["data"]["train"]["samples"] == 14, "twelve chats of ours and two that the target has just written"
    assert (project.folder / "report" / "report.html").stat().st_size > 10_000
    exported = project.root / "runs" / "1" / "export"
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in exported.iterdir()}
    project.dfo("pull", "1", "--what", "export", "--to", "pulled")
    pulled = next((project.folder / "pulled").rglob("model.safetensors"))
    assert pulled.read_bytes() == (exported / "model.safetensors").read_bytes()
    assert project.dfo("stop", "1")["result"]["state"] == "succeeded", "it had ended by itself"


def test_an_edit_redeploys_only_itself_and_leaves_the_cache_warm(project: Project) -> None:
    (project.folder / "notes").mkdir()
    (project.folder / "notes" / "a.txt").write_text("one\n")
    inventory = project.folder / "inventory" / "dfo.yaml"
    inventory.write_text(INVENTORY + "    deploy: {include: [dflash_core, templates, notes]}\n")
    project.dfo("deploy")
    project.dfo("launch", "--warmup-first", "--set", "train.steps=1")
    project.dfo("logs", "-f", "--exit-like-run")
    for name in ("a", "b"):
        (project.folder / "notes" / f"{name}.txt").write_text("two\n")
    again = project.dfo("deploy")["result"]
    changes = {change["path"]: change["kind"] for change in again["plan"]["changes"]}
    assert changes == {"notes/a.txt": "M", "notes/b.txt": "A"}
    project.dfo("launch", "--warmup-first", "--set", "train.steps=1")
    project.dfo("logs", "-f", "--exit-like-run")
    assert project.events(1, "warmup_step"), "the first warm-up does something"
    assert not project.events(2, "warmup_step"), "the second finds its fingerprint in the cache"
    assert json.loads((project.root / "runs" / "1" / "run.json").read_text())["release"] != again["release"]


def test_a_killed_run_is_resumed_to_the_same_bytes(project: Project) -> None:
    project.dfo("deploy")
    project.dfo("launch")
    project.dfo("logs", "1", "-f", "--exit-like-run")
    project.dfo("launch", "--set", "train.steps=12")
    run = project.root / "runs" / "2"
    wait_for(lambda: (run / "checkpoints" / "latest").exists())
    victim = project.events(2, "stage_start")[-1]
    assert victim["stage"] == "train"
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for(lambda: project.dfo("status", "2")["result"]["runs"][0]["state"] == "failed")
    resumed = project.dfo("launch", "--resume", "2")["result"]["run"]
    project.dfo("logs", str(resumed), "-f", "--exit-like-run")
    weights = "checkpoints/step-000012/drafter/model.safetensors"
    whole, continued = (project.root / "runs" / str(n) / weights for n in (1, resumed))
    assert continued.read_bytes() == whole.read_bytes()


def test_a_misspelt_key_stops_on_the_laptop(project: Project) -> None:
    project.dfo("deploy")
    text = (project.folder / "run.yaml").read_text().replace("block_size:", "blok_size:")
    (project.folder / "run.yaml").write_text(text)
    error = project.dfo("launch", code=2)["error"]
    assert error["kind"] == "config_invalid"
    assert "blok_size" in json.dumps(error) and "block_size" in json.dumps(error)
    assert not list((project.root / "runs").iterdir())
