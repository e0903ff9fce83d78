"""Files that travel with the installed package: templates, the embedded inventory, and the core's sources.

In a wheel they lie under `orchestrator/_bundled`; in an editable checkout, at the root of the repository.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
#: Entries of `deploy.include` that the installation itself can supply.
BUNDLED = ("dflash_core", "templates")


def bundled(name: str) -> Path:
    """The installed copy of `inventory`, `templates` or `dflash_core`."""
    if name == "dflash_core":
        # Found, never imported: the laptop has no torch.
        spec = find_spec(name)
        assert spec is not None and spec.submodule_search_locations, "dflash_core is part of this distribution"
        return Path(next(iter(spec.submodule_search_locations)))
    inside = _PACKAGE / "_bundled" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def locate(entry: str, *, project: Path) -> Path | None:
    """Where a relative path of the inventory (`dflash_core`, `templates/launch.sh.j2`) really lies.

    The project's own copy wins; else the installed one of what is bundled; else None.
    """
    own = project / entry
    if own.exists():
        return own
    first, _, rest = entry.partition("/")
    if first not in BUNDLED:
        return None
    installed = bundled(first) / rest
    return installed if installed.exists() else None
