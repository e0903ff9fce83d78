"""Strict YAML into dataclasses: duplicate and unknown keys, wrong types and bad ranges all name their place.

Scalars follow the YAML 1.2 core schema, so that `6e-4` is a number and `on` is text. Nothing is coerced,
except that a whole number is accepted where a real one is asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from dflash_core.errors import ConfigError

T = TypeVar("T")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_TAG = "tag:yaml.org,2002:"


class Check(NamedTuple):
    """A range: the rule in words ("must be …") and the predicate."""

    rule: str
    holds: Callable[[Any], bool]


class Setting(NamedTuple):
    """One field of a settings dataclass: its type, what it means, its range."""

    kind: Any
    meaning: str
    check: Check | None


def settings_of(cls: type) -> dict[str, Setting]:
    """The fields of ``cls`` in order; meaning and range come from `Annotated[type, meaning, Check]`."""
    settings = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        kind, meaning, check = hint, "", None
        if get_origin(hint) is Annotated:
            kind, meaning, *rest = get_args(hint)
            check = rest[0] if rest else None
        settings[name] = Setting(kind, meaning, check)
    return settings


class _CoreSchemaLoader(yaml.SafeLoader):
    """`SafeLoader` with the tags of the YAML 1.2 core schema instead of YAML 1.1's guesses."""


_CoreSchemaLoader.yaml_implicit_resolvers = {}

for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _CoreSchemaLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)

_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    f"{_TAG}null": lambda text: None,
    f"{_TAG}bool": lambda text: text.lower() == "true",
    f"{_TAG}int": int,
    f"{_TAG}float": float,
    f"{_TAG}str": str,
}


@dataclasses.dataclass(frozen=True)
class _Place:
    file: str
    key: str

    def child(self, name: str | int) -> _Place:
        suffix = f"[{name}]" if isinstance(name, int) else f".{name}" if self.key else name
        return _Place(self.file, self.key + suffix)

    def error(self, node: yaml.Node, problem: str, why: str = "", fix: str = "") -> ConfigError:
        mark = node.start_mark
        at = f"{self.file}:{mark.line + 1}:{mark.column + 1}"
        return ConfigError(f"{at}: {self.key}: {problem}" if self.key else f"{at}: {problem}", why, fix, key=self.key)


def load_dataclass(path: Path, cls: type[T]) -> T:
    """Read the YAML file at ``path`` into the dataclass ``cls``. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read", error.strerror or str(error), "give the path of a run.yaml"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text", str(error), "save the file as UTF-8") from error
    return parse_dataclass(text, cls, str(path))


def parse_dataclass(text: str, cls: type[T], file: str) -> T:
    """Parse YAML ``text`` into the dataclass ``cls``; errors (`ConfigError`) call it ``file``."""
    loader = _CoreSchemaLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{file}:1:1: the file is empty", "a configuration needs at least its required keys")
        return _dataclass(node, cls, _Place(file, ""))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise ConfigError(
            f"{at}: not valid YAML: {error.problem}", error.context or "", "correct the syntax there"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML", str(error).splitlines()[0], "correct the syntax") from error
    finally:
        loader.dispose()


def _dataclass(node: yaml.Node, cls: type[T], place: _Place) -> T:
    if not isinstance(node, yaml.MappingNode):
        raise place.error(node, f"must be a mapping of keys to values, got {_found(node)}")
    known = settings_of(cls)
    key_nodes: dict[str, yaml.Node] = {}
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _new_key(key_node, known, key_nodes, place)
        key_nodes[key] = key_node
        values[key] = _value(value_node, known[key].kind, place.child(key))
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and item.name not in values:
            meaning = known[item.name].meaning
            raise place.error(node, f"the key {item.name!r} is missing", meaning, f"add {item.name}: …")
    try:
        return cls(**values)
    except ConfigError as error:
        at = place.child(error.key)
        raise at.error(key_nodes.get(error.key, node), error.what, error.why, error.fix) from None


def _new_key(node: yaml.Node, known: dict[str, Setting], seen: dict[str, yaml.Node], place: _Place) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise place.error(node, "keys must be plain words")
    if node.value in seen:
        first = seen[node.value].start_mark.line + 1
        raise place.child(node.value).error(
            node,
            "the key appears twice",
            f"it was first given in line {first}; one of the two would be lost",
            "remove one",
        )
    if node.value not in known:
        near = difflib.get_close_matches(node.value, known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
        raise place.child(node.value).error(node, "unknown key", "a misspelt key would silently do nothing", fix)
    return str(node.value)


def _value(node: yaml.Node, kind: Any, place: _Place) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if node.tag == "tag:yaml.org,2002:null":
            return None
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return _value(node, inner, place)
    if origin is Literal:
        return _choice(node, args, place)
    if origin is tuple:
        return _tuple(node, args, place)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(node, kind, place)
    return _scalar(node, kind, place)


def _scalar(node: yaml.Node, kind: type, place: _Place) -> Any:
    value = _parsed(node, place) if isinstance(node, yaml.ScalarNode) else None
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    fix = "put it in quotes" if kind is str and value is not None else ""
    raise place.error(node, f"must be {_KINDS[kind]}, got {_found(node)}", "values are never converted silently", fix)


def _parsed(node: yaml.ScalarNode, place: _Place) -> Any:
    try:
        return _FROM_TEXT[node.tag](node.value)
    except (KeyError, ValueError):
        raise place.error(node, f"the tag {node.tag!r} is not supported for {node.value!r}") from None


def _choice(node: yaml.Node, choices: tuple[str, ...], place: _Place) -> str:
    value = _scalar(node, str, place)
    if value in choices:
        return str(value)
    near = difflib.get_close_matches(value, choices, n=1)
    fix = f"did you mean {near[0]!r}?" if near else ""
    raise place.error(node, f"must be one of {', '.join(choices)}, got {value!r}", "", fix)


def _tuple(node: yaml.Node, args: tuple[Any, ...], place: _Place) -> tuple[Any, ...]:
    if not isinstance(node, yaml.SequenceNode):
        raise place.error(
            node, f"must be a list, got {_found(node)}", "values are never converted silently", "write [a, b]"
        )
    if args[-1] is not Ellipsis and len(node.value) != len(args):
        raise place.error(node, f"must have {len(args)} entries, got {len(node.value)}")
    return tuple(_value(item, args[0], place.child(i)) for i, item in enumerate(node.value))


def _found(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        name = node.tag.rsplit(":", 1)[-1]
        return {"str": f"the text {node.value!r}", "null": "nothing"}.get(name, f"the {name} {node.value}")
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
