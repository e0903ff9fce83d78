"""Whether sources will run on the target: parsed for its Python, imports resolved against what it really has.

`examine` needs no connection; `judge` needs the facts that were asked for with its result.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.deploy.facts import Facts, Python
from orchestrator.deploy.imports import OURS, Import, Problem, ReleaseModules, imports_of, is_python, parse
from orchestrator.deploy.sources import SourceFile, Sources
from orchestrator.errors import SourceError
from orchestrator.terminal import printable
from orchestrator.words import count

Version = tuple[int, int]


@dataclass(frozen=True)
class Examined:
    """`broken`: files that this laptop's Python cannot parse. `wanted`: imports that only the target can answer.
    `absent`: imports of modules that the release should have itself.
    """

    python: tuple[SourceFile, ...]
    broken: dict[str, Problem]
    wanted: tuple[Import, ...]
    absent: tuple[tuple[Import, Problem], ...]

    @property
    def modules(self) -> set[str]:
        return {wanted.module for wanted in self.wanted}

    @property
    def unparsed(self) -> dict[str, bytes]:
        return {file.path: file.data for file in self.python if file.path in self.broken}


@dataclass(frozen=True)
class Judged:
    """The sources pass. `reparse`: Python files whose last word the target's own parser has."""

    num_python: int
    warnings: tuple[str, ...]
    reparse: tuple[str, ...]


def examine(sources: Sources, include: Iterable[str]) -> Examined:
    """Parse every Python file and sort its imports."""
    with _no_collections():
        return _examine(sources, include)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Trees are many objects without cycles, and looking for some in them takes longer than parsing (2.4 s, now 0.8,
    for 500 files).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _examine(sources: Sources, include: Iterable[str]) -> Examined:
    python = tuple(file for file in sources.files.values() if is_python(file))
    trees: dict[str, ast.Module] = {}
    broken: dict[str, Problem] = {}
    for file in python:
        tree = parse(file)
        if isinstance(tree, Problem):
            broken[file.path] = tree
        else:
            trees[file.path] = tree
    modules = ReleaseModules(sources.files, include, trees)
    wanted, absent = [], []
    for path, tree in trees.items():
        for item in imports_of(path, tree):
            answer = modules.check(item)
            if isinstance(answer, Problem):
                absent.append((item, answer))
            elif answer is not None:
                wanted.append(item)
    return Examined(python, broken, tuple(wanted), tuple(absent))


def judge(examined: Examined, facts: Facts, *, target: str, version: Version | None = None) -> Judged:
    """Raise SourceError, or say what is worth a warning. `version`: check for this Python instead of the target's."""
    grammar = version or facts.python.minor
    _check_syntax(examined, facts, grammar)
    warnings = [
        f"{printable(path)}: only the target's Python {facts.python} can parse it; its imports were not checked"
        for path in examined.broken
    ]
    warnings += _check_absent(examined.absent)
    warnings += _check_wanted(examined.wanted, facts, target)
    reparse = tuple(file.path for file in examined.python) if facts.python.minor != OURS else ()
    return Judged(len(examined.python), tuple(warnings), reparse)


def _check_syntax(examined: Examined, facts: Facts, grammar: Version) -> None:
    problems = []
    for file in examined.python:
        if file.path in examined.broken:
            verdict = facts.parsed.get(file.path)
            # The target's parser is the one that counts; ours may only be too old.
            problems += [Problem(file.path, *verdict)] if verdict is not None else []
        elif grammar < OURS and isinstance(found := parse(file, grammar), Problem):
            problems.append(found)
    if problems:
        number, verb = len(problems), "does" if len(problems) == 1 else "do"
        raise SourceError(
            "syntax_error",
            f"{number} of {count(len(examined.python), 'Python file')} {verb} not parse with Python "
            f"{grammar[0]}.{grammar[1]}",
            why=_first_of(problems),
            fix="correct it; nothing was sent" if number == 1 else "correct them; nothing was sent",
            problems=[str(problem) for problem in problems],
        )


def _check_absent(absent: Sequence[tuple[Import, Problem]]) -> list[str]:
    errors = [problem for item, problem in absent if not item.guarded]
    if errors:
        raise SourceError(
            "missing_module",
            f"{count(len(errors), 'import')} of the release's own modules cannot work",
            why=_first_of(errors),
            fix="correct the import, or see that `deploy.include` and the ignore files let the module through",
            problems=[str(problem) for problem in errors],
        )
    return [f"{problem} (the import is guarded)" for _, problem in absent]


def _check_wanted(wanted: Sequence[Import], facts: Facts, target: str) -> list[str]:
    missing = [item for item in wanted if item.module in facts.modules.missing]
    # One import speaks for each module: the first one that nothing guards, else the first.
    first = {item.module: item for item in sorted(missing, key=lambda i: (i.guarded, i.path, i.line), reverse=True)}
    errors = {module: item for module, item in sorted(first.items()) if not item.guarded}
    if errors:
        problems = [item.problem(f"imports `{name}`: {facts.modules.missing[name]}") for name, item in errors.items()]
        what = f"module `{next(iter(errors))}` is" if len(errors) == 1 else f"{len(errors)} modules are"
        raise SourceError(
            "missing_module",
            f"{what} missing on `{target}`",
            why=f"{_first_of(problems)} for `{facts.python.executable}` ({facts.python})",
            fix=_how_to_get({name.partition(".")[0] for name in errors}, facts.python),
            modules=sorted(errors),
            problems=[str(problem) for problem in problems],
        )
    return [
        str(item.problem(f"`{name}` is missing on `{target}` (the import is guarded)"))
        for name, item in sorted(first.items())
    ]


def _how_to_get(modules: set[str], python: Python) -> str:
    other = modules & sys.stdlib_module_names
    if other:
        names = ", ".join(f"`{name}`" for name in sorted(other))
        ours = f"Python {OURS[0]}.{OURS[1]}"
        return f"{ours} brings {names}, {python} does not: guard the import, or use another Python there"
    return f"install it there: `{python.executable} -m pip install {' '.join(sorted(modules))}` (or what brings it)"


def _first_of(problems: Sequence[Problem]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"
