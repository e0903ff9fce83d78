"""One host on the way: its name, the connection, its key, the login. Each needs the one before it."""

from __future__ import annotations

from orchestrator.doctor.facts import Hop, Stage
from orchestrator.doctor.verdict import Checks, Verdict, failed, ok, skipped, warning

_ORDER: tuple[Stage, ...] = ("connection", "host key", "login")


def name(hop: Hop) -> Verdict:
    if hop.blocked:
        return skipped(hop.blocked)
    if hop.no_name and hop.trouble:
        return failed(f"{hop.trouble.what}: {hop.no_name}", hop.trouble.fix)
    if hop.command:
        return skipped("ProxyCommand makes the connection")
    if hop.before:
        return skipped(f"`{hop.before}` looks it up")
    return ok(f"{hop.address} is {', '.join(hop.addresses[:3])}")


def connection(hop: Hop) -> Verdict:
    if hop.no_name:
        return skipped("the name is not known")
    return _reached(hop, "connection") or ok(
        f"connected in {hop.connect_ms:.0f} ms" if hop.connect_ms is not None else "connected"
    )


def host_key(hop: Hop) -> Verdict:
    if verdict := _reached(hop, "host key"):
        return verdict
    if hop.key is None:
        return warning("its key is new: nobody has compared it yet", f"`dfo trust {hop.target}`")
    return ok(hop.key)


def login(hop: Hop) -> Verdict:
    return _reached(hop, "login") or ok(f"logged in as {hop.label}")


def _reached(hop: Hop, stage: Stage) -> Verdict | None:
    """None where the way went on after this stage."""
    if hop.blocked:
        return skipped(hop.blocked)
    if hop.stopped is None or _ORDER.index(hop.stopped) > _ORDER.index(stage):
        return None
    if hop.stopped != stage or hop.trouble is None:
        return skipped(f"the {hop.stopped} failed")
    return failed(hop.trouble.text, hop.trouble.fix)


CHECKS: Checks[Hop] = (("name", name), ("connection", connection), ("host key", host_key), ("login", login))
