"""Which inventory file is meant."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator import resources
from orchestrator.errors import DfoError, UsageError

OWN = Path("inventory/dfo.yaml")
EMBEDDED = Path("inventory/local.yaml")
_ADVICE = "`dfo init` writes one of your own"


@dataclass(frozen=True, slots=True)
class Found:
    """An inventory file: `name` is how messages call it, `why` it is this one, `project` where its relative
    paths start.
    """

    path: Path
    name: str
    project: Path
    why: str = ""

    @property
    def label(self) -> str:
        """`inventory/local.yaml (why)`."""
        return f"{self.name} ({self.why})" if self.why else self.name


def find_inventory(option: Path | None = None, *, environ: Mapping[str, str], cwd: Path | None = None) -> Found:
    """`--inventory`, else DFO_INVENTORY, else inventory/dfo.yaml, else inventory/local.yaml.

    The last one is the embedded default: the project's own copy, or the one that was installed with dfo.
    Raises UsageError `inventory_missing` when the file that was asked for does not exist.
    """
    here = Path.cwd() if cwd is None else cwd
    if option is not None:
        return _asked_for(here, option, "--inventory")
    if name := environ.get("DFO_INVENTORY"):
        return _asked_for(here, Path(name), "DFO_INVENTORY")
    if (here / OWN).is_file():
        return Found(here / OWN, str(OWN), here)
    if (here / EMBEDDED).is_file():
        return Found(here / EMBEDDED, str(EMBEDDED), here, f"the embedded default; {_ADVICE}")
    installed = resources.bundled("inventory") / EMBEDDED.name
    return Found(installed, str(EMBEDDED), here, f"the embedded default, as installed; {_ADVICE}")


def _asked_for(here: Path, name: Path, asker: str) -> Found:
    path = here / name.expanduser()
    if not path.is_file():
        raise UsageError(
            "inventory_missing",
            f"there is no inventory `{name}`",
            why=f"{asker} names it, but it is {'a folder' if path.is_dir() else 'not there'}",
            fix="correct the path, or `dfo init` to write inventory/dfo.yaml",
        )
    folder = path.parent.resolve()
    return Found(path, str(name), folder.parent if folder.name == "inventory" else folder, asker)


def target_names() -> list[str]:
    """Names for shell completion: never fails, and loads no validation."""
    from orchestrator.inventory.strict_yaml import load_strict

    try:
        document, _ = load_strict(find_inventory(environ=os.environ).path)
    except DfoError:
        return []
    targets = document.get("targets") if isinstance(document, dict) else None
    return list(targets) if isinstance(targets, dict) else []
