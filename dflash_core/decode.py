"""Decoding one sequence: plain, and speculative with a block drafter. Both run the same loop and the same cache.

Speculative cycle (arXiv 2602.06036): the drafter proposes B-1 tokens behind the last accepted token, the target
reads all B in one forward, the longest agreeing prefix and one token of the target's own are kept. Greedy decoding
keeps exactly the target's arg-max tokens; sampling uses the rejection rule of arXiv 2211.17192, which leaves the
target's distribution unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from dflash_core.drafter.model import DFlashDrafter, DraftCache
from dflash_core.target import Target


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """New tokens (a stop token included) and how they came about.

    `accepted`: per verification cycle, the accepted drafts plus the target's own token, cut at a stop token but not
    at `max_new_tokens`. Plain decoding has cycles of one token. `agreed[k]`: cycles whose drafts agreed up to and
    including offset k+1. Times in seconds; `prefill_seconds` covers the prompt and the first token.
    """

    ids: tuple[int, ...]
    accepted: tuple[int, ...]
    agreed: tuple[int, ...]
    prefill_seconds: float
    seconds: float

    @property
    def cycles(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Mean tokens per verification cycle; 1.0 when the first token already ended the answer."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 1.0


def plain_decode(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    eos_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Decode token by token with the target alone."""
    reader = _CachedTarget(target, ())
    begin = time.perf_counter()
    token = _sample(reader.read(prompt_ids, last_only=True), temperature, generator)
    ids = token.tolist()
    prefill = time.perf_counter() - begin
    while len(ids) < max_new_tokens and ids[-1] not in eos_ids:
        token = _sample(reader.read(ids[-1:]), temperature, generator)
        ids += token.tolist()
    seconds = time.perf_counter() - begin - prefill
    return DecodeResult(
        ids=tuple(ids), accepted=(1,) * (len(ids) - 1), agreed=(), prefill_seconds=prefill, seconds=seconds
    )


@torch.no_grad()
def speculative_decode(
    target: Target,
    drafter: DFlashDrafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    eos_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> DecodeResult:
    """Decode with drafts of `drafter`, verified by the target; same output law as `plain_decode`."""
    size = drafter.config.block_size
    reader = _CachedTarget(target, drafter.config.target_layer_ids)
    draft = _BlockDraft(target, drafter)
    begin = time.perf_counter()
    ids = _sample(reader.read(prompt_ids, last_only=True), temperature, generator).tolist()
    new_taps = reader.taps
    prefill = time.perf_counter() - begin
    accepted: list[int] = []
    agreed = [0] * (size - 1)
    while len(ids) < max_new_tokens and ids[-1] not in eos_ids:
        drafts, draft_probs = draft.propose(ids[-1], new_taps, temperature, generator)
        logits = reader.read([ids[-1], *drafts])
        count, own = verify(drafts, draft_probs, logits, temperature, generator)
        reader.forget(size - 1 - count)
        new_taps = reader.taps[: count + 1]
        emitted = _cut_at_stop([*drafts[:count], own], eos_ids)
        accepted.append(len(emitted))
        for offset in range(count):
            agreed[offset] += 1
        ids += emitted
    seconds = time.perf_counter() - begin - prefill
    return DecodeResult(
        ids=tuple(ids[:max_new_tokens]),
        accepted=tuple(accepted),
        agreed=tuple(agreed),
        prefill_seconds=prefill,
        seconds=seconds,
    )


def verify(
    drafts: Sequence[int],
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[int, int]:
    """How many drafts stand, and the target's own next token.

    `logits [B, V]`: row k follows draft k (row 0 follows the known token). `draft_probs [B-1, V]`: the distribution
    each draft was drawn from. Greedy (temperature 0): a draft stands while it equals the arg-max. Sampling: draft d
    stands with probability min(1, p(d)/q(d)); at the first rejection the own token is drawn from max(p - q, 0)
    normalised, or from p if that is zero everywhere; when all stand, from p of the last row.
    """
    if temperature == 0:
        own = logits.argmax(-1).tolist()
        count = 0
        while count < len(drafts) and drafts[count] == own[count]:
            count += 1
        return count, own[count]
    assert draft_probs is not None
    target_probs = _probabilities(logits, temperature)
    picked = torch.tensor(drafts, device=logits.device)[:, None]
    p = target_probs[:-1].gather(1, picked)[:, 0]
    q = draft_probs.gather(1, picked)[:, 0]
    u = torch.rand(len(drafts), device=logits.device, dtype=p.dtype, generator=generator)
    stands = (u * q < p).tolist()
    count = stands.index(False) if False in stands else len(drafts)
    law = target_probs[count]
    if count < len(drafts):
        residual = (law - draft_probs[count]).clamp_min(0)
        law = residual if bool(residual.sum() > 0) else law
    return count, int(torch.multinomial(law, 1, generator=generator))


class _CachedTarget:
    """The target with its key/value cache; reads tokens, remembers the taps of the last read."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self._target = target
        self._layer_ids = tuple(layer_ids)
        # Plain growing layers even for sliding-window models: those would drop rows that a rollback needs, and the
        # attention mask enforces the window by itself.
        self._cache = DynamicCache()
        self.taps = torch.empty(0)

    @torch.no_grad()
    def read(self, token_ids: Sequence[int], *, last_only: bool = False) -> torch.Tensor:
        """Append tokens; returns logits `[n, V]` in fp32 or wider (`[1, V]` with `last_only`)."""
        ids = torch.tensor([list(token_ids)], device=self._target.device)
        keep = 1 if last_only else 0

        def forward() -> torch.Tensor:
            output = self._target.model(
                input_ids=ids, use_cache=True, logits_to_keep=keep, **{self._target.cache_argument: self._cache}
            )
            logits: torch.Tensor = output.logits[0]
            return logits.to(torch.promote_types(logits.dtype, torch.float32))

        if not self._layer_ids:
            return forward()
        with self._target.tapping(self._layer_ids) as taps:
            logits = forward()
        self.taps = taps.features
        return logits

    def forget(self, count: int) -> None:
        """Drop the last `count` tokens from the cache."""
        crop_cache(self._cache, count)


def crop_cache(cache: DynamicCache, count: int) -> None:
    """Remove the last `count` positions of a transformers cache.

    A negative argument means "remove so many" in every transformers 5 release; a positive one was the length to keep
    until 5.17 and is an error since, and zero meant "keep nothing" once, so zero never reaches the call.
    """
    assert count >= 0
    if count > 0:
        cache.crop(-count)


class _BlockDraft:
    """The drafter with its key/value cache of context rows."""

    def __init__(self, target: Target, drafter: DFlashDrafter) -> None:
        self._target = target
        self._drafter = drafter
        self._cache = DraftCache(drafter.config)
        size = drafter.config.block_size
        self._masks = [drafter.config.mask_token_id] * (size - 1)
        self._offsets = torch.arange(size, device=target.device)

    def propose(
        self, known: int, new_taps: torch.Tensor, temperature: float, generator: torch.Generator | None
    ) -> tuple[list[int], torch.Tensor | None]:
        """Draft B-1 tokens behind `known`; `new_taps [C, n*H]` are the target's features of the rows since last time.

        Returns the drafts and, when sampling, the distributions `[B-1, V]` that they were drawn from.
        """
        begin = self._cache.length
        end = begin + new_taps.shape[0]
        block = torch.tensor([known, *self._masks], device=self._target.device)
        hidden = self._drafter.decode(
            self._target.embed(block).to(self._drafter.dtype),
            self._drafter.context_features(new_taps.to(self._drafter.dtype)),
            self._cache,
            block_positions=self._offsets + end,
            context_positions=torch.arange(begin, end, device=self._target.device),
        )
        logits = F.linear(hidden[1:], self._target.head_weight.to(hidden.dtype)).float()
        if temperature == 0:
            return logits.argmax(-1).tolist(), None
        probs = _probabilities(logits, temperature)
        return torch.multinomial(probs, 1, generator=generator)[:, 0].tolist(), probs


def _probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.softmax(logits / temperature, dim=-1)


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """One token `[1]` from the last row of `logits [n, V]`."""
    if temperature == 0:
        return logits[-1].argmax(-1, keepdim=True)
    return torch.multinomial(_probabilities(logits[-1], temperature), 1, generator=generator)


def _cut_at_stop(ids: list[int], eos_ids: Collection[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in eos_ids:
            return ids[: index + 1]
    return ids
