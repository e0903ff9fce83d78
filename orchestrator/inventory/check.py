"""Mistakes against the models, in words that name the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from orchestrator.hints import did_you_mean
from orchestrator.inventory.keys import keys_at
from orchestrator.inventory.models import InventoryFile, Settings
from orchestrator.inventory.problems import Problem, invalid
from orchestrator.inventory.strict_yaml import KeyPath
from orchestrator.inventory.types import PATTERN_WORDS, Section

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=Section)

_EXPECTED = {
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text (quote it)",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def validate(
    model: type[M], data: object, *, source: str, where: Callable[[KeyPath, bool], str], below: KeyPath = ()
) -> M:
    """`data` as a `model`. `where(path, value)` tells the place of a key or of its value.

    Raises UsageError `inventory_invalid` with every problem, in the order of the file.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [_problem(model, details, where, below) for details in found]
        sections = {_section((*below, *details["loc"])) for details in found}
        about = f" {sections.pop()}" if len(sections) == 1 else ""
        fix = f"`dfo config docs{about}` lists the keys"
        raise invalid(source, problems, kind="inventory_invalid", fix=fix) from None


def _section(path: KeyPath) -> str:
    """The part of the documentation that a key belongs to."""
    inner = path[1:] if path[:1] == ("defaults",) else path[2:]
    if len(inner) > 1 and inner[0] in Settings.model_fields:
        return str(inner[0])
    return str(path[0]) if path and path[0] in InventoryFile.model_fields else "targets"


def _problem(
    model: type[Section], details: ErrorDetails, where: Callable[[KeyPath, bool], str], below: KeyPath
) -> Problem:
    path = tuple(part for part in details["loc"] if part != "[key]")
    parent, key = path[:-1], str(path[-1]) if path else ""
    place = f"under `{dotted((*below, *parent))}`" if (*below, *parent) else "at the top level"
    if details["type"] == "extra_forbidden":
        guess = did_you_mean(key, keys_at(model, parent))
        hint = f"did you mean `{guess}`?" if guess else f"known are {', '.join(keys_at(model, parent))}"
        return Problem(where(path, False), f"unknown key `{key}`", f"{place}; {hint}")
    if details["type"] == "missing":
        return Problem(where(parent, False), f"missing key `{key}`", f"it is needed {place}")
    if details["loc"] and details["loc"][-1] == "[key]":
        return Problem(where(path, False), f"`{key}` is not usable as a name", f"{place}; {_reason(details)}")
    name = dotted((*below, *path)) or "the document"
    # What stands in `env` or `token` may be a secret that somebody wrote down.
    shown = _shown(details["input"]) if not {"env", "token"} & set(path) else "something else"
    return Problem(where(path, True), f"`{name}` {_reason(details)}", f"it is {shown}")


def _reason(details: ErrorDetails) -> str:
    """What would have been right: `must be a whole number`."""
    if expected := _EXPECTED.get(details["type"]):
        return f"must be {expected}"
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    if details["type"] == "string_pattern_mismatch":
        return f"must be {PATTERN_WORDS[details['ctx']['pattern']]}"
    if details["type"] == "literal_error":
        return f"must be {details['ctx']['expected']}".replace("'", "`")
    return details["msg"].replace("Input should", "must", 1)


def _shown(value: Any) -> str:
    """The value that was found. Collections are only counted: they may hold text that is nobody's business."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text `{value}`" if len(value) <= 60 else f"a text of {len(value)} characters"
    return "a list" if isinstance(value, list) else "a mapping"


def dotted(path: KeyPath) -> str:
    """`targets.lab.gpus[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
