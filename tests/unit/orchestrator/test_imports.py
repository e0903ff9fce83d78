"""Every Python file parses for the target, and every import is there, or we say where it is not."""

from __future__ import annotations

import ast
import hashlib
import sys

import pytest

from orchestrator.deploy.checks import examine
from orchestrator.deploy.imports import Import, Problem, ReleaseModules, imports_of, is_python, parse
from orchestrator.deploy.sources import Entry, SourceFile, Sources


def file(path: str, text: str | bytes) -> SourceFile:
    data = text.encode() if isinstance(text, str) else text
    return SourceFile(path, data, Entry(hashlib.sha256(data).hexdigest(), len(data), 0o644))


def problem(text: str | bytes, version: tuple[int, int] = sys.version_info[:2]) -> str:
    found = parse(file("pkg/a.py", text), version)
    assert isinstance(found, Problem)
    return str(found)


def absent(files: dict[str, str], include: tuple[str, ...] = ("pkg",)) -> list[str]:
    sources = Sources({path: file(path, text) for path, text in files.items()})
    return [str(found) for _, found in examine(sources, include).absent]


def wanted(text: str) -> dict[str, bool]:
    """Module → guarded."""
    return {item.module: item.guarded for item in imports_of("a.py", ast.parse(text))}


# --- syntax -------------------------------------------------------------------------------------------------------


def test_the_place_of_a_syntax_error() -> None:
    assert problem("x = 1\n\ndef f(:\n") == "pkg/a.py:3:7 invalid syntax"
    assert problem("y = (1,\n").startswith("pkg/a.py:1:5 '(' was never closed")


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("match x:\n    case 1: pass\n", (3, 10)),
        ("try: pass\nexcept* ValueError: pass\n", (3, 11)),
        ("if (n := 1): pass\n", (3, 8)),
        ("def f(a, /): pass\n", (3, 8)),
    ],
)
def test_statements_that_the_targets_python_does_not_know_yet(text: str, since: tuple[int, int]) -> None:
    assert isinstance(parse(file("a.py", text), since), ast.Module)
    assert problem(text, (3, since[1] - 1)).startswith("pkg/a.py:")


def test_a_target_newer_than_ours_gets_our_whole_grammar() -> None:
    assert isinstance(parse(file("a.py", "def f(a, /): pass\n"), (3, 99)), ast.Module)


def test_bytes_that_are_no_source() -> None:
    assert problem("a = 1\nb = '\0'\n") == "pkg/a.py:2:6 null byte: not a text file, or one in UTF-16"
    assert problem(b"a = 1\n# \xff\n") == "pkg/a.py:2:3 not utf-8: invalid start byte"
    assert "pkg/a.py:1:1" in problem(b"\xff\xfe#\n")
    assert "unknown encoding" in problem(b"# -*- coding: nonsense -*-\n")
    assert problem("(" * 5000).startswith("pkg/a.py:1:")


def test_declared_encodings_and_marks_are_understood() -> None:
    assert isinstance(parse(file("a.py", b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")), ast.Module)
    assert isinstance(parse(file("a.py", b"\xef\xbb\xbfx = 1\n")), ast.Module)


def test_scripts_without_a_suffix_count_as_python() -> None:
    assert is_python(file("bin/tool", "#!/usr/bin/env python3\n")) and is_python(file("a.py", ""))
    assert not is_python(file("bin/tool", "#!/bin/sh\n")) and not is_python(file("a.txt", "#!/usr/bin/python\n"))


# --- which imports count ------------------------------------------------------------------------------------------


def test_guards() -> None:
    assert wanted("import a.b, c\nfrom d.e import f") == {"a.b": False, "c": False, "d.e": False}
    assert wanted("try:\n import a\nexcept ImportError:\n import b") == {"a": True, "b": True}
    assert wanted("try:\n import a\nexcept (OSError, ModuleNotFoundError):\n pass") == {"a": True}
    assert wanted("try:\n import a\nexcept ValueError:\n pass") == {"a": False}
    assert wanted("try:\n pass\nexcept ImportError:\n pass\nfinally:\n import a") == {"a": False}
    assert wanted("with contextlib.suppress(ImportError):\n import a") == {"a": True}
    assert wanted("with open('x') as f:\n import a") == {"a": False}


def test_conditions() -> None:
    assert wanted("if TYPE_CHECKING:\n import a\nelse:\n import b") == {"b": False}
    assert wanted("if typing.TYPE_CHECKING:\n import a") == {}
    assert wanted("if sys.version_info < (3, 11):\n import a") == {"a": True}
    assert wanted("if sys.platform == 'win32':\n import a") == {"a": True}
    assert wanted("if __name__ == '__main__':\n import a") == {"a": False}


def test_an_import_in_a_function_or_class_fails_as_surely_only_later() -> None:
    assert wanted("def f():\n  import a\nclass C:\n  async def g(self):\n    import b") == {"a": False, "b": False}
    assert wanted("def f():\n  try:\n    import a\n  except ImportError:\n    a = None") == {"a": True}
    assert wanted("match x:\n  case 1:\n    import a\nfor y in z:\n  import b\nelse:\n  import c") == dict.fromkeys(
        "abc", False
    )


# --- inside the release -------------------------------------------------------------------------------------------


def test_relative_and_absolute_imports_within_the_release() -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/a.py": "from . import b, sub\nfrom .sub import c, name\nfrom .sub.c import whatever\nimport pkg.sub.c",
        "pkg/b.py": "",
        "pkg/sub/__init__.py": "name = 1\n",
        "pkg/sub/c.py": "from .. import b\nfrom ..b import x\nfrom pkg import a\n",
    }
    assert absent(files) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from . import gone", "pkg/a.py:1:1 no `gone` in `.` of the release"),
        ("\nfrom .gone import x", "pkg/a.py:2:1 no module `.gone` in the release"),
        ("import pkg.gone", "pkg/a.py:1:1 no module `pkg.gone` in the release"),
        ("from pkg.gone import x", "pkg/a.py:1:1 no module `pkg.gone` in the release"),
        ("from pkg import gone", "pkg/a.py:1:1 no `gone` in `pkg` of the release"),
        ("from ... import x", "pkg/a.py:1:1 `...` leads out of the release"),
    ],
)
def test_what_the_release_should_have_and_has_not(text: str, message: str) -> None:
    assert absent({"pkg/__init__.py": "version = 1\n", "pkg/a.py": text}) == [message]


@pytest.mark.parametrize(
    "initial",
    [
        "def made(): pass", "class made: pass", "made = 1", "import x as made", "from .b import made", "made: int = 1",
        "try:\n    made = 1\nexcept ImportError:\n    made = 2", "if x:\n    (a, made) = 1, 2", "for made in x: pass",
        "with x as made: pass", "from .b import *", "def __getattr__(name): ...", "globals()['made'] = 1",
    ],
)  # fmt: skip
def test_names_that_a_package_binds_are_found(initial: str) -> None:
    assert absent({"pkg/__init__.py": initial, "pkg/b.py": "made = 1", "pkg/a.py": "from pkg import made"}) == []


def test_names_inside_functions_are_not_the_packages() -> None:
    found = absent({"pkg/__init__.py": "def f():\n    made = 1\n", "pkg/a.py": "from pkg import made"})
    assert found == ["pkg/a.py:1:1 no `made` in `pkg` of the release"]


def test_scripts_find_their_neighbours_and_the_roots_of_the_include_list() -> None:
    files = {
        "demo/run.py": "import helper\nimport pkg.a\nfrom demo import helper\nimport inner",
        "demo/helper.py": "",
        "src/pkg/__init__.py": "",
        "src/pkg/a.py": "",
        "src/inner.py": "",
    }
    sources = Sources({path: file(path, text) for path, text in files.items()})
    examined = examine(sources, ["demo", "src/pkg", "src/inner.py"])
    assert examined.absent == () and examined.modules == set()


def test_a_folder_without_init_does_not_hide_an_installed_package() -> None:
    files = {"yaml/notes.py": "", "pkg/__init__.py": "", "pkg/a.py": "import yaml\nfrom yaml import safe_load"}
    sources = Sources({path: file(path, text) for path, text in files.items()})
    assert examine(sources, ["pkg", "yaml"]).modules == {"yaml"}


def test_compiled_modules_count() -> None:
    modules = ReleaseModules(["pkg/__init__.py", "pkg/fast.cpython-311-x86_64-linux-gnu.so"], ["pkg"], {})
    assert modules.check(Import("pkg.fast", (), "pkg/__init__.py", 1, 1, False)) is None


def test_the_rest_is_for_the_target_to_answer() -> None:
    text = "import torch.nn\nfrom numpy.linalg import norm\nimport os\nfrom __future__ import annotations"
    sources = Sources({"pkg/a.py": file("pkg/a.py", text)})
    assert examine(sources, ["pkg"]).modules == {"torch.nn", "numpy.linalg", "os", "__future__"}
