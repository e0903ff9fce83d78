"""Walking the models: which keys exist, what kind each is, and how a mapping falls apart into single values."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from orchestrator.inventory.strict_yaml import KeyPath
from orchestrator.inventory.types import Duration, Section, Size
from orchestrator.inventory.units import format_duration, format_size

_VALIDATOR_OF_SIZE = typing.get_args(Size)[1]
_VALIDATOR_OF_DURATION = typing.get_args(Duration)[1]


@dataclass(frozen=True, slots=True)
class Value:
    """A value as it was written. `origin` is for people: `built in`, `groups.h200 (inventory/dfo.yaml:41:3)`,
    `--keep`; `where` is the place of the value itself, empty when it is built in.
    """

    value: Any
    origin: str
    where: str


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without `None`; Annotated is looked through."""
    if typing.get_origin(annotation) is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(a for m in typing.get_args(annotation) if m is not type(None) for a in alternatives(m))
    return (annotation,)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, if it holds one."""
    for choice in alternatives(annotation):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def item_of(annotation: Any) -> Any | None:
    """What a mapping or list field holds, else None."""
    for choice in alternatives(annotation):
        if typing.get_origin(choice) in (dict, list):
            return typing.get_args(choice)[-1]
    return None


def is_section(annotation: Any) -> bool:
    """Whether the field is a mapping that may be left empty, which says nothing; `None` is no value of it."""
    return type(None) not in typing.get_args(annotation) and (
        section_of(annotation) is not None or is_mapping(annotation)
    )


def is_mapping(annotation: Any) -> bool:
    """Whether the field is a mapping with free keys (`env`, `launch.set`)."""
    return any(typing.get_origin(choice) is dict for choice in alternatives(annotation))


def is_text(annotation: Any) -> bool:
    """Whether a value of this field is text, so that the text of a variable is taken as it is."""
    choices = alternatives(annotation)
    return str in choices or any(typing.get_origin(choice) is typing.Literal for choice in choices)


def keys_at(model: type[Section], path: KeyPath) -> list[str]:
    """The keys that the section at `path` may hold; empty where any key is allowed."""
    holder: Any = model
    for part in path:
        section = section_of(holder)
        if section is not None and part in section.model_fields:
            holder = section.model_fields[str(part)].annotation
        else:
            holder = item_of(holder)
    section = section_of(holder)
    return list(section.model_fields) if section is not None else []


def split_key(model: type[Section], dotted: str) -> KeyPath | None:
    """`launch.set.train.steps` → `("launch", "set", "train.steps")`; None when there is no such key."""
    first, _, rest = dotted.partition(".")
    field = model.model_fields.get(first)
    if field is None:
        return None
    section = section_of(field.annotation)
    if section is not None:
        below = split_key(section, rest) if rest else ()
        return None if below is None else (first, *below)
    if is_mapping(field.annotation):
        return (first, rest) if rest else (first,)
    return None if rest else (first,)


def flatten(model: type[Section], mapping: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """The single values of a mapping: sections and free mappings are entered, lists and secrets are not."""
    for key, value in mapping.items():
        field = model.model_fields.get(key)
        section = section_of(field.annotation) if field is not None else None
        if value is None and field is not None and is_section(field.annotation):
            continue
        if not isinstance(value, Mapping) or field is None:
            yield (key,), value
        elif is_mapping(field.annotation):
            yield from (((key, name), item) for name, item in value.items())
        elif section is not None:
            yield from (((key, *path), item) for path, item in flatten(section, value))
        else:
            yield (key,), value


def nest(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The reverse of `flatten`."""
    result: dict[str, Any] = {}
    for path, value in values.items():
        place = result
        for part in path[:-1]:
            place = place.setdefault(str(part), {})
        place[str(path[-1])] = value
    return result


def defaults_of(model: type[Section]) -> dict[str, Any]:
    """The built-in defaults, spelled as in a file."""
    return {name: spell(field, field.default) for name, field in model.model_fields.items() if not field.is_required()}


def spell(field: FieldInfo, value: Any) -> Any:
    """A value of a model as it would be written in the file."""
    if isinstance(value, Section):
        return {name: spell(sub, getattr(value, name)) for name, sub in type(value).model_fields.items()}
    if isinstance(value, list):
        return [spell(field, item) for item in value]
    if _VALIDATOR_OF_SIZE in field.metadata and isinstance(value, int):
        return format_size(value)
    if _VALIDATOR_OF_DURATION in field.metadata and isinstance(value, float):
        return format_duration(value)
    return value
