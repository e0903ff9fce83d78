"""`dfo deploy`: check the sources and ship them as a new release."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from orchestrator.cli.common import EVERYDAY, AllOpt, DryRunOpt, GroupOpt, TargetArg, command, duration
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.deploy.plan import DeployPlan
    from orchestrator.deploy.release import Activated
    from orchestrator.errors import DfoError, PreflightError

CheckOpt = Annotated[bool, typer.Option("--check", help="Only say whether there is work to do: exit 9 if so")]
WaitOpt = Annotated[
    float,
    typer.Option("--lock-wait", parser=duration, metavar="TIME", help="Wait so long for a running command (5m)"),
]
MethodOpt = Annotated[
    Literal["auto", "pct-push", "stream"] | None,
    typer.Option("--method", help="How the archive gets into a container [default: deploy.method]"),
]
StartOpt = Annotated[bool, typer.Option("--start", help="Start the container if it is stopped")]
SnapshotOpt = Annotated[
    bool, typer.Option("--ct-snapshot", help="Take a snapshot of the container first, through the API")
]


@dataclass(frozen=True)
class Wish:
    """The flags that say what is to happen to each target."""

    dry_run: bool
    check: bool
    start: bool
    lock_wait: float
    ct_snapshot: bool = False


@command("deploy", panel=EVERYDAY)
def deploy(
    rt: Runtime,
    target: TargetArg = None,
    dry_run: DryRunOpt = False,
    check: CheckOpt = False,
    method: MethodOpt = None,
    start: StartOpt = False,
    ct_snapshot: SnapshotOpt = False,
    all_: AllOpt = False,
    group: GroupOpt = None,
    lock_wait: WaitOpt = "0s",  # type: ignore[assignment]
) -> None:
    """Check the sources and ship them as a new release"""
    from orchestrator.errors import UsageError

    if sum((target is not None, all_, group is not None)) > 1:
        why = "a TARGET, `--all` and `--group` exclude each other"
        raise UsageError("usage", "which targets?", why=why, fix="leave all but one of them away")
    rt.override("deploy.method", method, "--method")
    wish = Wish(dry_run, check, start, lock_wait, ct_snapshot)
    if all_ or group is not None:
        from orchestrator.cli.several import chosen, for_each

        for_each(rt, chosen(rt, group=group), lambda part: deploy_one(part, wish))
    else:
        rt.console.result(**deploy_one(rt, wish))


def deploy_one(rt: Runtime, wish: Wish) -> Mapping[str, object]:
    """Deploy to the target of `rt`, telling its console; returns the `result` of `--json`."""
    from orchestrator.cli import ct_snapshot

    started = time.monotonic()
    container = ct_snapshot.need_container(rt) if wish.ct_snapshot else None
    plan = make_plan(rt, wish)
    for warning in plan.warnings:
        rt.console.warn(warning)
    if wish.dry_run or wish.check:
        if container is not None and plan.has_work:
            rt.console.data(f"  {'snapshot':<10}{container.label} on `{container.node}`, before anything is sent")
        return show_plan(rt.console, plan, check=wish.check)
    if not plan.has_work:
        return {**show_nothing(rt, plan), "ct_snapshot": None}
    taken = ct_snapshot.take(rt, container, plan.release) if container is not None else None
    done = show_deployed(rt.console, plan, ship(rt, plan, wish.lock_wait), time.monotonic() - started)
    return {**done, "ct_snapshot": taken.as_dict() if taken else None}


def make_plan(rt: Runtime, wish: Wish) -> DeployPlan:
    """Sources, facts, plan; one step of the runbook, and another one if the container has to be started."""
    from orchestrator.deploy import container
    from orchestrator.errors import PreflightError

    try:
        return look(rt, wish.lock_wait)
    except PreflightError as error:
        if error.kind != "container_stopped":
            raise
        if not wish.start or wish.dry_run or wish.check:
            raise with_start(rt.target.name, error) from error
    with rt.console.step("start") as step:
        container.start(rt.session, rt.container)
        step.detail = rt.session.transport.label
    return look(rt, wish.lock_wait)


def look(rt: Runtime, lock_wait: float) -> DeployPlan:
    from orchestrator.cli.steps import show_waiting
    from orchestrator.deploy import release
    from orchestrator.words import count

    python_path = rt.target.env.get("PYTHONPATH")
    with rt.console.step("check") as step:
        sources, examined = release.read_sources(rt.target.project, rt.target.deploy)
        plan = release.plan_deploy(
            rt.session,
            sources,
            examined,
            rt.target.deploy,
            lock_wait=lock_wait,
            python_path=python_path if isinstance(python_path, str) else None,
            gpus=rt.console.verbose > 0,
            on_record=lambda record: show_waiting(rt.console, record),
        )
        step.detail = count(plan.num_files, "file")
    rt.console.debug(f"  {'facts':<10}{plan.facts}")
    return plan


def with_start(target: str, error: PreflightError) -> DfoError:
    """The same, with our own way out."""
    fix = f"`dfo deploy {target} --start`, or {error.fix}"
    return type(error)(error.kind, error.what, why=error.why, fix=fix, **error.details)


def ship(rt: Runtime, plan: DeployPlan, lock_wait: float) -> Activated:
    from orchestrator.cli.steps import RemoteSteps
    from orchestrator.deploy import release

    with RemoteSteps(rt.console, plan.steps) as steps:
        done = release.apply(rt.session, plan, lock_wait=lock_wait, on_record=steps)
    for name, user in done.kept.items():
        rt.console.say(f"  {'keep':<10}{name}, needed by {user}")
    for warning in done.warnings:
        rt.console.warn(warning)
    return done


def show_plan(console: Console, plan: DeployPlan, *, check: bool) -> Mapping[str, object]:
    from orchestrator.errors import DifferenceFound

    for line in plan.lines():
        console.data(line)
    if check and plan.has_work:
        raise DifferenceFound(
            "deploy_pending",
            f"`{plan.target}` does not run this code",
            why=f"current is {plan.current or 'none'}; {plan.work}",
            fix=f"`dfo deploy {plan.target}`",
            plan=plan.as_dict(),
        )
    console.say(f"Nothing was changed.{f' Run `dfo deploy {plan.target}` to apply.' if plan.has_work else ''}")
    return {"target": plan.target, "changed": False, "plan": plan.as_dict()}


def show_deployed(console: Console, plan: DeployPlan, done: Activated, seconds: float) -> Mapping[str, object]:
    console.say(f"Deployed to `{plan.target}` in {seconds:.1f} s. Next: `dfo launch {plan.target} --warmup-first`")
    return {
        "target": plan.target,
        "changed": True,
        "release": done.release,
        "previous": done.previous,
        "removed": done.removed,
        "kept": done.kept,
        "warnings": [*plan.warnings, *done.warnings],
        "seconds": round(seconds, 3),
        "plan": plan.as_dict(),
    }


def show_nothing(rt: Runtime, plan: DeployPlan) -> Mapping[str, object]:
    from orchestrator.deploy import release

    swept = release.clean(rt.session) if plan.leftovers else []
    for name in swept:
        rt.console.say(f"  {'clean':<10}removed `{name}`, left by a command that died")
    rt.console.say(f"`{plan.target}` already runs this code ({plan.release}). Nothing to do.")
    return {
        "target": plan.target, "changed": False, "release": plan.release, "previous": plan.current, "removed": [],
        "kept": {}, "warnings": list(plan.warnings), "seconds": 0.0, "plan": plan.as_dict(),
    }  # fmt: skip
