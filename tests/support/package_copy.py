"""A copy of the trainer's sources at another place, as a second release is."""

from __future__ import annotations

import shutil
from pathlib import Path

import dflash_core


def copy_package(folder: Path) -> Path:
    """`dflash_core` below `folder`; returns the package."""
    source = Path(dflash_core.__file__).parent
    return Path(shutil.copytree(source, folder / "dflash_core", ignore=shutil.ignore_patterns("__pycache__")))
