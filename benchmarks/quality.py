"""How good a drafter gets in a fixed time: train on chats, then measure accept length and τ on held-out ones.

    python benchmarks/quality.py --target DIR --chats chats.jsonl --prompts prompts.jsonl --device cuda:0 \
        --seconds 180 --out benchmarks/results/quality-NAME.json

The last 512 chats are held out; a held-out chat whose prompt is also trained on is dropped. The recipe is that of the
paper at small scale: 5 layers, 5 taps, blocks of 16, lr 6e-4, cosine by the clock. Needs the `train` extra only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

HELD_OUT = 512


def main() -> None:
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        num_train = split(arguments.chats, work)
        (work / "run.yaml").write_text(yaml.safe_dump(recipe(arguments, work)))
        for stage in ("preflight", "warmup", "train", "evaluate"):
            run = [sys.executable, "-m", "dflash_core", stage]
            subprocess.run([*run, "--config", work / "run.yaml", "--run-dir", work / "run"], check=True)
        result = summary(arguments, work / "run", num_train)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def split(chats: Path, work: Path) -> int:
    """Write train.jsonl and heldout.jsonl; returns the number of training chats."""
    lines = chats.read_text(encoding="utf-8").splitlines()
    train, held_out = lines[:-HELD_OUT], lines[-HELD_OUT:]
    known = {_prompt(line) for line in train}
    held_out = [line for line in held_out if _prompt(line) not in known]
    (work / "train.jsonl").write_text("\n".join(train) + "\n", encoding="utf-8")
    (work / "heldout.jsonl").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    return len(train)


def _prompt(line: str) -> str:
    messages = json.loads(line)["messages"]
    return " ".join(next(m["content"] for m in messages if m["role"] == "user").split())


def recipe(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The run configuration: about 32 chats and 2,048 blocks a step."""
    return {
        "version": 1,
        "target": {"path": str(arguments.target), "gguf_file": arguments.gguf_file, "dtype": "bfloat16"},
        "drafter": {"num_hidden_layers": 5, "block_size": 16, "mask_token_id": arguments.mask_token_id},
        "data": {
            "train": [str(work / "train.jsonl")],
            "heldout": [str(work / "heldout.jsonl")],
            "max_length": 384,
            "tokens_per_batch": 8192,
        },
        "topology": {"targets": [arguments.device], "drafters": [arguments.device], "queue_size": 4},
        "train": {
            "max_seconds": arguments.seconds,
            "epochs": 1000,
            "anchors_per_batch": 2048,
            "lr": 6e-4,
            "log_every": 20,
            "eval_every": 1_000_000,
            "checkpoint_every": 1_000_000,
        },
        "evaluate": {
            "prompts": [str(path) for path in arguments.prompts],
            "num_prompts": arguments.num_prompts,
            "max_new_tokens": 96,
            "dtype": "float32",
        },
    }


def summary(arguments: argparse.Namespace, run: Path, num_train: int) -> dict[str, Any]:
    """What was reached, on what, with what."""
    evaluation = json.loads((run / "evaluation.json").read_text())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    facts = next(event["facts"] for event in events if event["event"] == "preflight")
    seconds = steps[-1]["elapsed_s"]
    kept = ("accept_length_untrained", "accept_length_trained", "tau", "tau_pooled", "lossless", "train_steps")
    speed = ("plain_tokens_per_s", "speculative_tokens_per_s", "acceptance_by_offset", "num_prompts", "data")
    return {
        "benchmark": "quality",
        "date": datetime.now(UTC).date().isoformat(),
        "device": facts["devices"],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")},
        "attention": "reference",
        "seconds": seconds,
        "chats": num_train,
        "samples_per_s": sum(step["samples_per_s"] for step in steps) / len(steps),
        **{name: evaluation[name] for name in (*kept, *speed)},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--gguf-file", help="the GGUF in that folder, if it is one")
    parser.add_argument("--mask-token-id", type=int, help="needed where the vocabulary has no unused row")
    parser.add_argument("--chats", type=Path, required=True, help="JSONL of the target's own chats")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL of held-out prompts")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
