"""`dfo deploy`: check the sources and ship them as a new release."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import EVERYDAY, DryRunOpt, TargetArg, command, duration
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.deploy.plan import DeployPlan
    from orchestrator.deploy.release import Activated

CheckOpt = Annotated[bool, typer.Option("--check", help="Only say whether there is work to do: exit 9 if so")]
WaitOpt = Annotated[
    float,
    typer.Option("--lock-wait", parser=duration, metavar="TIME", help="Wait so long for a running command (5m)"),
]


@command("deploy", panel=EVERYDAY)
def deploy(
    rt: Runtime,
    target: TargetArg = None,
    dry_run: DryRunOpt = False,
    check: CheckOpt = False,
    lock_wait: WaitOpt = "0s",  # type: ignore[assignment]
) -> None:
    """Check the sources and ship them as a new release"""
    started = time.monotonic()
    plan = make_plan(rt, lock_wait)
    for warning in plan.warnings:
        rt.console.warn(warning)
    if dry_run or check:
        show_plan(rt.console, plan, check=check)
    elif plan.has_work:
        show_deployed(rt.console, plan, ship(rt, plan, lock_wait), time.monotonic() - started)
    else:
        show_nothing(rt, plan)


def make_plan(rt: Runtime, lock_wait: float) -> DeployPlan:
    """Sources, facts, plan; one step of the runbook."""
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


def show_plan(console: Console, plan: DeployPlan, *, check: bool) -> None:
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
    console.result(target=plan.target, changed=False, plan=plan.as_dict())


def show_deployed(console: Console, plan: DeployPlan, done: Activated, seconds: float) -> None:
    console.say(f"Deployed to `{plan.target}` in {seconds:.1f} s. Next: `dfo launch {plan.target} --warmup-first`")
    console.result(
        target=plan.target,
        changed=True,
        release=done.release,
        previous=done.previous,
        removed=done.removed,
        kept=done.kept,
        warnings=[*plan.warnings, *done.warnings],
        seconds=round(seconds, 3),
        plan=plan.as_dict(),
    )


def show_nothing(rt: Runtime, plan: DeployPlan) -> None:
    from orchestrator.deploy import release

    swept = release.clean(rt.session) if plan.leftovers else []
    for name in swept:
        rt.console.say(f"  {'clean':<10}removed `{name}`, left by a command that died")
    rt.console.say(f"`{plan.target}` already runs this code ({plan.release}). Nothing to do.")
    rt.console.result(
        target=plan.target, changed=False, release=plan.release, previous=plan.current, removed=[], kept={},
        warnings=list(plan.warnings), seconds=0.0, plan=plan.as_dict(),
    )  # fmt: skip
