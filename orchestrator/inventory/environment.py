"""Settings from `DFO_*` variables.

`DFO_` and the key in capitals, levels joined by two underscores: `DFO_DEPLOY__KEEP=3` is `deploy.keep`,
`DFO_ENV__NCCL_DEBUG=INFO` sets a variable of the run, `DFO_PYTHON=/opt/venv/bin/python` is `python`. Where the
key wants text, the text is taken as it is; else it is read as YAML: `DFO_GPUS='[0, 1]'`. An empty variable
counts as not set. Names without two underscores that are no top-level value (DFO_TARGET, your own secrets) are
left alone; names with them must be keys, so that a slip does not pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.hints import did_you_mean
from orchestrator.inventory.keys import Value, flatten, is_mapping, is_section, is_text, item_of, section_of
from orchestrator.inventory.models import Settings
from orchestrator.inventory.problems import Problem, invalid
from orchestrator.inventory.strict_yaml import KeyPath, parse_strict
from orchestrator.inventory.types import Section

PREFIX = "DFO_"


def environment_layer(environ: Mapping[str, str]) -> dict[KeyPath, Value]:
    """The values that `environ` sets. Raises UsageError `inventory_invalid`."""
    layer: dict[KeyPath, Value] = {}
    problems = []
    for name, text in sorted(environ.items()):
        parts = name.removeprefix(PREFIX).split("__")
        if not name.startswith(PREFIX) or not text or (len(parts) == 1 and not _is_plain_value(parts[0])):
            continue
        found = _find(Settings, parts)
        if isinstance(found, str):
            problems.append(Problem(name, "is not a key of the inventory", found))
            continue
        path, annotation = found
        value = text if is_text(annotation) else parse_strict(text, name)[0]
        for below, item in flatten(Settings, _wrapped(path, value)):
            layer[below] = Value(item, name, name)
    if problems:
        raise invalid("the environment", problems, kind="inventory_invalid", fix="unset it, or correct its name")
    return layer


def _is_plain_value(part: str) -> bool:
    field = Settings.model_fields.get(part.lower())
    return field is not None and not is_section(field.annotation)


def _find(model: type[Section], parts: list[str], above: str = PREFIX) -> tuple[KeyPath, Any] | str:
    """The key path that a variable names and what it holds; else what is wrong with the name."""
    key = parts[0].lower()
    field = model.model_fields.get(key)
    if field is None:
        guess = did_you_mean(key, model.model_fields)
        names = ", ".join(above + name.upper() for name in model.model_fields)
        return f"did you mean `{above}{guess.upper()}`?" if guess else f"known here are {names}"
    if len(parts) == 1:
        return (key,), field.annotation
    if is_mapping(field.annotation):
        return (key, "__".join(parts[1:])), item_of(field.annotation)
    section = section_of(field.annotation)
    if section is None:
        return f"`{key}` has no keys below it"
    below = _find(section, parts[1:], f"{above}{parts[0]}__")
    return below if isinstance(below, str) else ((key, *below[0]), below[1])


def _wrapped(path: KeyPath, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {str(key): value}
    assert isinstance(value, dict)
    return value
