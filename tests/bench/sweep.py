"""Removes what a killed test run left: empty folders and control groups. Its processes and mounts ended with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "dfo-bench-"


def name() -> str:
    """How things of this test run begin, so that a later run can tell whether it still lives."""
    return f"{PREFIX}{os.getpid()}-"


def sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"):
        if not _lives(folder.name.removeprefix(PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)
    for group in _groups("[0-9]*-*"):
        if not _lives(group.name):
            remove_group(group)


def remove_groups(token: str) -> None:
    """LXC leaves its empty control groups behind when it is killed, as it is when a node ends."""
    for group in _groups(token):
        remove_group(group)


def remove_group(group: Path) -> None:
    for folder, _, _ in sorted(os.walk(group), reverse=True):
        with suppress(OSError):
            Path(folder).rmdir()


def _groups(pattern: str) -> list[Path]:
    top = Path("/sys/fs/cgroup")
    return [*top.glob(f"*/dfo-bench/{pattern}"), *top.glob(f"dfo-bench/{pattern}")]


def _lives(token: str) -> bool:
    return Path("/proc", token.split("-")[0]).exists()
