"""Which run and which target the words of a command line name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunChoice:
    """What a command line names: a run (None: the newest) and a target (None: the usual one)."""

    run: int | None
    target: str | None


def parse_run(words: Sequence[str], *, target: str | None = None) -> RunChoice:
    """Tell RUN from TARGET among the positional words of `status`, `logs`, `stop` and `pull`.

    A word of digits is a run, anything else is a target; the order is free (`57 lab`, `lab 57`). `target` is
    the value of `-t`, which must not contradict a positional one. Raises UsageError `usage`.
    """
    runs = [word for word in words if word.isascii() and word.isdigit()]
    names = [word for word in words if word not in runs]
    if target is not None and target not in names:
        names.append(target)
    for found, what in ((runs, "run"), (names, "target")):
        if len(found) > 1:
            raise UsageError(
                "usage",
                f"more than one {what}: {', '.join(f'`{word}`' for word in found)}",
                why=f"this command works on one {what} at a time (a word of digits is a run, others a target)",
                fix=f"name one {what}, for example `{found[0]}`",
            )
    return RunChoice(int(runs[0]) if runs else None, names[0] if names else None)
