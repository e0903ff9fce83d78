"""Chats and prompts: what a line of a JSONL file may hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.data.jsonl import JsonLines
from dflash_core.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """One conversation. `complete` is False when its last answer was cut off by a length limit."""

    messages: list[Message]
    place: str
    complete: bool = True


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer."""

    messages: list[Message]
    place: str

    @property
    def sha256(self) -> str:
        """Identity of the prompt's text; equal prompts have equal hashes, wherever they stand."""
        return prompt_sha256(self.messages)


class ChatIndex:
    """The chats of one or more JSONL files, by number. See `parse_chat` for the format."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        """Index the files (see `JsonLines`); no line is parsed yet."""
        self._lines = JsonLines(files)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Chat:
        """Read one chat. Raises `DataError` with `file:line`."""
        return parse_chat(self._lines.record(number), self._lines.place(number))

    def __iter__(self) -> Iterator[Chat]:
        return (self[number] for number in range(len(self)))

    @property
    def files(self) -> list[Path]:
        return self._lines.files

    def validate(self, limit: int | None = None) -> int:
        """Parse the first `limit` chats (default: all) and return how many. Raises the first `DataError`."""
        count = len(self) if limit is None else min(limit, len(self))
        for number in range(count):
            self[number]
        return count


class PromptIndex:
    """The prompts of one or more JSONL files, by number. See `parse_prompt` for the format."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        """Index the files (see `JsonLines`); no line is parsed yet."""
        self._lines = JsonLines(files)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Prompt:
        """Read one prompt. Raises `DataError` with `file:line`."""
        return parse_prompt(self._lines.record(number), self._lines.place(number))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))


def parse_chat(record: dict[str, Any], place: str) -> Chat:
    """`{"messages": [{"role", "content"}, ...]}` or `{"prompt", "response"}` as a chat.

    `"finish_reason": "length"` marks a last answer that was cut off. Raises `DataError` that begins with `place`.
    """
    if "messages" in record:
        messages = _checked_messages(record["messages"], place)
    elif "prompt" in record and "response" in record:
        messages = [
            {"role": "user", "content": _checked_text(record["prompt"], "prompt", place)},
            {"role": "assistant", "content": _checked_text(record["response"], "response", place)},
        ]
    else:
        raise _wrong_keys(record, 'neither "messages" nor "prompt" and "response"', place)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{place}: no assistant message", "there is nothing to learn from it", "remove the line")
    if messages[0]["role"] == "assistant":
        raise DataError(
            f"{place}: the first message is the assistant's",
            "an answer is learnt as the continuation of a prompt",
            "put the prompt in front of it, or remove the line",
        )
    return Chat(messages, place, complete=record.get("finish_reason") != "length")


def parse_prompt(record: dict[str, Any], place: str) -> Prompt:
    """`{"prompt": text}` or `{"messages": [...]}` as a prompt; the last message must not be the assistant's.

    Other keys are ignored, and so is `"response"`: the files that `parse_chat` reads can be answered anew.
    Raises `DataError` that begins with `place`.
    """
    if "messages" in record:
        messages = _checked_messages(record["messages"], place)
    elif "prompt" in record:
        messages = [{"role": "user", "content": _checked_text(record["prompt"], "prompt", place)}]
    else:
        raise _wrong_keys(record, 'neither "prompt" nor "messages"', place)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{place}: the last message is the assistant's",
            "a prompt must end with the message that is to be answered",
            "remove the assistant's last message",
        )
    return Prompt(messages, place)


def prompt_sha256(messages: Sequence[Message]) -> str:
    """SHA-256 of the messages as canonical JSON (sorted keys, no spaces, UTF-8), in hex."""
    text = json.dumps(list(messages), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def _checked_messages(messages: Any, place: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f'{place}: "messages" is {"an empty list" if messages == [] else "not a list"}',
            'a chat is a list of {"role", "content"} objects',
            "repair or remove the line",
        )
    for number, message in enumerate(messages):
        where = f"{place}: messages[{number}]"
        if not isinstance(message, dict):
            raise DataError(f"{where} is not an object", 'a message is {"role", "content"}', "repair the line")
        role = message.get("role")
        if role not in ROLES:
            raise DataError(f"{where}: unknown role {role!r}", f"roles are {', '.join(ROLES)}", "rename or remove it")
        if not (message.get("content") is None and message.get("tool_calls")):
            _checked_text(message.get("content"), f"messages[{number}].content", place)
    return messages


def _checked_text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {name} is {'missing' if value is None else 'not a text'}",
            "only text can be learnt; images and other parts cannot",
            "repair or remove the line",
        )
    return value


def _wrong_keys(record: dict[str, Any], missing: str, place: str) -> DataError:
    found = ", ".join(list(record)[:6]) or "none"
    return DataError(
        f"{place}: {missing}",
        f"the keys of this line are: {found}",
        'write lines like {"messages": [{"role": "user", "content": "..."}, ...]}',
    )
