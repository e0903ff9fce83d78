"""Numbers as people read them, and what a check of data complains about."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def size(num_bytes: float) -> str:
    """`812 B`, `41 KB`, `3.9 MB`, `2.1 GB` (steps of 1000, as disks are sold)."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    power = next((p for p in (1, 2, 3) if num_bytes < 999.5 * 1000**p), 4)
    value = num_bytes / 1000**power
    return f"{value:.{0 if power == 1 or value >= 99.5 else 1}f} {('KB', 'MB', 'GB', 'TB')[power - 1]}"


def ago(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h`, `2 d`."""
    seconds = max(0.0, seconds)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 file`, `2 files`, `3,000 files`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def token_rate(tokens_per_s: float) -> str:
    """`950 tok/s`, `41.2k tok/s`."""
    return f"{tokens_per_s / 1000:.1f}k tok/s" if tokens_per_s >= 1000 else f"{tokens_per_s:.0f} tok/s"


def first_problem(error: ValidationError) -> str:
    """`releases.0.id: Field required`: the first thing that is wrong, and where."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
