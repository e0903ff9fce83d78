"""`dfo doctor`: every hop and every assumption, looked at and never touched."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from orchestrator.cli.common import LOOK, TargetArg, command
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.doctor.examine import Diagnosis
    from orchestrator.doctor.verdict import Finding

MARKS = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "-"}


@command("doctor", panel=LOOK)
def doctor(rt: Runtime, target: TargetArg = None) -> None:
    """Test every hop and every assumption, change nothing"""
    from orchestrator.doctor.examine import examine
    from orchestrator.words import count

    chosen = rt.target
    with rt.console.step("examine") as step:
        diagnosis = examine(chosen, inventory=rt.inventory.found, trace=rt.console.debug)
        step.detail = f"{len(diagnosis.findings)} checks"
    for group, findings in groupby(diagnosis.findings, key=lambda finding: finding.group):
        rt.console.data(group)
        _show(rt.console, list(findings))
    counts = diagnosis.counts
    told = f"{counts['ok']} ok, {count(counts['warning'], 'warning')}, {counts['failed']} failed"
    rt.console.data(f"{told}, {counts['skipped']} skipped in {diagnosis.seconds:.1f} s; nothing was changed")
    _finish(rt.console, chosen.name, diagnosis)


def _show(console: Console, findings: list[Finding]) -> None:
    """A line for each check with its fix below it; those skipped for the same reason share one."""
    for skip, same in groupby(findings, key=lambda f: f.verdict.saw if f.status == "skipped" else None):
        rows = list(same)
        if skip is not None:
            console.data(f"  {MARKS['skipped']} {', '.join(finding.name for finding in rows)}: {skip}")
            continue
        for finding in rows:
            console.data(f"  {MARKS[finding.status]} {finding.name:<18}{finding.verdict.saw}")
            if finding.verdict.fix:
                console.data(f"      fix: {finding.verdict.fix}")


def _finish(console: Console, target: str, diagnosis: Diagnosis) -> None:
    """The JSON result, or PreflightError `target_unfit` with the same facts when something failed."""
    from orchestrator.doctor.verdict import Status
    from orchestrator.errors import PreflightError
    from orchestrator.words import count

    checks = [finding.as_dict() for finding in diagnosis.findings]
    facts = {"target": target, "counts": diagnosis.counts, "seconds": round(diagnosis.seconds, 3), "checks": checks}
    failed = diagnosis.of(Status.FAILED)
    if not failed:
        console.result(**facts)
        return
    first = failed[0]
    assert first.verdict.fix is not None
    raise PreflightError(
        "target_unfit",
        f"{count(len(failed), 'check')} of `{target}` failed, first {first.group}: {first.name}",
        why=first.verdict.saw,
        fix=first.verdict.fix,
        **facts,
    )
