"""Answers written by the target itself: the text a drafter should be trained on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from dflash_core.compile.gate import Gate
from dflash_core.config import GenerateConfig
from dflash_core.data.answers import open_answers
from dflash_core.data.chats import Prompt, PromptIndex
from dflash_core.data.encode import render, tokenise
from dflash_core.target.model import Target

WINDOW_BATCHES = 16
"""Prompts of so many batches are sorted by length, so that little of a batch is padding."""


@dataclass
class GenerationProgress:
    """Counts of one call, updated while it runs."""

    total: int
    """Distinct prompts, up to `num_prompts`."""
    before: int
    """Of these, the ones the file already answered."""
    answered: int = 0
    too_long: int = 0
    """Prompts that leave no room for an answer."""
    tokens: int = 0
    """New tokens, end tokens included."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Answer:
    """One answer: the new token ids without the end token, and whether there was one."""

    ids: list[int]
    complete: bool


def generate_answers(
    config: GenerateConfig,
    target: Target,
    tokenizer: Any,
    out_path: str | Path,
    *,
    seed: int = 0,
    on_progress: Callable[[GenerationProgress], None] | None = None,
) -> GenerationProgress:
    """Let the target answer `config.prompts` and append the chats to `out_path`, batch by batch.

    A line is `{"messages", "prompt_sha256", "finish_reason"}` with the answer as the last message and `finish_reason`
    `"stop"` or `"length"`. Prompts that the file already answers are left out, so the call can be repeated after any
    interruption; equal prompts are answered once. A sampled answer depends on `seed` and its prompt, not on the other
    prompts of its batch (up to rounding). Prompts that leave no room for `max_new_tokens` are counted, not answered.

    Raises `DataError` for unreadable prompts, an unreadable or busy output file, and a full disk.
    """
    prompts = PromptIndex(config.prompts)
    stop_ids = sorted({*target.eos_ids, tokenizer.eos_token_id} - {None})
    begin = time.perf_counter()
    with Gate() as gate, open_answers(Path(out_path)) as file:
        pending, total = _pending(prompts, config.num_prompts, file.prompts)
        progress = GenerationProgress(total=total, before=total - len(pending))
        for batch in _batches((prompts[n] for n in pending), config, target, tokenizer, progress):
            seeds = [_prompt_seed(seed, prompt) for prompt, _ in batch]
            answer = partial(answer_batch, target, [ids for _, ids in batch], config, seeds=seeds, stop_ids=stop_ids)
            answers = gate.run("generate", answer)
            file.append([_line(p, a, tokenizer) for (p, _), a in zip(batch, answers, strict=True)])
            progress.answered += len(batch)
            progress.tokens += sum(len(answer.ids) + answer.complete for answer in answers)
            progress.seconds = time.perf_counter() - begin
            if on_progress is not None:
                on_progress(progress)
    return progress


@torch.no_grad()
def answer_batch(
    target: Target,
    prompt_ids: Sequence[Sequence[int]],
    config: GenerateConfig,
    *,
    seeds: Sequence[int],
    stop_ids: Sequence[int],
) -> list[Answer]:
    """Answer tokenised prompts at once, left-padded; greedy when `config.temperature` is 0."""
    width = max(map(len, prompt_ids))
    padding = stop_ids[0] if stop_ids else 0
    ids_BL = torch.full((len(prompt_ids), width), padding)
    mask_BL = torch.zeros_like(ids_BL)
    for row, ids in enumerate(prompt_ids):
        ids_BL[row, width - len(ids) :] = torch.as_tensor(ids)
        mask_BL[row, width - len(ids) :] = 1
    settings = GenerationConfig.from_dict(
        {
            "max_new_tokens": config.max_new_tokens,
            "do_sample": False,
            "eos_token_id": list(stop_ids) or None,
            "pad_token_id": padding,
        }
    )
    sampling = LogitsProcessorList()
    if config.temperature > 0:
        sampling.append(SeededSampling(config.temperature, config.top_p, seeds, target.device))
    output = target.model.generate(
        input_ids=ids_BL.to(target.device),
        attention_mask=mask_BL.to(target.device),
        generation_config=settings,
        logits_processor=sampling,
    )
    return [_until_stop(row, stop_ids) for row in output[:, width:].tolist()]


class SeededSampling(LogitsProcessor):
    """Makes arg-max decoding sample each row with its own generator, whatever else is in the batch.

    arg max(log p - log e) with e ~ Exp(1) has distribution p (the Gumbel-max trick).
    """

    def __init__(self, temperature: float, top_p: float, seeds: Sequence[int], device: torch.device) -> None:
        self._temperature = temperature
        self._nucleus = TopPLogitsWarper(top_p) if top_p < 1 else None
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Perturbed scores `[B, V]` in fp32."""
        scores = scores.float() / self._temperature
        if self._nucleus is not None:
            scores = self._nucleus(input_ids, scores)
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.log()


def _pending(prompts: PromptIndex, limit: int | None, answered: set[bytes]) -> tuple[list[int], int]:
    """Numbers of the prompts to answer, and how many distinct prompts there are up to the limit."""
    seen: set[bytes] = set()
    pending = []
    for number in range(len(prompts)):
        if limit is not None and len(seen) >= limit:
            break
        digest = bytes.fromhex(prompts[number].sha256)
        if digest not in seen:
            seen.add(digest)
            if digest not in answered:
                pending.append(number)
    return pending, len(seen)


def _batches(
    prompts: Iterator[Prompt],
    config: GenerateConfig,
    target: Target,
    tokenizer: Any,
    progress: GenerationProgress,
) -> Iterator[list[tuple[Prompt, list[int]]]]:
    """Batches of prompts with their token ids; prompts that are too long are only counted."""
    longest = getattr(target.config, "max_position_embeddings", None)
    while window := list(islice(prompts, WINDOW_BATCHES * config.batch_size)):
        fitting = []
        for prompt in window:
            text = render(prompt.messages, tokenizer, prompt.place, add_generation_prompt=True)
            ids = tokenise(text, tokenizer).tolist()
            if longest is not None and len(ids) + config.max_new_tokens > longest:
                progress.too_long += 1
            else:
                fitting.append((prompt, ids))
        fitting.sort(key=lambda item: len(item[1]))
        for at in range(0, len(fitting), config.batch_size):
            yield fitting[at : at + config.batch_size]


def _until_stop(ids: list[int], stop_ids: Sequence[int]) -> Answer:
    for at, token in enumerate(ids):
        if token in stop_ids:
            return Answer(ids[:at], complete=True)
    return Answer(ids, complete=False)


def _line(prompt: Prompt, answer: Answer, tokenizer: Any) -> dict[str, Any]:
    text = tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {
        "messages": [*prompt.messages, {"role": "assistant", "content": text}],
        "prompt_sha256": prompt.sha256,
        "finish_reason": "stop" if answer.complete else "length",
    }


def _prompt_seed(seed: int, prompt: Prompt) -> int:
    digest = hashlib.sha256(f"{seed}:{prompt.sha256}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
