"""A whole run in a folder: tiny target, tokenizer, chats, prompts and run.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_core.config import RunConfig, load_run_config

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "far"]


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


def write_chats(path: Path, count: int, *, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)

    def words(n: int) -> str:
        return " ".join(WORDS[int(i)] for i in torch.randint(0, len(WORDS), (n,), generator=rng))

    chats = []
    for number in range(count):
        length = int(torch.randint(4, 9, (1,), generator=rng))
        chats.append(
            {"messages": [
                {"role": "user", "content": f"{seed}-{number} {words(2)}"},
                {"role": "assistant", "content": words(length)},
            ]}
        )  # fmt: skip
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def write_target(folder: Path, tokenizer: Any, *, layers: int = 6, seed: int = 0) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
