"""Guessing what somebody meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is most likely a slip of, or None."""
    options = list(choices)
    by_lower = {option.lower().replace("_", "-"): option for option in options}
    close = get_close_matches(word.lower().replace("_", "-"), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None
