"""`dfo env-diff`: what changed since it last worked, worst first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import LOOK, TargetOpt, command
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.environment.caches import CacheRecord
    from orchestrator.environment.findings import Finding

BeforeArg = Annotated[Path, typer.Argument(metavar="BEFORE", help="A saved snapshot")]
NowArg = Annotated[
    Path | None,
    typer.Argument(metavar="NOW", help="A later one [default: the target as it is now]", show_default=False),
]


@command("env-diff", panel=LOOK)
def env_diff(rt: Runtime, before: BeforeArg, now: NowArg = None, target: TargetOpt = None) -> None:
    """Compare two snapshots, or one with the container"""
    from orchestrator.environment import drift, snapshot

    old = snapshot.load(before)
    new = snapshot.load(now) if now else snapshot.take(rt.session)
    findings = drift.differences(old, new)
    saved = [] if now else _saved(rt.target.name)
    rt.console.data(_count(findings))
    show(rt.console, findings, standing=[*drift.faults(new), *drift.useless_archives(saved, new)])
    finish(rt.console, findings, against=str(before))


def _saved(target: str) -> list[CacheRecord]:
    """The warm-ups in the caches of a target that are saved on this machine."""
    from orchestrator.compile_cache import archive

    return [r for _, manifest in archive.saved_in(archive.default_folder(target)) for r in manifest.records]


def _count(findings: list[Finding]) -> str:
    return {0: "No difference", 1: "1 difference"}.get(len(findings), f"{len(findings)} differences")


def show(console: Console, findings: list[Finding], *, standing: Iterable[Finding]) -> None:
    """One line a finding: how bad, what, from → to, and what follows. `standing` faults come first, new or not."""
    findings = [*(fault for fault in standing if fault not in findings), *findings]
    width = max((len(f.what) for f in findings), default=0)
    for finding in findings:
        console.data(f"  {finding.severity.mark} {finding.what:<{width}}  {finding.change}")
        if finding.consequence:
            console.data(f"    {'':<{width}}  {finding.consequence}")


def finish(console: Console, findings: list[Finding], *, against: str, **facts: object) -> None:
    """The JSON result, or `DifferenceFound` (exit 9) when there is something to know."""
    from orchestrator.errors import DifferenceFound

    if not findings:
        console.result(**facts, findings=[])
        return
    worst = findings[0]
    raise DifferenceFound(
        "environment_differs",
        f"the environment is not that of `{against}`",
        why=f"{_count(findings)}; the worst: {worst.what} {worst.change[:100]}",
        fix="write the way back with `dfo env-snapshot --lock back.txt --from GOOD.json`",
        findings=[f.as_dict() for f in findings],
        **facts,
    )
