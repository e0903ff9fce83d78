"""`dfo launch`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import EVERYDAY, DryRunOpt, TargetArg, command, duration
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.console import Console
    from orchestrator.runs.launch import LaunchPlan

WarmupOpt = Annotated[bool, typer.Option("--warmup-first", help="Compile every kernel once, in order, before training")]
RequireWarmOpt = Annotated[
    bool, typer.Option("--require-warm", help="Refuse to train on a cold compile cache (launch.warmup.when_cold)")
]
ResumeOpt = Annotated[
    int | None,
    typer.Option("--resume", metavar="RUN", help="Go on from the newest checkpoint of RUN, with its configuration"),
]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the run configuration; repeatable"),
]
ForceOpt = Annotated[bool, typer.Option("--force", help="Start although the devices are in use")]
LockWaitOpt = Annotated[
    float | None,
    typer.Option(
        "--lock-wait",
        metavar="TIME",
        parser=duration,
        help="How long to wait for another command [default: 30s]",
        show_default=False,
    ),
]
LOCK_WAIT = 30.0


@command("launch", panel=EVERYDAY)
def launch(
    rt: Runtime,
    target: TargetArg = None,
    warmup_first: WarmupOpt = False,
    require_warm: RequireWarmOpt = False,
    dry_run: DryRunOpt = False,
    resume: ResumeOpt = None,
    sets: SetOpt = None,
    force: ForceOpt = False,
    lock_wait: LockWaitOpt = None,
) -> None:
    """Start a run (warm-up first if asked)"""
    from orchestrator.cli.steps import show_waiting
    from orchestrator.runs.launch import prepare, start

    rt.override("launch.warmup.when_cold", "refuse" if require_warm else None, "--require-warm")
    where, console = rt.target, rt.console
    with console.step("check") as step:
        plan = prepare(rt.session, where, warmup=warmup_first, sets=sets or (), resume=resume, dry_run=dry_run)
        step.detail = _accepted(plan)
    _say_devices(console, plan)
    if dry_run:
        _show(console, plan)
        shown = {name: plan.files[name] for name in ("run.yaml", "launch.sh")}
        console.result(dry_run=True, target=where.name, plan=plan.as_dict(), files=shown)
        return
    with console.step("start") as step:
        wait = LOCK_WAIT if lock_wait is None else lock_wait
        started = start(
            rt.session, where, plan, force=force, lock_wait=wait, on_record=lambda r: show_waiting(console, r)
        )
        step.detail = f"run {started.run}: {' → '.join(plan.stages)}"
    _say_next(console, plan, started.run, where.name)
    console.result(target=where.name, run=started.run, folder=started.folder, state=started.state, **plan.as_dict())


def _accepted(plan: LaunchPlan) -> str:
    from orchestrator.runs.launch import NO_RELEASE

    if plan.release == NO_RELEASE:
        return f"{plan.config.origin} read; no release is there to check it"
    return f"{plan.config.origin} accepted by release {plan.release}"


def _say_devices(console: Console, plan: LaunchPlan) -> None:
    from orchestrator.runs.launch import NO_RELEASE

    if plan.resumed is not None:
        earlier = plan.resumed
        same = "the same release" if earlier.release == plan.release else f"it ran release {earlier.release}"
        console.say(f"  resume    run {earlier.run}, {earlier.path.rpartition('/')[2]} ({same})")
    free = "in use" if plan.problem is not None else "free"
    if not plan.gpus and any(device != "cpu" for device in plan.devices):
        free = "not checked, there is no nvidia-smi"
    if plan.release == NO_RELEASE:
        free = "not checked"
    names = {gpu["index"]: gpu["name"] for gpu in plan.gpus}
    listed = [
        f"{device} ({names[int(device[5:])]})" if device != "cpu" and int(device[5:]) in names else device
        for device in plan.devices
    ]
    console.say(f"  devices   {', '.join(listed)}: {free}")


def _show(console: Console, plan: LaunchPlan) -> None:
    """The plan for a person: what would be sent, as it would be sent."""
    console.data("# --- run.yaml " + "-" * 60)
    console.data(plan.config.text.rstrip("\n"))
    console.data("# --- environment " + "-" * 57)
    # What the inventory sets wins; the core only fills in.
    for name, value in {**plan.variables, **plan.environment}.items():
        console.data(f"{name}={value}")
    console.data("# --- launch.sh " + "-" * 59)
    console.data(plan.files["launch.sh"].rstrip("\n"))
    if plan.problem is not None:
        console.warn(f"a launch would be refused now: {plan.problem.what} ({plan.problem.why})")
    console.say("Nothing was started.")


def _say_next(console: Console, plan: LaunchPlan, run: int, target: str) -> None:
    console.say(f"Run {run} is detached on `{target}`; you can close the laptop.")
    console.say(f"  dfo logs {run} -f     dfo status {run}     dfo stop {run}")
    if plan.problem is not None:
        console.warn(f"started by force although {plan.problem.what} ({plan.problem.why})")
