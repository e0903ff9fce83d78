"""Which files of a run `dfo pull` copies, and where each goes on the laptop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.inventory.models import Artefact

#: What `--what` means, as paths in the folder of the run.
WHAT: dict[str, tuple[str, ...]] = {
    "checkpoints": ("checkpoints",),
    "report": ("run.yaml", "run.json", "state.json", "stages.jsonl", "events.jsonl", "evaluation.json"),
    "export": ("export",),
    "logs": ("logs",),
}
_RUN = "runs/{run}/"


def group_of(path: str) -> str:
    for name, paths in WHAT.items():
        if any(path == top or path.startswith(top + "/") for top in paths):
            return name
    return path.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the files of a run go. `to` takes everything; else each artefact of the inventory has its own place."""

    target: str
    project: Path
    artefacts: Sequence[Artefact] = ()
    to: Path | None = None

    def place(self, run: int, path: str) -> Path:
        """Absolute place on the laptop of `path`, a checked relative path in the run's folder."""
        if self.to is not None:
            return self.to.absolute() / path
        for artefact in self.artefacts:
            inside = inside_run(artefact)
            if path == inside or path.startswith(inside + "/"):
                local = artefact.local.format(run=run, target=self.target)
                return (self.project / local / path[len(inside) :].lstrip("/")).absolute()
        return (self.project / "artefacts" / self.target / str(run) / path).absolute()

    def folder(self, run: int) -> Path:
        return self.to.absolute() if self.to is not None else self.place(run, "-").parent


def inside_run(artefact: Artefact) -> str:
    """The artefact's path in the folder of a run. Raises UsageError when it is not in one."""
    inside = artefact.remote.removeprefix(_RUN).rstrip("/")
    if not artefact.remote.startswith(_RUN) or not inside:
        raise UsageError(
            "inventory_invalid",
            f"`artefacts` of the inventory has `{artefact.remote}`",
            why="`dfo pull` copies what a run has left in its own folder",
            fix="start it with `runs/{run}/`, for example `runs/{run}/export`",
        )
    return inside


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to copy: paths in the folder of the run, and of some folders only the newest entries."""

    run: int | None
    include: tuple[str, ...]
    newest: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: int | None, what: str, artefacts: Sequence[Artefact]) -> Selection:
        """`what` is a key of `WHAT` or `all`. Raises UsageError."""
        if what not in {*WHAT, "all"}:
            raise UsageError(
                "usage",
                f"`--what {what}` is not something to pull",
                why=f"there are: {', '.join(WHAT)}, all",
                fix="for example `--what checkpoints`",
            )
        own = tuple(inside_run(artefact) for artefact in artefacts)
        everything = (*(path for paths in WHAT.values() for path in paths), *own)
        keep = {inside_run(artefact): artefact.keep for artefact in artefacts if artefact.keep is not None}
        return cls(run=run, include=tuple(dict.fromkeys(WHAT.get(what, everything))), newest=keep)
