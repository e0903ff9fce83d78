"""`dfo trust`: look at host keys, and accept them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import TROUBLE, TargetArg, command
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.transport.trust import Seen

FingerprintOpt = Annotated[
    list[str] | None,
    typer.Option("--fingerprint", metavar="SHA256:…", help="Accept this key without asking, and no other; repeatable"),
]


@command("trust", panel=TROUBLE)
def trust(rt: Runtime, target: TargetArg = None, fingerprint: FingerprintOpt = None) -> None:
    """Show the host keys on the way to a target, and accept new or changed ones"""
    from dataclasses import asdict

    from orchestrator.transport.trust import look

    ssh = rt.need_ssh()

    def decide(seen: Seen) -> bool:
        return seen.fingerprint in fingerprint if fingerprint else _ask(rt, seen)

    seen, file = look(rt.target.name, ssh, decide)
    rt.console.table(("HOST", "ADDRESS", "KEY", "STATE"), [(s.host, s.address, s.key, _state(s)) for s in seen])
    if any(one.accepted for one in seen):
        rt.console.say(f"written to {file}")
    rt.console.result(
        target=rt.target.name, hops=[{**asdict(s), "fingerprint": s.fingerprint} for s in seen], file=file
    )


def _state(seen: Seen) -> str:
    return f"{seen.state}, accepted" if seen.accepted else seen.state


def _ask(rt: Runtime, seen: Seen) -> bool:
    rt.console.say(f"`{seen.host}` ({seen.address}) shows the {seen.state} key {seen.key}")
    for had in seen.expected:
        rt.console.say(f"  {seen.source} has {had}")
    rt.console.say("  compare it on the console of the host: `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`")
    return rt.console.confirm("Accept it?", otherwise=f"`--fingerprint {seen.fingerprint}` after you compared it")
