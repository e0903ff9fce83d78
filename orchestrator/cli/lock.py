"""`dfo lock`: show, take, release or break the lock that deploys and launches take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import TROUBLE, TargetArg, command, duration, group
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.deploy.lock import LockChange

MessageOpt = Annotated[str, typer.Option("--message", "-m", metavar="TEXT", help="Why, for whoever meets the lock")]
ForOpt = Annotated[
    float | None,
    typer.Option("--for", parser=duration, metavar="TIME", help="How long (2h) [default: until released]"),
]

group("lock", "Show, take or break the deploy lock", panel=TROUBLE)


@command("lock show")
def show(rt: Runtime, target: TargetArg = None) -> None:
    """Who holds the lock"""
    from orchestrator.deploy import lock
    from orchestrator.terminal import printable

    held = lock.show(rt.session)
    rt.console.data(f"`{rt.target.name}` is not locked" if held is None else printable(lock.describe(held)))
    rt.console.result(target=rt.target.name, lock=None if held is None else held.model_dump())


@command("lock take")
def take(rt: Runtime, message: MessageOpt, target: TargetArg = None, lasting: ForOpt = None) -> None:
    """Keep everybody, yourself included, from deploying and launching"""
    from orchestrator.deploy import lock

    _report(rt, lock.take(rt.session, message=message, seconds=lasting), "is locked now", "dfo lock release")


@command("lock release")
def release(rt: Runtime, target: TargetArg = None) -> None:
    """Give back the lock that you took"""
    from orchestrator.deploy import lock

    _report(rt, lock.release(rt.session), "is free again")


@command("lock break")
def break_(rt: Runtime, target: TargetArg = None) -> None:
    """Remove the lock, whoever holds it"""
    from orchestrator.deploy import lock

    change = lock.break_lock(rt.session)
    _report(rt, change, f"is free; this ended the hold of {lock.describe(change.lock)}")


def _report(rt: Runtime, change: LockChange, what: str, undo: str | None = None) -> None:
    for warning in change.warnings:
        rt.console.warn(warning)
    name = rt.target.name
    rt.console.say(f"`{name}` {what}{f'; `{undo} {name}` gives it back' if undo else ''}")
    rt.console.result(target=name, lock=change.lock.model_dump())
