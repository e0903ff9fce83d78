"""Which prompts were trained on, which are held out, and the proof that no prompt is both. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from dflash_core.config import RunConfig
from dflash_core.data.chats import ChatIndex, Message, PromptIndex
from dflash_core.errors import DataError


def prompt_sets(config: RunConfig) -> dict[str, dict[str, Any]]:
    """`{"train": ..., "heldout": ...}`, each the number of distinct prompts and a hash: `{"samples", "sha256"}`.

    A prompt is the first user message of a chat with white space collapsed: neither a system message nor a later turn
    makes it another one. The hash of a set covers the sorted hashes of its prompts. Raises DataError that names the
    first held-out prompt that is also trained on.
    """
    train: set[str] = set()
    if config.data.train:
        train = {prompt_hash(chat.messages) for chat in ChatIndex(config.data.train)}
    heldout: dict[str, str] = {}
    if config.evaluate.prompts:
        heldout |= {prompt_hash(prompt.messages): prompt.place for prompt in PromptIndex(config.evaluate.prompts)}
    if config.data.heldout:
        heldout |= {prompt_hash(chat.messages): chat.place for chat in ChatIndex(config.data.heldout)}
    shared = [place for digest, place in heldout.items() if digest in train]
    if shared:
        raise DataError(
            f"{shared[0]}: this held-out prompt is also in data.train ({len(shared)} such prompts)",
            "a drafter looks better than it is on a prompt that it was trained on",
            "remove those chats from data.train, or those prompts from the held-out files",
        )
    return {"train": _record(train), "heldout": _record(heldout)}


def prompt_hash(messages: Iterable[Message]) -> str:
    """SHA-256 of `prompt_text` with white space collapsed."""
    text = " ".join(prompt_text(messages).split())
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def prompt_text(messages: Iterable[Message]) -> str:
    """The first user message."""
    return next((str(message["content"]) for message in messages if message["role"] == "user"), "")


def _record(hashes: Iterable[str]) -> dict[str, Any]:
    ordered = sorted(hashes)
    return {"samples": len(ordered), "sha256": hashlib.sha256("".join(ordered).encode()).hexdigest()}
