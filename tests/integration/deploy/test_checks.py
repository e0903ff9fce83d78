"""What the target is asked before anything is sent: its modules, its parser, its rights; with several Pythons."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.deploy import release
from orchestrator.deploy.plan import Action
from orchestrator.errors import PreflightError, SourceError
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

from .bench import Bench


def source_error(bench: Bench) -> SourceError:
    with pytest.raises(SourceError) as caught:
        bench.plan()
    return caught.value


def test_a_missing_module_is_found_with_file_and_line_before_anything_is_sent(bench: Bench) -> None:
    bench.write("pkg/model.py", "import os\n\nimport no_such_module.part\n")
    error = source_error(bench)
    assert error.kind == "missing_module" and "`no_such_module.part`" in error.what
    assert error.why.startswith("pkg/model.py:3:1 ") and sys.executable in error.fix
    assert not bench.root.exists()


def test_missing_submodules_are_confirmed_by_the_target(bench: Bench) -> None:
    bench.write("pkg/model.py", "import os.path, xml.etree.ElementTree, concurrent.futures, importlib.metadata, json\n")
    assert bench.plan().num_python == 3
    bench.write("pkg/model.py", "import json.nothing_there\n")
    assert "json.nothing_there" in source_error(bench).what


def test_guarded_imports_are_warnings(bench: Bench) -> None:
    bench.write("pkg/model.py", "try:\n    import no_such_module\nexcept ImportError:\n    pass\n")
    assert bench.plan().warnings == ("pkg/model.py:2:5 `no_such_module` is missing on `lab` (the import is guarded)",)
    bench.write("pkg/old.py", "import no_such_module\n")
    assert source_error(bench).why.startswith("pkg/old.py:1:1 ")


def test_modules_are_also_looked_for_where_the_runs_find_them(bench: Bench, tmp_path: Path) -> None:
    bench.write("pkg/model.py", "import dfo_test_extra\nimport dfo_test_extra.part\n")
    (tmp_path / "extra/dfo_test_extra").mkdir(parents=True)
    for name in ("__init__", "part"):
        (tmp_path / f"extra/dfo_test_extra/{name}.py").touch()
    assert "`dfo_test_extra" in source_error(bench).why
    sources, examined = release.read_sources(bench.project, bench.config)
    extra = str(tmp_path / "extra")
    assert release.plan_deploy(bench.session(), sources, examined, bench.config, python_path=extra).has_work


def test_a_syntax_error_names_the_place(bench: Bench) -> None:
    bench.write("pkg/model.py", "x = [\n")
    error = source_error(bench)
    assert error.kind == "syntax_error" and error.why == "pkg/model.py:1:5 '[' was never closed"
    assert "1 of 3 Python files" in error.what


def test_sources_are_checked_for_the_python_that_the_inventory_names(bench: Bench) -> None:
    bench.write("pkg/model.py", "match 1:\n    case 1: pass\n")
    assert bench.plan().has_work
    bench.config = bench.config.model_copy(update={"python_version": "3.9"})
    assert "Python 3.9" in source_error(bench).what


def test_facts_of_an_empty_target(bench: Bench) -> None:
    facts = bench.facts()
    assert facts.python.minor == sys.version_info[:2] and facts.root.free_bytes > 0
    assert (facts.current, facts.releases, facts.lock, facts.runs) == (None, [], None, [])
    assert facts.root.place == str(bench.root.parent) and not facts.root.exists
    assert "Python 3." in facts.summary()


@pytest.mark.parametrize("kind", ["file", "current"])
def test_a_root_that_cannot_be_one(bench: Bench, kind: str) -> None:
    if kind == "file":
        bench.root.write_text("")
    else:
        (bench.root / "current").mkdir(parents=True)
    with pytest.raises(PreflightError) as caught:
        bench.plan()
    assert caught.value.kind == "root_unusable"


# --- other Pythons ------------------------------------------------------------------------------------------------


def other_python(minor: int) -> str:
    """An interpreter of that version on this machine, or the test is skipped."""
    places = [
        shutil.which(f"python3.{minor}"),
        *map(str, Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/python")),
    ]
    for place in filter(None, places):
        probe = [place, "-c", "import sys; sys.exit(sys.version_info[1])"]
        if subprocess.run(probe, capture_output=True).returncode == minor:
            return place
    pytest.skip(f"NO PYTHON 3.{minor} ON THIS MACHINE to play the target")


@pytest.mark.parametrize("minor", [minor for minor in range(8, 15) if minor != sys.version_info[1]])
def test_a_target_with_another_python(bench: Bench, minor: int) -> None:
    session = Session("lab", LocalTransport(), str(bench.root), other_python(minor))
    bench.deploy(session)
    assert bench.plan(session).action is Action.NOTHING
    # `x[*a]` is new in 3.11, and `ast` cannot be asked about it for older versions: the target finds it.
    bench.write("pkg/model.py", "def f(x, *a):\n    return x[*a]\n")
    if minor < 11:
        with pytest.raises(SourceError) as caught:
            bench.deploy(session)
        assert caught.value.why.startswith("pkg/model.py:2:") and bench.traces() == []
    else:
        bench.deploy(session)
    # Quotes inside quotes are new in 3.12: whoever parses them decides.
    bench.write("pkg/model.py", "d = {'a': 1}\nprint(f'{d['a']}')\n")
    if minor < 12:
        with pytest.raises(SourceError):
            bench.plan(session)
    else:
        bench.deploy(session)


def test_a_python_that_is_too_old_for_us_is_named(bench: Bench) -> None:
    session = Session("lab", LocalTransport(), str(bench.root), other_python(7))
    with pytest.raises(PreflightError) as caught:
        bench.plan(session)
    assert caught.value.kind == "old_python" and "is 3.7" in caught.value.why
