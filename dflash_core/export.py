"""The finished drafter as a folder to serve or publish: weights and config in z-lab's format, and a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig
from dflash_core.drafter import DFlashConfig, load_drafter, save_drafter
from dflash_core.errors import CheckpointError
from dflash_core.evaluate import EVALUATION_FILE
from dflash_core.events import EventLog
from dflash_core.training_state import TrainState, latest_checkpoint, read_state

EXPORT_FOLDER = "export"


def export(config: RunConfig, run_dir: Path, events: EventLog, *, say: Callable[[str], None] = print) -> Path:
    """Write `run_dir/export` from the newest checkpoint; replaces an earlier export in one go.

    Raises CheckpointError: no checkpoint, a damaged one, or no room for the export.
    """
    folder = latest_checkpoint(run_dir)
    if folder is None:
        raise CheckpointError(f"{run_dir} has no checkpoint", "there is nothing to export", "train first")
    drafter = load_drafter(folder / "drafter")
    staging, final = run_dir / f".{EXPORT_FOLDER}.partial", run_dir / EXPORT_FOLDER
    try:
        shutil.rmtree(staging, ignore_errors=True)
        save_drafter(drafter, staging)
        card = model_card(config, drafter.config, read_state(folder), _evaluation(run_dir, folder.name))
        (staging / "README.md").write_text(card, encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
    except OSError as error:
        raise CheckpointError(f"cannot write {final}", str(error), "free disk space, then export again") from error
    events.emit("export", path=final, checkpoint=folder.name)
    say(f"exported {folder.name} to {final}")
    return final


def _evaluation(run_dir: Path, checkpoint: str) -> dict[str, Any] | None:
    """The evaluation of that very checkpoint, if there is one."""
    try:
        found = json.loads((run_dir / EVALUATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("checkpoint") == checkpoint else None


def model_card(config: RunConfig, drafter: DFlashConfig, state: TrainState, evaluation: dict[str, Any] | None) -> str:
    """README.md of the export: what it drafts for, how it was trained, what was measured, how to serve it."""
    target = config.target.path + (f"/{config.target.gguf_file}" if config.target.gguf_file else "")
    train, drafts = config.train, drafter.block_size - 1
    serving = json.dumps({"method": "dflash", "model": "<this folder>", "num_speculative_tokens": drafts})
    return f"""---
library_name: transformers
tags: [speculative-decoding, dflash]
---
# DFlash drafter for {target}

A block drafter (DFlash, arXiv 2602.06036): it drafts {drafts} tokens in one forward, the target
verifies them. It has no embedding and no head of its own and works with this target only.

| | |
| --- | --- |
| layers | {drafter.num_hidden_layers}, hidden size {drafter.hidden_size} |
| block size | {drafter.block_size} (the known token and {drafts} drafts) |
| target layers tapped | {list(drafter.target_layer_ids)} of {drafter.num_target_layers}, outputs, counted from 0 |
| mask token id | {drafter.mask_token_id} |
| weights | {drafter.dtype} |

## Training

{state.step} steps, {state.samples_seen} samples, {state.tokens_seen} tokens, {state.elapsed_s:.0f} s;
learning rate {train.lr:g} (cosine, {train.warmup_ratio:.0%} warm-up), loss `{train.loss}` with gamma {config.gamma:g},
{train.anchors_per_batch} blocks per row of {config.data.tokens_per_batch} tokens, seed {config.seed}.

## Measured

{_measured(evaluation)}

## Serving

vLLM: `--speculative-config '{serving}'`

SGLang: `--speculative-algorithm DFLASH --speculative-draft-model-path <this folder>`
"""


def _measured(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return "This checkpoint was not evaluated."
    identical = {True: "identical on every prompt", False: "NOT identical on every prompt", None: "sampled"}
    rows = {
        "accept length, untrained (teacher-forced, held-out)": f"{evaluation['accept_length_untrained']:.3f}",
        "accept length, trained (same blocks)": f"{evaluation['accept_length_trained']:.3f}",
        "tokens per verification cycle (mean over answers)": f"{evaluation['tau']:.3f}",
        "plain decoding": f"{evaluation['plain_tokens_per_s']:.2f} tokens/s",
        "speculative decoding, same loop": f"{evaluation['speculative_tokens_per_s']:.2f} tokens/s",
        "speculative against plain output": identical[evaluation["lossless"]],
        "held-out prompts": f"{evaluation['num_prompts']}, none of them trained on",
        "training prompts": f"{evaluation['data']['train']['samples']}, sha256 {evaluation['data']['train']['sha256']}",
        "device, type": f"{evaluation['device']}, {evaluation['dtype']}",
    }
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *table])
