"""The files a new project starts with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from orchestrator import resources
from orchestrator.errors import PreflightError, UsageError
from orchestrator.inventory.docs import render_example
from orchestrator.inventory.locate import OWN

RUN = Path("run.yaml")


def write_starter(project: Path) -> list[Path]:
    """Write inventory/dfo.yaml, and run.yaml unless there is one. Each appears whole or not at all.

    Returns the paths written, relative to `project`. Raises UsageError `file_exists` when there is an inventory
    already, and PreflightError `not_permitted` when the folder cannot be written.
    """
    try:
        (project / OWN).parent.mkdir(exist_ok=True)
        _create(project / OWN, render_example())
    except FileExistsError:
        raise UsageError(
            "file_exists",
            f"{OWN} is already there",
            why="dfo never overwrites an inventory",
            fix="edit it (`dfo config docs` explains the keys), or move it away first",
        ) from None
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        fix = "check the rights of this folder"
        raise PreflightError("not_permitted", f"cannot write {OWN}", why=why, fix=fix) from error
    if (project / RUN).exists():
        return [OWN]
    _create(project / RUN, (resources.bundled("templates") / RUN).read_text(encoding="utf-8"))
    return [OWN, RUN]


def _create(path: Path, text: str) -> None:
    """A new file, linked into place when it is complete. Raises FileExistsError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        Path(file.name).chmod(0o644)
        os.link(file.name, path)
