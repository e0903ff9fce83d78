"""From the file to one target with every value decided, and the origin of each value.

Precedence, lowest first: built-in defaults, `defaults`, the target's groups in their order, the target,
`DFO_*` variables, flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.hints import did_you_mean
from orchestrator.inventory.check import dotted, validate
from orchestrator.inventory.environment import environment_layer
from orchestrator.inventory.keys import Value, defaults_of, flatten, nest, split_key
from orchestrator.inventory.locate import Found
from orchestrator.inventory.models import InventoryFile, ResolvedTarget, Settings, Target
from orchestrator.inventory.problems import Problem, invalid
from orchestrator.inventory.resolved import idle_sections, means_something, misfits, resolved
from orchestrator.inventory.strict_yaml import KeyPath, Positions, load_strict

_SHOW_KEYS = "`dfo config docs targets` lists the keys"


@dataclass(frozen=True)
class Resolution:
    """A target, and the single values it was made of, by key path."""

    target: ResolvedTarget
    values: Mapping[KeyPath, Value]


@dataclass(frozen=True)
class Inventory:
    """A checked inventory file."""

    found: Found
    file: InventoryFile
    document: Mapping[str, Any]
    positions: Positions

    def choose(self, name: str | None, *, environ: Mapping[str, str]) -> str:
        """The target that is meant: the argument, else DFO_TARGET, else the only one there is.

        Raises UsageError `unknown_target`.
        """
        names = list(self.file.targets)
        asker = "the command line" if name else "DFO_TARGET"
        wanted = name or environ.get("DFO_TARGET")
        if not wanted:
            if len(names) == 1:
                return names[0]
            raise UsageError(
                "unknown_target",
                "which target?",
                why=f"{self.positions.source} has {len(names)}: {', '.join(names)}",
                fix=f"name one, such as `{names[0]}`, or set DFO_TARGET",
            )
        if wanted not in self.file.targets:
            guess = did_you_mean(wanted, names)
            raise UsageError(
                "unknown_target",
                f"there is no target `{wanted}`",
                why=f"{asker} names it; {self.positions.source} has {', '.join(names)}",
                fix=f"did you mean `{guess}`?" if guess else f"name one of them, or add it to {self.positions.source}",
            )
        return wanted

    def resolve(
        self, name: str, *, environ: Mapping[str, str], flags: Mapping[str, tuple[object, str]] | None = None
    ) -> Resolution:
        """Decide every value of a target. Raises UsageError `inventory_invalid`."""
        entry = self.file.targets[name]
        values = {path: Value(value, "built in", "") for path, value in flatten(Target, defaults_of(Target))}
        for path in [("defaults",), *(("groups", group) for group in entry.groups), ("targets", name)]:
            _put(values, self._layer(path))
        _put(values, environment_layer(environ))
        _put(values, _flag_layer(flags or {}))
        values = {path: value for path, value in values.items() if means_something(path, entry.transport)}
        written = nest({path: value.value for path, value in values.items() if value.where})
        source, where = f"target `{name}`", _finder(values)
        settings = validate(Target, written, source=source, where=where, below=("targets", name))
        if problems := list(misfits(name, settings, lambda path: where(path, True))):
            raise invalid(source, problems, kind="inventory_invalid", fix=_SHOW_KEYS)
        return Resolution(resolved(name, settings, self.found.project), values)

    def _layer(self, path: KeyPath) -> dict[KeyPath, Value]:
        part: Any = self.document
        for key in path:
            part = part.get(key) or {}
        return {
            below: Value(value, f"{dotted(path)} ({self.positions.where((*path, *below))})", place)
            for below, value in flatten(Target, part)
            if (place := self.positions.where((*path, *below), value=True))
        }


def load_inventory(found: Found) -> Inventory:
    """Read and check an inventory. Raises UsageError with every problem found."""
    source = found.name
    document, positions = load_strict(found.path, label=source)
    file = validate(
        InventoryFile, document, source=source, where=lambda path, value: positions.where(path, value=value)
    )
    problems = [
        Problem(
            positions.where(("targets", name, "groups", index), value=True),
            f"unknown group `{group}`",
            _known("groups", group, file.groups),
        )
        for name, target in file.targets.items()
        for index, group in enumerate(target.groups)
        if group not in file.groups
    ]
    if problems:
        raise invalid(source, problems, kind="inventory_invalid", fix="define it under `groups`, or remove it")
    if idle := list(idle_sections(file, positions.where)):
        raise invalid(source, idle, kind="inventory_invalid", fix="remove it, or choose another `transport`")
    return Inventory(found, file, document, positions)


def _known(what: str, word: str, choices: Mapping[str, object]) -> str:
    guess = did_you_mean(word, choices)
    return f"did you mean `{guess}`?" if guess else f"`{what}` defines {', '.join(choices) or 'none'}"


def _put(values: dict[KeyPath, Value], layer: Mapping[KeyPath, Value]) -> None:
    """Lay one layer over the others. A value replaces what was below it, so `topology: null` takes it away."""
    for path, value in layer.items():
        for other in [p for p in values if p[: len(path)] == path or path[: len(p)] == p]:
            del values[other]
        values[path] = value


def _flag_layer(flags: Mapping[str, tuple[object, str]]) -> dict[KeyPath, Value]:
    layer = {}
    for key, (value, flag) in flags.items():
        path = split_key(Settings, key)
        assert path is not None, f"{flag} sets `{key}`, which is no key"
        layer[path] = Value(value, flag, flag)
    return layer


def _finder(values: Mapping[KeyPath, Value]) -> Callable[[KeyPath, bool], str]:
    def where(path: KeyPath, _value: bool) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in values:
                return values[path[:length]].where
        return next((value.where for p, value in values.items() if p[: len(path)] == path and value.where), "")

    return where
