"""The manual of the inventory, made from the models: `dfo config docs`, `inventory/example.yaml`."""

from __future__ import annotations

import json
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from orchestrator.errors import UsageError
from orchestrator.hints import did_you_mean
from orchestrator.inventory.keys import alternatives, is_mapping, item_of, section_of, spell
from orchestrator.inventory.models import InventoryFile, Settings, Target
from orchestrator.inventory.strict_yaml import parse_strict
from orchestrator.inventory.types import DEVICE_PATTERN, Duration, Section, Size

WIDTH = 100
_SHARED = frozenset(Settings.model_fields)
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any value"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One key: `launch.warmup.timeout`, its type and default in words, and its explanation."""

    key: str
    kind: str
    default: str
    text: str


def entries(model: type[Section], above: str = "") -> Iterator[Entry]:
    """Every key of a section and of those inside it, in the order of the file."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        yield Entry(above + name, kind_of(field), _default(field), " ".join((field.description or "").split()))
        inner = section or section_of(item_of(field.annotation))
        if inner is not None and inner is not Settings and not issubclass(inner, Target):
            yield from entries(inner, f"{above}{name}{'[].' if section is None else '.'}")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, Section):
        return ""
    value = spell(field, field.default)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return f"default: {len(value)} entries"
    return "unset" if value is None else f"default {one_line(value)}"


def kind_of(field: FieldInfo) -> str:
    """The type of a key in words."""
    for alias, words in ((Duration, "duration such as 30s, 20m, 2h"), (Size, "size such as 500kB, 50MB, 2GiB")):
        members = [part for member in typing.get_args(field.annotation) for part in typing.get_args(member)]
        if typing.get_args(alias)[1] in [*field.metadata, *members]:
            return words
    return _kind(field.annotation)


def _kind(annotation: Any) -> str:
    choices = alternatives(annotation)
    if typing.get_origin(choices[0]) is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(choices[0]))
    if section_of(annotation) is not None:
        return "mapping"
    item = item_of(annotation)
    if item is not None:
        return f"mapping of names to {_kind(item)}" if is_mapping(annotation) else f"list of {_plural(item)}"
    return " or ".join(_NAMES.get(choice, "secret") for choice in choices)


def _plural(item: Any) -> str:
    if DEVICE_PATTERN in str(item):
        return "devices"
    if typing.get_origin(item) is typing.Literal:
        return _kind(item).replace(" | ", ", ")
    return {"text": "texts", "whole number": "whole numbers", "mapping": "mappings"}[_kind(item)]


def render(section: str | None = None) -> str:
    """The page of one section (`deploy`, `launch.warmup`, `targets`, …), or all of it.

    Raises UsageError `usage` for a name that is none.
    """
    own = [e for e in entries(Target, "targets.NAME.") if e.key.split(".")[2].rstrip("[]") not in _SHARED]
    everything = [*entries(InventoryFile), *own, *entries(Settings)]
    if section is None:
        return "\n\n".join([_RULES, *(_paragraph(entry) for entry in everything)])
    if section in ("defaults", "groups", "targets"):
        chosen = [*(own if section == "targets" else ()), *entries(Settings)]
    else:
        chosen = [e for e in everything if e.key == section or e.key.startswith((f"{section}.", f"{section}["))]
    if not chosen:
        guess = did_you_mean(section, [entry.key for entry in everything])
        raise UsageError(
            "usage",
            f"the inventory has no `{section}`",
            why=f"its parts are {', '.join(dict.fromkeys(e.key.split('.')[0].rstrip('[]') for e in everything))}",
            fix=f"did you mean `{guess}`?" if guess else "`dfo config docs` shows all of it",
        )
    return "\n\n".join(_paragraph(entry) for entry in chosen)


_RULES = """\
The inventory is YAML: what you read is what you wrote. Only true and false are booleans, text for a number or a
number for text is an error, and so are unknown keys, duplicate keys, aliases and tags.
A target gets its values from, lowest first: the built-in defaults, `defaults`, its groups in their order, the
target itself, DFO_* variables, flags. `dfo config show TARGET --origin` shows each value and where it is from.
Variables: DFO_ and the key in capitals, levels joined by two underscores: DFO_DEPLOY__KEEP=3."""


def _paragraph(entry: Entry) -> str:
    facts = ", ".join(part for part in (entry.kind, entry.default) if part)
    text = textwrap.fill(entry.text, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{entry.key}  ({facts})\n{text}"


def render_example() -> str:
    """`inventory/example.yaml`: a working inventory that holds every key, those with a default commented out."""
    return "\n".join([_HEAD, *_section(Settings, "  "), _TAIL])


_HEAD = """\
# The inventory of dfo: the places that train, and how they are used. `dfo init` writes this file.
#
# A line `#key: value`, without a space after the #, is a key with its default or an example: take the # away to
# change it. `dfo config docs` explains every key, `dfo config show --origin` tells what counts and why.
version: 1

# What every target gets. Groups and targets may say the same keys; later ones win, key by key.
defaults:"""

_TAIL = """\

# Settings that some targets share. Text that looks like a number goes in quotes.
groups:
  #h200:
  #  env: {NCCL_NVLS_ENABLE: "0"}

targets:
  local:
    # `local` is this machine: the "container" is the folder `deploy.root`.
    transport: local
    #groups: [h200]
    launch:
      config: run.yaml
  # A container through its Proxmox VE node. `dfo trust lab` shows the node's host key before the first use.
  #lab: {transport: pct, ssh: {host: pve1, user: root}, pct: {container: 101}}
  # A container, or any Linux, with an sshd of its own.
  #box: {transport: ssh, ssh: {host: box.example.org}}
"""


def _section(model: type[Section], indent: str) -> Iterator[str]:
    for index, (name, field) in enumerate(model.model_fields.items()):
        comment = f"{indent}# "
        if index:
            yield ""
        yield from textwrap.wrap(
            " ".join((field.description or "").split()), WIDTH, initial_indent=comment, subsequent_indent=comment
        )
        section = section_of(field.annotation)
        if section is not None and field.default is not None:
            yield f"{indent}{name}:"
            yield from _section(section, indent + "  ")
            continue
        shown = field.examples[0] if field.examples else spell(field, field.default)
        if isinstance(shown, list) and any(isinstance(item, dict) for item in shown):
            yield f"{indent}#{name}:"
            yield from (f"{indent}#  - {one_line(_without_none(item))}" for item in shown)
        else:
            yield f"{indent}#{name}: {one_line(shown)}"


def _without_none(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value is not None}


def one_line(value: Any) -> str:
    """One line of YAML that our strict reader takes back unchanged."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one_line(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(one_line(item) for item in value) + "]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[\w./:-]+", value) and parse_strict(value, "")[0] == value
        return value if plain else json.dumps(value)
    return json.dumps(value)
