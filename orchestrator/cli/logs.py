"""`dfo logs`"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.common import EVERYDAY, TargetOpt, command
from orchestrator.cli.run_argument import RunWords, choose_run
from orchestrator.cli.runtime import Runtime

FollowOpt = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended; reconnects by itself")]
StageOpt = Annotated[
    str | None, typer.Option("--stage", metavar="NAME", help="Only this stage: preflight, warmup, train, …")
]
SinceOpt = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Only what is newer: an age (10m) or an ISO time")
]
TailOpt = Annotated[int | None, typer.Option("--tail", metavar="N", min=0, help="Start N lines before the end")]
FromOpt = Annotated[
    str | None, typer.Option("--from", metavar="STAGE:OFFSET", help="Start at this byte of this stage's log")
]
LikeRunOpt = Annotated[
    bool, typer.Option("--exit-like-run", help="If the run ended badly, fail with its own exit code")
]


@command("logs", panel=EVERYDAY)
def logs(
    rt: Runtime,
    words: RunWords = None,
    target: TargetOpt = None,
    follow: FollowOpt = False,
    stage: StageOpt = None,
    since: SinceOpt = None,
    tail: TailOpt = None,
    start: FromOpt = None,
    exit_like_run: LikeRunOpt = False,
) -> None:
    """Show or follow the output of a run"""
    from orchestrator.runs.follow import Follower, LogRequest, parse_from, parse_since
    from orchestrator.runs.watch import conclude, result_of, watch

    request = LogRequest(
        run=choose_run(rt, words),
        follow=follow,
        stage=stage,
        since=parse_since(since) if since else None,
        tail=tail,
        start=parse_from(start) if start else None,
    )
    follower = Follower(rt.session, request)
    status = watch(follower, rt.console, options=_same_target(rt))
    conclude(status, rt.console, rt.target.name, like_run=exit_like_run)
    rt.console.result(**result_of(status, follower, rt.target.name))


def _same_target(rt: Runtime) -> list[str]:
    """The words that lead another `dfo` to the same place."""
    inventory = ["-i", str(rt.inventory_option)] if rt.inventory_option is not None else []
    return [*inventory, *(["-t", rt.target_option] if rt.target_option is not None else [])]
