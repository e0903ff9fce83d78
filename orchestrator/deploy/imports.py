"""What the Python files of a release need: that they parse, and which modules they import.

Nothing is imported or run. Names inside the release are resolved here; all others are for the interpreter of
the target to answer (`facts`).
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.deploy.sources import SourceFile
from orchestrator.terminal import printable

OURS = sys.version_info[:2]
#: The oldest grammar that `ast` can be asked for.
OLDEST_GRAMMAR = (3, 7)
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_CONDITIONS = frozenset({"version_info", "platform", "name"})
#: Fields in which statements hold other statements.
_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")
_DYNAMIC = frozenset({"globals", "exec", "setattr", "__getattr__"})


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong at a place: `dflash_core/train.py:88:17 '(' was never closed`."""

    path: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{printable(self.path)}:{self.line}:{self.column} {printable(self.message)}"


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a file asks for. `guarded`: the file says itself what to do without it."""

    module: str
    names: tuple[str, ...]
    path: str
    line: int
    column: int
    guarded: bool

    def problem(self, message: str) -> Problem:
        return Problem(self.path, self.line, self.column, message)


def is_python(file: SourceFile) -> bool:
    """Named `.py`, or a script without a suffix whose first line names Python."""
    if "." not in file.path.rpartition("/")[2]:
        first = file.data[:200].partition(b"\n")[0]
        return first.startswith(b"#!") and b"python" in first
    return file.path.endswith(".py")


def parse(file: SourceFile, version: tuple[int, int] = OURS) -> ast.Module | Problem:
    """The tree of one file for that Python, or where it does not parse.

    For versions below ours `ast` knows the statements that came later, but not every detail (nested quotes in
    f-strings, for one); the target's own parser looks again before a release becomes current.
    """
    grammar = None if version >= OURS else max(version, OLDEST_GRAMMAR)
    if (null := file.data.find(b"\0")) >= 0:
        return _at_byte(file, null, "null byte: not a text file, or one in UTF-16")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(file.data).readline)
        # `ast` does not look inside comments, the interpreter does when it loads the file.
        file.data.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(file.data, file.path, feature_version=grammar)
    except SyntaxError as error:
        return Problem(file.path, error.lineno or 1, error.offset or 1, error.msg)
    except UnicodeDecodeError as error:
        return _at_byte(file, error.start, f"not {error.encoding}: {error.reason}")
    except (ValueError, RecursionError, MemoryError) as error:
        return Problem(file.path, 1, 1, str(error) or "nested too deeply")


def _at_byte(file: SourceFile, offset: int, message: str) -> Problem:
    line_start = file.data.rfind(b"\n", 0, offset) + 1
    return Problem(file.path, file.data.count(b"\n", 0, offset) + 1, offset - line_start + 1, message)


def imports_of(path: str, tree: ast.Module) -> list[Import]:
    """Every import statement of a file; those for type checkers only are left out, as they never run."""
    return list(_walk(path, tree.body, guarded=False))


def _walk(path: str, body: Iterable[ast.AST], *, guarded: bool) -> Iterator[Import]:
    for node in body:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, (), path, node.lineno, node.col_offset + 1, guarded)
            case ast.ImportFrom(module=module, level=level, names=names):
                dotted = "." * level + (module or "")
                asked = tuple(alias.name for alias in names)
                yield Import(dotted, asked, path, node.lineno, node.col_offset + 1, guarded)
            case ast.Try() | ast.TryStar():
                catches = guarded or any(
                    _names(handler.type) & _IMPORT_ERRORS or handler.type is None for handler in node.handlers
                )
                yield from _walk(path, [*node.body, *node.handlers, *node.orelse], guarded=catches)
                yield from _walk(path, node.finalbody, guarded=guarded)
            case ast.If(test=test):
                tested = _names(test)
                # `if sys.version_info …`, `if os.name …`: written for some targets, perhaps not for this one.
                chosen = guarded or bool({"sys", "os", "platform"} & tested and _CONDITIONS & tested)
                if "TYPE_CHECKING" not in tested:
                    yield from _walk(path, node.body, guarded=chosen)
                yield from _walk(path, node.orelse, guarded=chosen)
            case ast.With(items=items) if any(
                {"suppress"} & _names(item.context_expr) and _IMPORT_ERRORS & _names(item.context_expr)
                for item in items
            ):
                yield from _walk(path, node.body, guarded=True)
            case _:
                inner = [
                    child for name in _BODIES if isinstance(part := getattr(node, name, None), list) for child in part
                ]
                yield from _walk(path, inner, guarded=guarded)


def _names(node: ast.AST | None) -> set[str]:
    """Every identifier in an expression, with the attributes behind dots."""
    if node is None:
        return set()
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)
    }


class ReleaseModules:
    """Modules that the release itself brings, seen from any of its files."""

    def __init__(self, paths: Iterable[str], include: Iterable[str], trees: Mapping[str, ast.Module]) -> None:
        self._paths = frozenset(paths)
        self._folders = frozenset(
            path[:i] for path in self._paths if path.endswith((".py", ".so")) for i, c in enumerate(path) if c == "/"
        )
        self._extensions = frozenset(path.partition(".")[0] for path in self._paths if path.endswith(".so"))
        # What `deploy.include: [src/package]` means for imports: `src` is on the path.
        self._roots = tuple(dict.fromkeys(["", *(entry.strip("/").rpartition("/")[0] for entry in include)]))
        self._trees = trees

    def check(self, wanted: Import) -> Problem | str | None:
        """None if the release has it, a problem if it should and does not, else the name to ask the target for."""
        if wanted.module.startswith("."):
            return self._check_relative(wanted)
        for root in dict.fromkeys([self._own_root(wanted.path), *self._roots]):
            place = self._find(root, wanted.module)
            if place is not None:
                return self._check_names(wanted, place)
            # A folder without `__init__.py`: only what lies in it can be meant.
            folder = _join(root, wanted.module.replace(".", "/"))
            if wanted.names and all(self._find(folder, name) for name in wanted.names):
                return None
        top = wanted.module.partition(".")[0]
        for root in self._roots:
            if self._is_package(_join(root, top)):
                return wanted.problem(f"no module `{wanted.module}` in the release")
        return wanted.module

    def _check_relative(self, wanted: Import) -> Problem | None:
        level = len(wanted.module) - len(wanted.module.lstrip("."))
        parts = wanted.path.split("/")[:-1]
        if level > len(parts):
            return wanted.problem(f"`{wanted.module}` leads out of the release")
        folder = "/".join(parts[: len(parts) - level + 1])
        place = self._find(folder, wanted.module.lstrip("."))
        if place is None:
            return wanted.problem(f"no module `{wanted.module}` in the release")
        return self._check_names(wanted, place)

    def _check_names(self, wanted: Import, place: str) -> Problem | None:
        """`from package import name`: a submodule, or a name that the package binds."""
        initial = _join(place, "__init__.py")
        if place not in self._folders or (initial in self._paths and initial not in self._trees):
            return None
        bound = _bound_names(self._trees[initial]) if initial in self._trees else set()
        if bound is None:
            return None
        for name in wanted.names:
            if name != "*" and name not in bound and self._find(place, name) is None:
                return wanted.problem(f"no `{name}` in `{wanted.module}` of the release")
        return None

    def _own_root(self, path: str) -> str:
        folder = path.rpartition("/")[0]
        while folder and self._is_package(folder):
            folder = folder.rpartition("/")[0]
        return folder

    def _is_package(self, folder: str) -> bool:
        return _join(folder, "__init__.py") in self._paths

    def _find(self, root: str, dotted: str) -> str | None:
        """Path (without suffix) of a module below `root`. A folder without `__init__.py` is one only on the way."""
        place = _join(root, dotted.replace(".", "/")) if dotted else root
        is_module = f"{place}.py" in self._paths or place in self._extensions or self._is_package(place)
        return place if is_module or (not dotted and place in self._folders) else None


def _bound_names(tree: ast.Module) -> set[str] | None:
    """Names that a module binds at its top level, or None when they cannot be known without running it."""
    bound: set[str] = {"__all__", "__doc__", "__file__", "__name__", "__path__"}
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
                continue
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in names}
            case ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case ast.Name(id=name) if name in _DYNAMIC:
                return None
        pending += ast.iter_child_nodes(node)
    return None if {"*"} & bound or bound & _DYNAMIC else bound


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
