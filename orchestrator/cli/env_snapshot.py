"""`dfo env-snapshot`: what is installed in there, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.common import LOOK, TargetArg, command
from orchestrator.cli.runtime import Runtime

ToOpt = Annotated[
    Path | None,
    typer.Option("--to", metavar="FILE", help="Where to save it [default: snapshots/TARGET-TIME.json]"),
]
CheckOpt = Annotated[
    Path | None,
    typer.Option("--check", metavar="FILE", help="Compare with an earlier snapshot; exit 9 if it differs"),
]
LockOpt = Annotated[
    Path | None, typer.Option("--lock", metavar="FILE", help="Write hashed requirements and the plan to return")
]
FromOpt = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="With --lock: the good snapshot [default: the one just taken]"),
]


@command("env-snapshot", panel=LOOK)
def env_snapshot(
    rt: Runtime,
    target: TargetArg = None,
    to: ToOpt = None,
    check: CheckOpt = None,
    lock: LockOpt = None,
    good: FromOpt = None,
) -> None:
    """Record packages, torch, CUDA, driver, GPUs and compile caches"""
    from orchestrator.cli.env_diff import finish, show
    from orchestrator.environment import drift, requirements_lock, snapshot

    before = snapshot.load(check) if check else None
    to_lock = snapshot.load(good) if good else None
    with rt.console.step("snapshot") as step:
        taken = snapshot.take(rt.session)
        step.detail = f"{len(taken.packages)} packages"
    path = to or snapshot.default_path(rt.target.project, taken)
    digest = snapshot.save(taken, path)
    rt.console.data(f"Saved {path} (sha256 {digest[:8]}…)")
    for line in snapshot.summary(taken):
        rt.console.data(f"  {line}")
    facts: dict[str, object] = {"path": str(path), "sha256": digest, "snapshot": taken.as_dict()}
    if lock:
        with rt.console.step("lock") as step:
            locked = requirements_lock.make_lock(rt.session, to_lock or taken, taken, lock)
            step.detail = f"{locked.num_locked} pins with hashes, {len(locked.unlocked)} without"
        lock.write_text(locked.text, encoding="utf-8")
        rt.console.data(f"Wrote {lock}. To return to it:")
        for line in locked.plan:
            rt.console.data(f"  {line}")
        facts["lock"] = {"path": str(lock), "plan": list(locked.plan), "unlocked": list(locked.unlocked)}
    findings = drift.differences(before, taken) if before else []
    show(rt.console, findings, standing=drift.faults(taken))
    finish(rt.console, findings, against=str(check), **facts)
