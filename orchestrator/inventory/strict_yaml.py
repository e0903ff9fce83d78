"""YAML without surprises: what you read is what you wrote.

The subset: mappings with text keys, lists, text, `true`/`false`, `null`/`~`, decimal integers, and numbers with
a point or an exponent. Everything YAML 1.1 would quietly turn into something else stays the text it looks like:
`yes`, `0755`, `1:30`, `2026-11-30`. Duplicate keys, aliases, tags and a second document are errors. Every node
knows its line and column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import UsageError
from orchestrator.inventory.problems import Problem, invalid

MAX_BYTES = 1_000_000
MAX_DEPTH = 40

#: A key path: `("targets", "lab", "gpus", 0)`.
KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?=[0-9.]*[.eE])(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}


class _Loader(yaml.SafeLoader):
    """Composes nodes only; scalars are read by `_plain`, so no resolver of YAML 1.1 is consulted."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


@dataclass(frozen=True, slots=True)
class Positions:
    """Where each key path of a document stands."""

    source: str
    keys: Mapping[KeyPath, tuple[int, int]]
    values: Mapping[KeyPath, tuple[int, int]]

    def where(self, path: KeyPath = (), *, value: bool = False) -> str:
        """`file:line:column` of a key (or of its value); of the nearest parent when it is not in the file."""
        table = self.values if value else self.keys
        for length in range(len(path), -1, -1):
            if path[:length] in table:
                line, column = table[path[:length]]
                return f"{self.source}:{line}:{column}"
        return self.source


def load_strict(path: Path, *, kind: str = "inventory_invalid", label: str | None = None) -> tuple[Any, Positions]:
    """The value in a file, and the position of every node in it. An empty file is `None`.

    Raises UsageError of `kind` with all problems found; `label` is how messages name the file.
    """
    source = label or str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        missing = "inventory_missing" if kind == "inventory_invalid" else kind
        why = error.strerror or str(error)
        raise UsageError(missing, f"cannot read {source}", why=why, fix="check the path and its rights") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _one(kind, f"{source}:{line}", "is not UTF-8", f"byte {error.start} is no text") from error
    if len(data) > MAX_BYTES:
        raise _one(kind, source, "is too large", f"more than {MAX_BYTES // 1000} kB is no configuration")
    return parse_strict(text, source, kind=kind)


def parse_strict(text: str, source: str, *, kind: str = "inventory_invalid") -> tuple[Any, Positions]:
    """As `load_strict`, for text from elsewhere: a variable, a flag."""
    try:
        _refuse_surprises(text, source, kind)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else source
        raise _one(kind, where, "is not YAML", str(error.problem or error.context)) from error
    except yaml.YAMLError as error:
        raise _one(kind, source, "is not YAML", " ".join(str(error).split())) from error
    reader = _Reader(source)
    value = reader.read(node, ()) if node is not None else None
    if reader.problems:
        raise invalid(source, reader.problems, kind=kind, fix=_FIX)
    return value, Positions(source, reader.keys, reader.values)


_FIX = "correct the place; text that looks like something else goes in quotes"


def _one(kind: str, where: str, what: str, why: str) -> UsageError:
    return invalid(where, [Problem(where, what, why)], kind=kind, fix=_FIX)


def _refuse_surprises(text: str, source: str, kind: str) -> None:
    """Refuse nesting that the recursive composer could not survive, and everything that points elsewhere."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        mark, anchor, tag = event.start_mark, getattr(event, "anchor", None), getattr(event, "tag", None)
        assert mark is not None, "the parser marks every event"
        where = f"{source}:{mark.line + 1}:{mark.column + 1}"
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _one(kind, where, "is nested too deeply", f"more than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if anchor is not None:
            raise _one(kind, where, f"uses the anchor `{anchor}`", "anchors and aliases are not supported")
        if tag is not None:
            raise _one(kind, where, f"has the tag `{tag}`", "tags are not supported: write the plain value")


class _Reader:
    """Turns nodes into values, and remembers positions and problems on the way."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.keys: dict[KeyPath, tuple[int, int]] = {}
        self.values: dict[KeyPath, tuple[int, int]] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self.values[path] = _at(node)
        self.keys.setdefault(path, _at(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return _plain(node.value) if node.style is None else node.value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not (key_node.style or isinstance(_plain(key), str)):
                self._problem(key_node, "is a key that is not text", "put it in quotes")
                continue
            if key in result:
                line, column = self.keys[(*path, key)]
                self._problem(key_node, f"has the key `{key}` again", f"it is already at {line}:{column}")
                continue
            self.keys[(*path, key)] = _at(key_node)
            result[key] = self.read(value_node, (*path, key))
        return result

    def _problem(self, node: yaml.Node, what: str, why: str) -> None:
        line, column = _at(node)
        self.problems.append(Problem(f"{self.source}:{line}:{column}", what, why))


def _at(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _plain(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text
