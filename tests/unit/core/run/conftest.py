"""A whole run in a folder: tiny target, tokenizer, chats, prompts and run.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny_target import write_chats, write_target

from dflash_core.config import RunConfig, load_run_config


@dataclass(frozen=True)
class TinyRun:
    """`config_path` and `run_dir` of a run; `settings` is what run.yaml says."""

    folder: Path
    settings: dict[str, Any]

    @property
    def config_path(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def config(self) -> RunConfig:
        return load_run_config(self.config_path)

    def change(self, **sections: Any) -> TinyRun:
        """Change settings in place, section by section: `change(train={"steps": 3})`."""
        for name, value in sections.items():
            if isinstance(value, dict):
                self.settings.setdefault(name, {}).update(value)
            else:
                self.settings[name] = value
        self.config_path.write_text(yaml.safe_dump(self.settings))
        return self

    def in_dir(self, name: str) -> TinyRun:
        """The same target and data with another run directory and its own run.yaml."""
        folder = self.folder / name
        folder.mkdir()
        return TinyRun(folder, json.loads(json.dumps(self.settings))).change()


@pytest.fixture
def tiny_run(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "cache"))
    write_target(tmp_path / "target", tokenizer)
    write_chats(tmp_path / "train.jsonl", 12, seed=1)
    write_chats(tmp_path / "heldout.jsonl", 4, seed=2)
    run = TinyRun(
        tmp_path,
        {
            "version": 1,
            "seed": 3,
            "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
            "drafter": {"num_hidden_layers": 2, "block_size": 4, "intermediate_size": 48},
            "data": {
                "train": [str(tmp_path / "train.jsonl")],
                "heldout": [str(tmp_path / "heldout.jsonl")],
                "max_length": 96,
                "tokens_per_batch": 192,
            },
            "train": {
                "steps": 6, "anchors_per_batch": 12, "dtype": "float32", "threads": 1, "lr": 2e-3,
                "log_every": 1, "eval_every": 100, "checkpoint_every": 100,
            },
            "evaluate": {"num_prompts": 3, "max_new_tokens": 12, "anchors_per_sample": 6},
        },
    )  # fmt: skip
    return run.change()


@pytest.fixture
def quiet() -> Callable[[str], None]:
    return lambda line: None
