"""`dfo rollback`: make an earlier release current again."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.common import TROUBLE, TargetArg, command
from orchestrator.cli.runtime import Runtime

ReleaseArg = Annotated[
    str | None,
    typer.Argument(
        metavar="RELEASE",
        help="Release to go back to; a part of its id is enough [default: the one before]",
        show_default=False,
    ),
]


@command("rollback", panel=TROUBLE)
def rollback(rt: Runtime, target: TargetArg = None, release: ReleaseArg = None) -> None:
    """Make an earlier release current again"""
    from orchestrator.cli.steps import RemoteSteps
    from orchestrator.deploy import release as releases

    facts = releases.facts_for_rollback(rt.session)
    wanted = releases.choose_earlier(facts, release)
    name, before = rt.target.name, facts.current
    if wanted == before:
        rt.console.say(f"`{name}` already runs {wanted}. Nothing to do.")
        rt.console.result(target=name, changed=False, release=wanted, previous=before, files=None, warnings=[])
        return
    with RemoteSteps(rt.console, {}) as steps:
        done = releases.rollback(rt.session, facts, wanted, on_record=steps)
    for warning in done.warnings:
        rt.console.warn(warning)
    rt.console.say(f"`{name}`: {before or 'none'} -> {wanted} (still complete, {done.files} hashes equal)")
    for run in facts.runs:
        rt.console.say(f"Run {run.run} keeps its own release and is not touched.")
    rt.console.result(
        target=name, changed=True, release=wanted, previous=before, files=done.files, warnings=done.warnings
    )
