"""Durations and sizes as people write them: `20m`, `50MB`. A bare number has no unit and is refused."""

from __future__ import annotations

import re

DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)$"
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)?(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)$"

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_duration(text: object) -> float:
    """Seconds in `5s`, `20m`, `1.5h`, `2d`, `250ms`. Raises ValueError."""
    number, unit = _split(text, DURATION_PATTERN, "a duration with its unit, such as 30s, 20m or 2h")
    return number * _SECONDS[unit]


def parse_size(text: object) -> int:
    """Bytes in `50MB` (10^6 each) or `64MiB` (2^20 each). Raises ValueError."""
    number, unit = _split(text, SIZE_PATTERN, "a size with its unit, such as 500kB, 50MB or 2GiB")
    return int(number * _BYTES[unit])


def _split(text: object, pattern: str, expected: str) -> tuple[float, str]:
    match = re.match(pattern, text) if isinstance(text, str) else None
    if match is None or not isinstance(text, str):
        raise ValueError(f"must be {expected}")
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)), unit


def format_duration(seconds: float) -> str:
    """The shortest exact spelling: 1200 → `20m`, 0.25 → `250ms`."""
    for unit in ("d", "h", "m", "s", "ms"):
        number = seconds / _SECONDS[unit]
        if number >= 1 and number == int(number):
            return f"{int(number)}{unit}"
    return f"{seconds:g}s"


def format_size(size: int) -> str:
    """The shortest exact spelling: 50000000 → `50MB`, 1024 → `1KiB`."""
    for unit in ("TB", "TiB", "GB", "GiB", "MB", "MiB", "kB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit}"
    return f"{size}B"
