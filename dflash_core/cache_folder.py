"""Where derived files that can be rebuilt at any time are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder for one kind of rebuildable files; it is not created here.

    `DFLASH_CACHE_DIR` wins, else `XDG_CACHE_HOME/dflash`, else `~/.cache/dflash`. Everything in it may be deleted.
    """
    root = os.environ.get("DFLASH_CACHE_DIR")
    if root:
        return Path(root) / name
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash" / name
