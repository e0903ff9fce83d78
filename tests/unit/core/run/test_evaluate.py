"""evaluation.json: honest numbers, an honest comparison, and the proof that nothing held out was trained on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from dflash_core.errors import CheckpointError, DataError
from dflash_core.evaluate import evaluate, token_pieces
from dflash_core.events import EventLog, read_events
from dflash_core.export import export
from dflash_core.prompt_sets import prompt_sets
from dflash_core.trainer import train


@pytest.fixture
def trained(tiny_run: Any, quiet: Any) -> Any:
    tiny_run.change(train={"steps": 40, "lr": 1e-2})
    with EventLog(tiny_run.run_dir / "events.jsonl") as events:
        train(tiny_run.config, tiny_run.run_dir, events, say=quiet)
    return tiny_run


def run_evaluation(run: Any, quiet: Any) -> dict[str, Any]:
    with EventLog(run.run_dir / "events.jsonl") as events:
        evaluate(run.config, run.run_dir, events, say=quiet)
    report: dict[str, Any] = json.loads((run.run_dir / "evaluation.json").read_text())
    return report


def test_the_report(trained: Any, quiet: Any) -> None:
    report = run_evaluation(trained, quiet)
    assert report["v"] == 1 and report["checkpoint"] == "step-000040" and report["train_steps"] == 40
    assert report["lossless"] is True
    assert report["num_prompts"] == len(report["prompts"]) == 3
    assert report["new_tokens_min"] == min(prompt["tokens"] for prompt in report["prompts"])
    assert report["heldout_loss_trained"] < report["heldout_loss_untrained"] - 0.5
    assert report["accept_length_trained"] >= report["accept_length_untrained"] >= 1
    for key in ("acceptance_by_offset", "acceptance_by_offset_untrained", "agreed_by_offset"):
        assert len(report[key]) == 3
    assert 1 + sum(report["acceptance_by_offset"]) == pytest.approx(report["accept_length_trained"], rel=1e-5)
    assert report["tau"] == pytest.approx(sum(p["tau"] for p in report["prompts"]) / 3, rel=1e-5)
    cycles = sum(p["cycles"] for p in report["prompts"])
    assert report["tau_pooled"] == pytest.approx(sum(sum(p["accepted"]) for p in report["prompts"]) / cycles, rel=1e-5)
    assert report["plain_tokens_per_s"] > 0 and report["speculative_tokens_per_s"] > 0
    for prompt in report["prompts"]:
        assert prompt["identical"] is True and len(prompt["pieces"]) == prompt["tokens"]
        assert "".join(prompt["pieces"]) == prompt["text"]
        assert 1 + sum(prompt["accepted"]) >= prompt["tokens"]
    [event] = [e for e in read_events(trained.run_dir / "events.jsonl") if e["event"] == "evaluation"]
    assert event["tau"] == report["tau"] and "prompts" not in event


def test_untrained_is_the_same_start_on_the_same_blocks(trained: Any, quiet: Any) -> None:
    report = run_evaluation(trained, quiet)
    events = [e for e in read_events(trained.run_dir / "events.jsonl") if e["event"] == "eval"]
    assert report["accept_length_untrained"] == pytest.approx(events[0]["accept_length"], rel=1e-4)
    assert report["accept_length_trained"] == pytest.approx(events[-1]["accept_length"], rel=1e-4)
    assert report["heldout_loss_trained"] == pytest.approx(events[-1]["loss"], rel=1e-4)


def test_sampled_decoding_is_not_called_lossless(trained: Any, quiet: Any) -> None:
    trained.change(evaluate={"temperature": 1.0})
    report = run_evaluation(trained, quiet)
    assert report["lossless"] is None and report["prompts"][0]["identical"] is None


def test_the_export_is_what_was_evaluated(trained: Any, quiet: Any) -> None:
    report = run_evaluation(trained, quiet)
    with EventLog(None) as events:
        folder = export(trained.config, trained.run_dir, events, say=quiet)
        assert export(trained.config, trained.run_dir, events, say=quiet) == folder  # again is fine
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    weights = trained.run_dir / "checkpoints" / "step-000040" / "drafter" / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == weights.read_bytes()
    card = (folder / "README.md").read_text()
    assert f"{report['tau']:.3f}" in card and report["data"]["train"]["sha256"] in card
    assert '"num_speculative_tokens": 3' in card
    (trained.run_dir / "evaluation.json").unlink()
    with EventLog(None) as events:
        export(trained.config, trained.run_dir, events, say=quiet)
    assert "was not evaluated" in (folder / "README.md").read_text()


def test_nothing_to_evaluate_or_export(tiny_run: Any, quiet: Any) -> None:
    with EventLog(None) as events:
        for stage in (evaluate, export):
            with pytest.raises(CheckpointError, match="has no checkpoint"):
                stage(tiny_run.config, tiny_run.run_dir, events, say=quiet)


def test_a_truncated_drafter_is_refused(trained: Any, quiet: Any) -> None:
    path = trained.run_dir / "checkpoints" / "step-000040" / "drafter" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors"), EventLog(None) as events:
        evaluate(trained.config, trained.run_dir, events, say=quiet)


def test_prompt_sets_count_and_hash_distinct_prompts(tiny_run: Any) -> None:
    sets = prompt_sets(tiny_run.config)
    lines = (tiny_run.folder / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["messages"][0]["content"] for line in lines]
    hashes = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    assert sets["heldout"] == {"samples": 4, "sha256": hashlib.sha256("".join(hashes).encode()).hexdigest()}
    assert sets["train"]["samples"] == 12


@pytest.mark.parametrize("disguise", ["spaces", "system", "more turns"])
def test_a_held_out_prompt_that_was_trained_on_is_named(tiny_run: Any, disguise: str) -> None:
    line = json.loads((tiny_run.folder / "train.jsonl").read_text().splitlines()[5])
    messages = line["messages"]
    if disguise == "spaces":
        messages[0]["content"] = "  " + messages[0]["content"].replace(" ", "\n ")
    elif disguise == "system":
        messages.insert(0, {"role": "system", "content": "be brief"})
    else:
        messages += [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "no"}]
    with (tiny_run.folder / "heldout.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=r"heldout.jsonl:5.*also in data.train \(1 such"):
        prompt_sets(tiny_run.config)


def test_pieces_of_characters_that_span_tokens(tokenizer: Any) -> None:
    text = "naïve 日本 <b>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = token_pieces(ids, tokenizer)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    assert "日" in pieces and not any("\ufffd" in piece for piece in pieces)
