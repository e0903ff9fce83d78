"""The proof of a drafter: accept length before and after training, and real decoding of held-out prompts.

Writes `evaluation.json`. Everything is measured on the weights of the newest checkpoint, as they are exported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_core.compile.environment import configure_main
from dflash_core.compile.gate import Gate
from dflash_core.config import RunConfig
from dflash_core.data.chats import ChatIndex, Message, PromptIndex
from dflash_core.data.encode import render, tokenise
from dflash_core.decode import DecodeResult, plain_decode, speculative_decode
from dflash_core.drafter import DFlashDrafter, load_drafter
from dflash_core.errors import CheckpointError, DataError
from dflash_core.events import EventLog, json_safe
from dflash_core.heldout import HeldOut
from dflash_core.prompt_sets import prompt_hash, prompt_sets, prompt_text
from dflash_core.session import Session, head_weight, open_session, replica
from dflash_core.training_state import latest_checkpoint, read_state

SCHEMA_VERSION = 1
EVALUATION_FILE = "evaluation.json"


def evaluate(
    config: RunConfig, run_dir: Path, events: EventLog, *, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Evaluate the newest checkpoint of `run_dir`, write `evaluation.json` and return its content.

    Raises CheckpointError (none there, damaged), DataError (no held-out data, or prompts that were trained on),
    TargetError.
    """
    folder = latest_checkpoint(run_dir)
    if folder is None:
        raise CheckpointError(f"{run_dir} has no checkpoint", "there is nothing to evaluate", "train first")
    sets = prompt_sets(config)
    configure_main()
    device = config.topology.drafters[0]
    begin = time.monotonic()
    session = open_session(config, [device], target_dtype=config.evaluate.dtype)
    trained = load_drafter(folder / "drafter", dtype=getattr(torch, config.evaluate.dtype), device=device)
    with Gate() as gate:
        report = {
            "v": SCHEMA_VERSION,
            "checkpoint": folder.name,
            "train_steps": read_state(folder).step,
            "dtype": config.evaluate.dtype,
            "temperature": config.evaluate.temperature,
            "max_new_tokens": config.evaluate.max_new_tokens,
            "device": device,
            "block_size": trained.config.block_size,
            "data": sets,
            **_teacher_forced(session, trained, gate, device, say),
            **_decoded(session, trained, gate, events, say),
        }
    report["seconds"] = round(time.monotonic() - begin, 3)
    _write(run_dir / EVALUATION_FILE, report)
    events.emit("evaluation", **{key: value for key, value in report.items() if key not in ("v", "prompts")})
    say(summary_line(report))
    return report


def summary_line(report: dict[str, Any]) -> str:
    """One line for a person."""
    before, after = report["accept_length_untrained"], report["accept_length_trained"]
    plain, speculative = report["plain_tokens_per_s"], report["speculative_tokens_per_s"]
    outputs = {True: "identical outputs", False: "OUTPUTS DIFFER", None: "sampled outputs"}[report["lossless"]]
    return (
        f"accept length {before:.2f} untrained, {after:.2f} trained  tau {report['tau']:.2f}  plain {plain:.1f} tok/s, "
        f"speculative {speculative:.1f} tok/s  {outputs} on {report['num_prompts']} prompts"
    )


def _teacher_forced(
    session: Session, trained: DFlashDrafter, gate: Gate, device: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """The same blocks with the drafter of the same seed before training, and with the trained one."""
    held_out = HeldOut.prepare(session, gate, None)
    if held_out is None:
        raise DataError(
            "data.heldout names no file",
            "the accept length is measured on chats that were not trained on",
            "set data.heldout to a JSONL file with chats",
        )
    dtype = session.config.evaluate.dtype
    head = head_weight(session.target, device, dtype)
    # Through the type that checkpoints are kept in, so that only training makes the difference.
    start = session.initial_drafter().to(getattr(torch, session.config.train.dtype))
    before = held_out.measure(replica(start, device, dtype), head, gate)
    after = held_out.measure(trained, head, gate)
    say(f"held-out blocks: {int(after.full_blocks)}, loss {before.loss:.3f} → {after.loss:.3f}")
    return {
        "accept_length_untrained": before.accept_length,
        "accept_length_trained": after.accept_length,
        "acceptance_by_offset_untrained": before.acceptance_by_offset,
        "acceptance_by_offset": after.acceptance_by_offset,
        "heldout_loss_untrained": before.loss,
        "heldout_loss_trained": after.loss,
        "heldout_chats": len(held_out.items),
        "heldout_blocks": int(after.full_blocks),
    }


def _decoded(
    session: Session, drafter: DFlashDrafter, gate: Gate, events: EventLog, say: Callable[[str], None]
) -> dict[str, Any]:
    """Plain and speculative decoding of the same prompts."""
    settings = session.config.evaluate
    records: list[dict[str, Any]] = []
    for number, (messages, place) in enumerate(_prompts(session.config), start=1):
        rendered = render(messages, session.tokenizer, place, add_generation_prompt=True)
        ids = tokenise(rendered, session.tokenizer).tolist()
        if not records:
            # Untimed: the first forwards of a process allocate and choose kernels.
            _decode_both(session, drafter, gate, ids, seed=0, max_new_tokens=4)
        plain, speculative = _decode_both(
            session, drafter, gate, ids, seed=session.config.seed + number, max_new_tokens=settings.max_new_tokens
        )
        record = {
            "id": number,
            "prompt": prompt_text(messages),
            "prompt_sha256": prompt_hash(messages),
            "prompt_tokens": len(ids),
            **_answer_record(plain, speculative, session.tokenizer),
            "identical": plain.ids == speculative.ids if settings.temperature == 0 else None,
        }
        records.append(record)
        events.emit("decode", **{key: value for key, value in record.items() if key not in ("pieces", "prompt")})
        say(f"prompt {number}  tau {record['tau']:.2f}  identical {record['identical']}")
    return _totals(records, drafter.config.block_size)


def _decode_both(
    session: Session, drafter: DFlashDrafter, gate: Gate, ids: list[int], *, seed: int, max_new_tokens: int
) -> tuple[DecodeResult, DecodeResult]:
    settings, target = session.config.evaluate, session.target
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": settings.temperature,
        "eos_ids": {*target.eos_ids, session.tokenizer.eos_token_id},
    }

    def generator() -> torch.Generator:
        return torch.Generator(target.device).manual_seed(seed)

    plain = gate.run("plain", lambda: plain_decode(target, ids, generator=generator(), **options))
    speculative = gate.run(
        "speculative", lambda: speculative_decode(target, drafter, ids, generator=generator(), **options)
    )
    return plain, speculative


def _prompts(config: RunConfig) -> list[tuple[list[Message], str]]:
    """Up to `num_prompts` prompts of `evaluate.prompts`, else of the held-out chats without their last answer."""
    limit = config.evaluate.num_prompts
    if config.evaluate.prompts:
        index = PromptIndex(config.evaluate.prompts)
        return [(index[n].messages, index[n].place) for n in range(min(limit, len(index)))]
    chats = ChatIndex(config.data.heldout)
    found = []
    for number in range(min(limit, len(chats))):
        messages = chats[number].messages
        last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        found.append((messages[:last], chats[number].place))
    return found


def _answer_record(plain: DecodeResult, speculative: DecodeResult, tokenizer: Any) -> dict[str, Any]:
    pieces = token_pieces(speculative.ids, tokenizer)
    return {
        "text": "".join(pieces),
        "pieces": pieces,
        "tokens": len(speculative.ids),
        "tau": speculative.tau,
        "cycles": speculative.cycles,
        "accepted": list(speculative.accepted),
        "agreed_by_offset": list(speculative.agreed),
        "plain_tokens": len(plain.ids),
        "plain_seconds": plain.seconds,
        "speculative_seconds": speculative.seconds,
        "prefill_seconds": speculative.prefill_seconds,
    }


def token_pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds; a character of several tokens belongs to its last one."""
    pieces: list[str] = []
    shown = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        is_whole = not text.endswith("\ufffd") or end == len(ids)
        pieces.append(text[len(shown) :] if is_whole else "")
        shown = text if is_whole else shown
    return pieces


def _totals(records: list[dict[str, Any]], block_size: int) -> dict[str, Any]:
    """Over all prompts. `tau`: mean per answer, then over answers; `tau_pooled`: all tokens over all cycles.

    Rates count decoding without the prompt's forward and the first token, which both ways share. `lossless` is None
    for sampled decoding, where equal outputs are not expected. `agreed_by_offset`: share of cycles whose drafts stood
    up to and including that offset.
    """
    cycles = sum(record["cycles"] for record in records)
    identical = [record["identical"] for record in records]
    return {
        "tau": sum(record["tau"] for record in records) / len(records),
        "tau_pooled": sum(sum(record["accepted"]) for record in records) / cycles if cycles else 1.0,
        "lossless": None if None in identical else all(identical),
        "plain_tokens_per_s": _rate(records, "plain_tokens", "plain_seconds"),
        "speculative_tokens_per_s": _rate(records, "tokens", "speculative_seconds"),
        "agreed_by_offset": [
            sum(record["agreed_by_offset"][offset] for record in records) / cycles if cycles else 0.0
            for offset in range(block_size - 1)
        ],
        "num_prompts": len(records),
        "new_tokens_min": min(record["tokens"] for record in records),
        "prompts": records,
    }


def _rate(records: list[dict[str, Any]], tokens: str, seconds: str) -> float:
    """Tokens a second; the first token of an answer comes with the prompt."""
    total = sum(record[seconds] for record in records)
    return sum(record[tokens] - 1 for record in records) / total if total > 0 else 0.0


def _write(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(json_safe(report), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
