"""Chats as token ids with a loss mask: True where the target itself writes the token.

The mask comes from the `{% generation %}` blocks of the chat template where it has them. Otherwise an answer is what a
rendering gains over the prompt in front of it, and this difference is used only if it is exact, in text and in
tokens: whatever is trained must be what the target sees and writes when it is served.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from dflash_core.data.chats import Message
from dflash_core.errors import DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """One chat: `input_ids` `[L]` int32 and `loss_mask` `[L]` bool."""

    input_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)


class SampleRefused(DataError):
    """This one chat cannot be trained on; others can. `reason` is one stable word for counting."""

    def __init__(self, reason: str, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.reason = reason


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Any,
    max_length: int,
    on_overlong: Literal["truncate", "skip"] = "truncate",
    *,
    complete: bool = True,
    place: str = "chat",
) -> Encoded:
    """Render, tokenise and mask one chat; at most `max_length` tokens.

    Supervised are the tokens of every assistant message and the end token behind it, but not what the template puts
    after that token, and not the end token of a last answer that is not `complete`.

    Raises `SampleRefused` (`overlong`, `inexact_prefix`, `no_supervised_pair`) when this chat is unusable, and
    `DataError` when chat and template do not fit together at all; both begin with `place`.
    """
    chat = list(messages)
    if _GENERATION.search(tokenizer.chat_template or ""):
        ids, mask = _by_generation_blocks(chat, tokenizer, place)
    else:
        ids, mask = _by_prefix_difference(chat, tokenizer, place)
    _leave_out_after_end(ids, mask, tokenizer.eos_token_id, complete)
    if len(ids) > max_length and on_overlong == "skip":
        raise SampleRefused(
            "overlong",
            f"{place}: {len(ids)} tokens",
            f"data.max_length is {max_length} and data.on_overlong is skip",
            "raise data.max_length or set data.on_overlong to truncate",
        )
    ids, mask = ids[:max_length], mask[:max_length]
    if not (mask[:-1] & mask[1:]).any():
        raise SampleRefused(
            "no_supervised_pair",
            f"{place}: no two neighbouring tokens of an answer within {max_length} tokens",
            "a block starts at a token of an answer and predicts the one behind it",
            "raise data.max_length, or remove chats with empty answers",
        )
    return Encoded(ids, mask)


def render(messages: list[Message], tokenizer: Any, place: str, *, add_generation_prompt: bool) -> str:
    """The chat as text. Raises `DataError` that begins with `place` when the template rejects it."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, KeyError) as error:
        raise _rejected(error, place) from error
    return text


def tokenise(text: str, tokenizer: Any) -> np.ndarray:
    """Token ids of a rendered chat, `[L]` int32; the template has already written the special tokens."""
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
    return np.asarray(ids, dtype=np.int32)


def _by_generation_blocks(chat: list[Message], tokenizer: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        encoded = tokenizer.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise _rejected(error, place) from error
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    return ids, np.asarray(encoded["assistant_masks"], dtype=bool)


def _by_prefix_difference(chat: list[Message], tokenizer: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
    text = render(chat, tokenizer, place, add_generation_prompt=False)
    ids = tokenise(text, tokenizer)
    mask = np.zeros(len(ids), dtype=bool)
    for turn, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = render(chat[:turn], tokenizer, place, add_generation_prompt=True)
        through = text
        if turn + 1 < len(chat):
            through = render(chat[: turn + 1], tokenizer, place, add_generation_prompt=False)
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                f"{place}: the chat template rewrites earlier turns: the text up to messages[{turn}] is not a "
                "prefix of the whole chat",
                "the target would see another prompt when it writes this answer than the one trained on",
                "set target.chat_template to a template with {% generation %} blocks, or use single-turn chats",
            )
        start = _exact_prefix(before, ids, tokenizer, place)
        end = len(ids) if through == text else _exact_prefix(through, ids, tokenizer, place)
        mask[start:end] = True
    return ids, mask


def _exact_prefix(prefix: str, ids: np.ndarray, tokenizer: Any, place: str) -> int:
    prefix_ids = tokenise(prefix, tokenizer)
    if not np.array_equal(ids[: len(prefix_ids)], prefix_ids):
        raise SampleRefused(
            "inexact_prefix",
            f"{place}: a token reaches over the start or the end of an answer",
            "its tokens differ from those the target reads and writes, so no exact loss mask exists",
            "set target.chat_template to a template with {% generation %} blocks, or remove such chats",
        )
    return len(prefix_ids)


def _leave_out_after_end(ids: np.ndarray, mask: np.ndarray, eos_id: int | None, complete: bool) -> None:
    """Cut every supervised span behind its last end token; the last span also loses that token if not `complete`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    for start, end in edges.reshape(-1, 2):
        ends = np.flatnonzero(ids[start:end] == eos_id)
        if len(ends):
            is_cut_off = not complete and end == edges[-1]
            mask[start + ends[-1] + (0 if is_cut_off else 1) : end] = False


def _rejected(error: Exception, place: str) -> DataError:
    return DataError(
        f"{place}: the chat template rejects this chat: {error}",
        "templates may demand an order of roles or certain keys",
        "repair or remove the line, or set target.chat_template",
    )
