"""The programs that run inside the target, as text: what they may not contain, and how they are put together."""

from __future__ import annotations

import ast
from importlib.resources import files

import pytest

from orchestrator.remote.wire import source_of

FOLDER = files("orchestrator.remote") / "programs"
SOURCES = {item.name.removesuffix(".py"): item.read_text() for item in FOLDER.iterdir() if item.name.endswith(".py")}
PROGRAMS = sorted(name for name, text in SOURCES.items() if not name.startswith("_") and "\n_main(work)" in text)


def names_in(tree: ast.Module) -> list[str]:
    """Functions, classes and variables of the top level."""
    found = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.append(name)
            case ast.Assign(targets=targets):
                found += [target.id for target in targets if isinstance(target, ast.Name)]
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_one_source_for_python_3_8_without_clashes(program: str) -> None:
    tree = ast.parse(source_of(program), feature_version=(3, 8))
    names = names_in(tree)
    assert sorted(set(names)) == sorted(names), "a fragment and its user define the same name"
    assert names.count("work") == 1


def test_fragments_come_once_and_before_those_who_use_them() -> None:
    source = source_of("apply").decode()
    places = [source.index(SOURCES[name]) for name in ("_base", "_lock", "_runs", "_release", "apply")]
    assert places == sorted(places)
    assert source.count("def held_lock(") == source.count("def alive_runs(") == 1


def test_there_are_programs() -> None:
    assert {"facts", "apply", "activate", "releases", "lock", "audit"} <= set(PROGRAMS)
