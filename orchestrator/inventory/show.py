"""The values of a target as `dfo config show` prints them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from orchestrator.inventory.check import dotted
from orchestrator.inventory.docs import one_line
from orchestrator.inventory.resolve import Resolution
from orchestrator.inventory.secrets import MASK, Secret
from orchestrator.inventory.strict_yaml import KeyPath


@dataclass(frozen=True, slots=True)
class Row:
    """One value: as JSON, as one short line, and its origin."""

    key: str
    value: Any
    text: str
    origin: str


def rows(resolution: Resolution) -> list[Row]:
    """Every single value, sorted by key. Of a secret, only its source is told."""
    result = []
    for path, value in sorted(resolution.values.items(), key=lambda item: dotted(item[0])):
        secret = _secret_at(resolution, path)
        shown = f"{MASK} ({secret.source})" if isinstance(secret, Secret) else value.value
        text = shown if isinstance(shown, str) else "unset" if shown is None else one_line(shown)
        result.append(Row(dotted(path), shown, textwrap.shorten(text, 60, placeholder=" …"), value.origin))
    return result


def _secret_at(resolution: Resolution, path: KeyPath) -> object:
    target = resolution.target
    if path == ("pct", "api", "token"):
        return target.pct and target.pct.api.token
    return target.env.get(str(path[-1])) if path[0] == "env" else None
