"""A deploy as data: made by `planning`, shown by `--dry-run`, consumed by `release.apply`, never made twice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.deploy.method import Method
from orchestrator.terminal import printable
from orchestrator.words import count, size


class Action(StrEnum):
    """SEND files; SWITCH to a release that is there already; NOTHING, because it is current."""

    SEND = "send"
    SWITCH = "switch"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Change:
    """How a file differs from the current release: `A` new, `M` changed, `D` gone. Sizes are in bytes."""

    kind: str
    path: str
    size: int
    before: int

    def __str__(self) -> str:
        sizes = {
            "A": size(self.size),
            "M": f"{size(self.size)} ({self.size - self.before:+,} B)",
            "D": f"was {size(self.before)}",
        }
        return f"{self.kind} {printable(self.path):<40} {sizes[self.kind]}"


@dataclass(frozen=True, kw_only=True)
class DeployPlan:
    """Everything that a deploy will do.

    `modules`: packages that the release imports → their version there. `steps`: name → what it will have done, in
    order. `request`: what the program on the target is told, unchanged. `leftovers`: what commands that died have
    left there, removed on the way. `method`: how the archive gets into a container, if it is one and there is any.
    """

    target: str
    place: str
    action: Action
    release: str
    current: str | None
    content: str
    num_files: int
    num_python: int
    modules: Mapping[str, str]
    warnings: tuple[str, ...]
    changes: tuple[Change, ...]
    removes: tuple[str, ...]
    keep: int
    leftovers: tuple[str, ...]
    lock_error: Mapping[str, object] | None
    facts: str
    made_at: float
    steps: Mapping[str, str]
    request: Mapping[str, object] = field(repr=False)
    archive: bytes = field(repr=False, default=b"")
    method: Method | None = None

    @property
    def has_work(self) -> bool:
        return self.action is not Action.NOTHING

    @property
    def work(self) -> str:
        """What there is to send, in words."""
        if self.action is Action.NOTHING:
            return "nothing to send: this code is current"
        if self.action is Action.SWITCH:
            return f"nothing to send: the release is there already, all {self.num_files:,} hashes equal"
        number = {kind: sum(change.kind == kind for change in self.changes) for kind in "MAD"}
        return (
            f"{number['M']} changed, {number['A']} new, {number['D']} removed of {count(self.num_files, 'file')}, "
            f"{size(len(self.archive))} compressed"
        )

    def as_dict(self) -> dict[str, object]:
        """The `plan` of `--json`."""
        return {
            "action": self.action.value,
            "release": self.release,
            "current": self.current,
            "content": self.content,
            "files": self.num_files,
            "modules": dict(self.modules),
            "warnings": list(self.warnings),
            "changes": [
                {"kind": change.kind, "path": change.path, "size": change.size, "before": change.before}
                for change in self.changes
            ],
            "archive_bytes": len(self.archive),
            "method": self.method.name if self.method else None,
            "method_reason": self.method.why if self.method else "",
            "keep": self.keep,
            "remove": list(self.removes),
            "leftovers": list(self.leftovers),
            "locked": self.lock_error is not None,
        }

    def lines(self) -> list[str]:
        """The plan for people."""
        head = f"Plan for `{self.target}` ({self.place})"
        rows = [("release", f"{self.release}  (current: {self.current or 'none'})"), ("check", self._check())]
        if self.modules:
            rows.append(("uses", ", ".join(f"{name} {version}" for name, version in self.modules.items())))
        rows.append(("send", self.work))
        rows += [("", str(change)) for change in self.changes]
        if self.method is not None:
            rows.append(("method", str(self.method)))
        remove = f", remove {len(self.removes)} ({', '.join(self.removes)})" if self.removes else ""
        rows.append(("keep", f"{count(self.keep, 'release')}{remove}"))
        if self.leftovers:
            rows.append(("clean", f"{', '.join(map(printable, self.leftovers))}, left by a command that died"))
        if self.lock_error is not None:
            rows.append(("lock", f"held: {self.lock_error['what']} ({self.lock_error['why']})"))
        age = f"facts {max(0.0, time.time() - self.made_at):.0f} s old"
        return [f"{head:<58} {age}", *(f"  {name:<9} {text}" for name, text in rows)]

    def _check(self) -> str:
        return f"{count(self.num_python, 'Python file')} parse, 0 errors, {count(len(self.warnings), 'warning')}"
