"""Which paths git's own rules leave out: `.gitignore` and `.dfoignore`, in every folder from the project down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pathspec

from orchestrator.errors import SourceError

#: Never worth shipping. Weaker than any pattern of the user: `!.env` in `.dfoignore` ships that file.
DEFAULT_IGNORES = (
    ".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", "node_modules", "*.egg-info",
    "__pycache__", "*.py[co]", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache",
    ".ipynb_checkpoints", ".idea", ".vscode", ".DS_Store", ".dfo", ".env",
)  # fmt: skip


@dataclass(frozen=True)
class IgnoreRules:
    """Patterns per folder, outermost first. The last match wins, and deeper folders come later.

    Paths are relative to the folder that the rules began in, with `/`, and end in `/` for folders.
    """

    layers: tuple[tuple[str, pathspec.GitIgnoreSpec], ...]
    names: tuple[str, ...]

    @classmethod
    def default(cls, names: Sequence[str]) -> IgnoreRules:
        """Only the built-in patterns; `names` are the files to look for in each folder, weakest first."""
        return cls((("", pathspec.GitIgnoreSpec.from_lines(DEFAULT_IGNORES)),), tuple(names))

    def entering(self, folder: Path, prefix: str) -> IgnoreRules:
        """The rules inside `folder`, whose relative path is `prefix` (empty, or ending in `/`)."""
        found = [(prefix, spec) for name in self.names if (spec := _read(folder / name)) is not None]
        return IgnoreRules((*self.layers, *found), self.names) if found else self

    def ignores(self, path: str) -> bool:
        for prefix, spec in reversed(self.layers):
            include = spec.check_file(path.removeprefix(prefix)).include
            if include is not None:
                return include
        return False


def _read(path: Path) -> pathspec.GitIgnoreSpec | None:
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        return pathspec.GitIgnoreSpec.from_lines(text.splitlines())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SourceError(
            "unreadable_source",
            f"cannot use the ignore file `{path}`",
            why=str(error),
            fix="correct it or its rights; its patterns follow git's rules (`git help gitignore`)",
        ) from error
