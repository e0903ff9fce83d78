"""Several mistakes of one file, told in one error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from orchestrator.errors import UsageError


@dataclass(frozen=True, slots=True)
class Problem:
    """`where` is `file:line:column`, or the variable or flag that is to blame."""

    where: str
    what: str
    why: str


def invalid(source: str, problems: Sequence[Problem], *, kind: str, fix: str) -> UsageError:
    """One error for all problems; `source` names the file."""
    assert problems
    problems = sorted(problems, key=_place)
    details = [asdict(problem) for problem in problems]
    if len(problems) == 1:
        only = problems[0]
        return UsageError(kind, f"{only.where} {only.what}", why=only.why, fix=fix, problems=details)
    why = "\n".join(f"{p.where.removeprefix(source + ':')} {p.what}: {p.why}" for p in problems)
    return UsageError(kind, f"{source} has {len(problems)} problems", why=why, fix=fix, problems=details)


def _place(problem: Problem) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r":(\d+)", problem.where)[-2:])
