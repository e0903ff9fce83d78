"""The run configuration that is sent: the user's file, with the overrides of the inventory and the command line.

The orchestrator reads it as a mapping only and knows three of its keys, `topology.{targets,drafters}`; what the
rest means is the core's business, and the core of the release checks it before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import UsageError
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.strict_yaml import load_strict, parse_strict

#: What the core takes when the file names no devices.
DEFAULT_DEVICES = ("cpu",)
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")


class _Dumper(yaml.SafeDumper):
    """Quotes every text that could be anything else to some YAML: `1e5` is text to PyYAML and a number to others."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _PLAIN.fullmatch(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


@dataclass(frozen=True, kw_only=True)
class RunConfigText:
    """`text` is what the run gets. `written` is the user's own text when overrides changed it, else None.

    `origin` names the file for messages, `overrides` what was laid over it (dotted key → value).
    """

    text: str
    written: str | None
    origin: str
    overrides: Mapping[str, object]
    topology: Mapping[str, object]


def read_run_config(
    target: ResolvedTarget, *, sets: Sequence[str] = (), resumed: tuple[str, str] | None = None
) -> RunConfigText:
    """The configuration of a launch on `target`. Raises UsageError `config_invalid` or `usage`.

    `sets`: `key=value` of the command line. `resumed`: (text, name) of an earlier run's configuration, which
    then takes the place of `launch.config` and its overrides.
    """
    if resumed is not None:
        text, origin = resumed
        value, _ = parse_strict(text, origin, kind="config_invalid")
        overrides: dict[str, object] = {}
    else:
        text, origin, value = _own_file(target)
        overrides = dict(target.launch.set)
        if target.launch.topology is not None:
            overrides |= {f"topology.{k}": v for k, v in target.launch.topology.model_dump().items()}
    overrides |= dict(parse_set(word) for word in sets)
    if not isinstance(value, dict):
        raise _invalid(origin, "is not a mapping", "a run configuration has keys such as `version` and `target`")
    for key, new in overrides.items():
        _put(value, key, new, origin)
    merged = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True) if overrides else text
    topology = value.get("topology")
    return RunConfigText(
        text=merged,
        written=text if overrides else None,
        origin=origin,
        overrides=overrides,
        topology=topology if isinstance(topology, dict) else {},
    )


def parse_set(word: str) -> tuple[str, object]:
    """`train.steps=100` → (key, value); the value is read as YAML. Raises UsageError `usage`."""
    key, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", key):
        raise UsageError(
            "usage",
            f"`--set {word}` is not KEY=VALUE",
            why="the key is dotted as in the run configuration",
            fix="for example `--set train.steps=100`",
        )
    return key, parse_strict(text, f"--set {key}", kind="usage")[0]


def devices_of(config: RunConfigText, gpus: Sequence[int] | None) -> tuple[str, ...]:
    """The devices a run occupies, by the numbers of nvidia-smi: `cuda:1` is the second of the target's `gpus`.

    Raises UsageError `config_invalid` for a device that is none, or that the target's `gpus` do not have.
    """
    found: dict[str, None] = {}
    for role in ("targets", "drafters"):
        names = config.topology.get(role, DEFAULT_DEVICES)
        for name in names if isinstance(names, list | tuple) else [names]:
            if not isinstance(name, str) or not _DEVICE.fullmatch(name):
                why = f"`topology.{role}` has {name!r}; a device is `cpu` or `cuda:N`"
                raise _invalid(config.origin, "names no device", why)
            found[_physical(name, gpus, config.origin)] = None
    return tuple(found)


def _physical(name: str, gpus: Sequence[int] | None, origin: str) -> str:
    if name == "cpu":
        return name
    index = int(name.partition(":")[2] or 0)
    if gpus is None:
        return f"cuda:{index}"
    if index >= len(gpus):
        listed = ", ".join(map(str, gpus)) or "none"
        why = f"the target's `gpus` are {listed}, so a run sees cuda:0 to cuda:{len(gpus) - 1}"
        raise _invalid(origin, f"uses `{name}`, which the target does not give it", why)
    return f"cuda:{gpus[index]}"


def _own_file(target: ResolvedTarget) -> tuple[str, str, Any]:
    origin = target.launch.config
    if origin is None:
        raise UsageError(
            "config_invalid",
            f"target `{target.name}` has no run configuration",
            why="`launch.config` is not set",
            fix=f"set `launch.config` of `{target.name}` in the inventory to a YAML file",
        )
    path = target.project / Path(origin).expanduser()
    value, _ = load_strict(path, kind="config_invalid", label=origin)
    return path.read_text(encoding="utf-8-sig"), origin, value


def _put(mapping: dict[str, Any], key: str, value: object, origin: str) -> None:
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        below = mapping.setdefault(parent, {})
        if below is None:
            below = mapping[parent] = {}
        if not isinstance(below, dict):
            where = ".".join(parents[: depth + 1])
            raise _invalid(origin, f"has no place for `{key}`", f"`{where}` is {below!r}, not a mapping")
        mapping = below
    mapping[last] = value


def _invalid(origin: str, what: str, why: str) -> UsageError:
    return UsageError("config_invalid", f"{origin} {what}", why=why, fix=f"correct {origin}; nothing was started")
