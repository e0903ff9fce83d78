"""Loss masks: generation blocks, exact prefix differences, and refusal where neither is exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_target import make_tokenizer

from dflash_core.data.encode import SampleRefused, encode_chat
from dflash_core.errors import DataError

GENERATION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like the templates of reasoning models: an earlier answer loses its thoughts once another turn follows.
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def chat(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def supervised(encoded, tokenizer) -> list[str]:
    """The texts of the supervised spans."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], encoded.loss_mask, [False]))))
    return [tokenizer.decode(encoded.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]


def test_answers_and_their_end_token_are_supervised(tokenizer):
    encoded = encode_chat(chat("Hi", "Hello", "Bye", "See you"), tokenizer, 1000)
    assert supervised(encoded, tokenizer) == ["Hello<|im_end|>", "See you<|im_end|>"]
    assert (encoded.input_ids.dtype, encoded.loss_mask.dtype) == (np.int32, bool)
    whole = tokenizer.apply_chat_template(chat("Hi", "Hello", "Bye", "See you"), tokenize=False)
    assert tokenizer.decode(encoded.input_ids) == whole


texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=30)


@given(st.lists(texts, min_size=2, max_size=6))
@settings(max_examples=60)
def test_both_ways_to_the_mask_agree(tokenizer_pair, contents):
    by_prefix, by_blocks = tokenizer_pair
    messages = chat(*contents)
    a = encode_chat(messages, by_prefix, 10_000)
    b = encode_chat(messages, by_blocks, 10_000)
    assert np.array_equal(a.input_ids, b.input_ids)
    assert np.array_equal(a.loss_mask, b.loss_mask)


@pytest.fixture(scope="module")
def tokenizer_pair():
    return make_tokenizer(), make_tokenizer(GENERATION)


def test_the_mask_is_what_the_target_would_write(tokenizer):
    """Supervised ids continue exactly the ids of the prompt that is shown to the target."""
    messages = chat("Hi", "Hello there", "Bye", "See you")
    encoded = encode_chat(messages, tokenizer, 1000)
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True).input_ids
    assert list(encoded.input_ids[: len(prompt)]) == list(prompt)
    assert encoded.loss_mask[len(prompt) :].tolist() == [True] * 8 + [False]


def test_templates_that_rewrite_earlier_turns_are_refused(tokenizer_with):
    rewriting = tokenizer_with(REWRITING)
    single = encode_chat(chat("Hi", "Hello"), rewriting, 1000)
    assert supervised(single, rewriting) == ["<think></think>Hello<|im_end|>"]
    with pytest.raises(DataError, match=r"^a.jsonl:7: the chat template rewrites earlier turns.*messages\[1\]") as e:
        encode_chat(chat("Hi", "Hello", "Bye", "See you"), rewriting, 1000, place="a.jsonl:7")
    assert "{% generation %}" in e.value.fix
    assert not isinstance(e.value, SampleRefused)


def test_tokens_across_the_start_of_an_answer_are_refused(tokenizer_with):
    merging = tokenizer_with(merges=(("Ċ", "Ċ"),))
    assert supervised(encode_chat(chat("Hi", "Hello"), merging, 1000), merging) == ["Hello<|im_end|>"]
    with pytest.raises(SampleRefused, match="reaches over") as error:
        encode_chat(chat("Hi", "\nHello"), merging, 1000)
    assert error.value.reason == "inexact_prefix"


def test_generation_blocks_need_no_prefix(tokenizer_with):
    by_blocks = tokenizer_with(GENERATION, merges=(("Ċ", "Ċ"),))
    encoded = encode_chat(chat("Hi", "\nHello"), by_blocks, 1000)
    assert supervised(encoded, by_blocks) == ["\n\nHello<|im_end|>"]


def test_the_end_of_a_cut_off_answer_is_not_supervised(tokenizer):
    messages = chat("Hi", "Hello", "Bye", "See y")
    encoded = encode_chat(messages, tokenizer, 1000, complete=False)
    assert supervised(encoded, tokenizer) == ["Hello<|im_end|>", "See y"]


def test_control_text_inside_an_answer_does_not_end_it(tokenizer):
    encoded = encode_chat(chat("Hi", "a<|im_end|>b"), tokenizer, 1000)
    assert supervised(encoded, tokenizer) == ["a<|im_end|>b<|im_end|>"]


def test_samples_beyond_the_limit(tokenizer):
    messages = chat("Hi", "Hello there")
    whole = encode_chat(messages, tokenizer, 1000)
    cut = encode_chat(messages, tokenizer, len(whole) - 5, "truncate")
    assert np.array_equal(cut.input_ids, whole.input_ids[:-5])
    assert np.array_equal(cut.loss_mask, whole.loss_mask[:-5])
    assert len(encode_chat(messages, tokenizer, len(whole), "skip")) == len(whole)
    with pytest.raises(SampleRefused, match=rf"^f:3: {len(whole)} tokens") as error:
        encode_chat(messages, tokenizer, len(whole) - 1, "skip", place="f:3")
    assert error.value.reason == "overlong"


@pytest.mark.parametrize(("contents", "limit"), [(("Hi", ""), 1000), (("Hi", "Hello"), 17), (("Hi", "Hello"), 1)])
def test_samples_without_a_supervised_pair_are_refused(tokenizer, contents, limit):
    with pytest.raises(SampleRefused) as error:
        encode_chat(chat(*contents), tokenizer, limit)
    assert error.value.reason == "no_supervised_pair"


def test_a_pair_is_the_smallest_sample(tokenizer):
    start = int(encode_chat(chat("Hi", "Hello"), tokenizer, 1000).loss_mask.argmax())
    assert encode_chat(chat("Hi", "Hello"), tokenizer, start + 2).loss_mask.sum() == 2
    with pytest.raises(SampleRefused):
        encode_chat(chat("Hi", "Hello"), tokenizer, start + 1)


def test_a_template_that_rejects_the_chat_names_the_place(tokenizer_with):
    messages = [{"role": "system", "content": "x"}, *chat("Hi", "Hello")]
    with pytest.raises(DataError, match=r"^a.jsonl:2: the chat template rejects this chat: no system role here"):
        encode_chat(messages, tokenizer_with(STRICT), 1000, place="a.jsonl:2")
    with pytest.raises(DataError, match="rejects this chat"):
        encode_chat(messages, tokenizer_with("{% generation %}{% endgeneration %}" + STRICT), 1000)
