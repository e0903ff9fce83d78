"""The hops to the host: names, connections, host keys, logins."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.doctor.facts import Hop, Stage, Trouble
from orchestrator.errors import DeadlineError, DfoError
from orchestrator.inventory.reach import SshConfig
from orchestrator.transport.base import Tell, silent
from orchestrator.transport.host_keys import check_of, own_file
from orchestrator.transport.link import Link, open_link, within
from orchestrator.transport.route import Hop as RouteHop
from orchestrator.transport.route import Route, find_route
from orchestrator.transport.shell import RemoteTransport

#: For `true` on an open connection (seconds), and how often it is timed.
DEADLINE = 30.0
TIMES = 3
_STAGES: dict[str, Stage] = {
    "unreachable": "connection",
    "host_key_mismatch": "host key",
    "host_key_unknown": "host key",
}


@dataclass(frozen=True)
class Arrival:
    """An open connection to the last hop, how long `true` takes there, and what the login shell printed before it."""

    link: Link
    true_ms: float
    printed: str


@contextmanager
def travel(target: str, ssh: SshConfig, trace: Tell) -> Iterator[tuple[tuple[Hop, ...], Arrival | None]]:
    """Go all the way, as a command would; the connection stands within the block.

    No host key is written down: what a login would accept goes into a copy of the file, which is thrown away.
    """
    route = find_route(ssh)
    hops = _known(route, ssh, target)
    first = _knock(hops[0], route.hops[0], ssh.timeouts.connect)
    hops = (first, *hops[1:])
    if first.stopped:
        yield _stopped(hops, 0, "connection", first.trouble), None
        return
    with _copy_of_known_hosts(ssh) as (aside, place):
        opened: list[Link] = []
        try:
            opened.append(open_link(target, aside, tell=silent, trace=trace))
            arrival = _arrive(opened[0])
        except DfoError as error:
            own = str(own_file(ssh.known_hosts))
            trouble = Trouble.of(error)
            trouble = replace(trouble, what=trouble.what.replace(place, own), why=trouble.why.replace(place, own))
            spoken = str(error.details.get("host", hops[-1].spoken))
            index = next((i for i, hop in enumerate(hops) if hop.spoken == spoken), len(hops) - 1)
            yield _stopped(hops, index, _STAGES.get(error.kind, "login"), trouble), None
        else:
            yield hops, arrival
        finally:
            for link in opened:
                link.close()


def _known(route: Route, ssh: SshConfig, target: str) -> tuple[Hop, ...]:
    """The hops before anybody is contacted."""
    hops: list[Hop] = []
    for hop in route.hops:
        check = check_of(hop, route, ssh, target, silent)
        key = "pinned in the inventory" if check.pins else f"known from {check.known.source}"
        hops.append(
            Hop(
                label=hop.label,
                spoken=hop.spoken,
                address=hop.address,
                target=target,
                before=hops[-1].spoken if hops else None,
                command=hop.proxy_command,
                key=key if check.pins or check.known.keys else None,
            )
        )
    return tuple(hops)


def _knock(hop: Hop, route: RouteHop, limit: float) -> Hop:
    """Name and TCP of the nearest hop, which is the only one that this machine reaches by itself."""
    if hop.command:
        return hop
    late = DeadlineError("deadline", "no answer", why=f"no name server answered in {limit:g} s", fix="")
    try:
        found = within(limit, lambda: socket.getaddrinfo(route.host, route.port, type=socket.SOCK_STREAM), late)
    except (OSError, DeadlineError) as error:
        why = error.why if isinstance(error, DeadlineError) else str(error.strerror or error)
        trouble = Trouble("unreachable", f"the name `{route.host}` is not known here", why, _NAME_FIX)
        return replace(hop, no_name=why, stopped="connection", trouble=trouble)
    hop = replace(hop, addresses=tuple(dict.fromkeys(str(place[4][0]) for place in found)))
    started = time.monotonic()
    try:
        socket.create_connection((route.host, route.port), limit).close()
    except OSError as error:
        why = f"no answer in {limit:g} s" if isinstance(error, TimeoutError) else str(error.strerror or error)
        refused = isinstance(error, ConnectionRefusedError)
        fix = "start its sshd, or correct `ssh.port`" if refused else "check the network or VPN"
        trouble = Trouble("unreachable", f"cannot reach `{hop.spoken}` ({hop.address})", why, fix)
        return replace(hop, stopped="connection", trouble=trouble)
    return replace(hop, connect_ms=(time.monotonic() - started) * 1000)


_NAME_FIX = "correct `ssh.host`, or check the VPN and its name server: `getent hosts NAME`"


def _arrive(link: Link) -> Arrival:
    host = RemoteTransport(link)
    printed = host.run(("true",), deadline=DEADLINE).stdout
    took = []
    for _ in range(TIMES):
        started = time.monotonic()
        host.run(("true",), deadline=DEADLINE)
        took.append((time.monotonic() - started) * 1000)
    return Arrival(link, min(took), printed.decode(errors="replace"))


def _stopped(hops: Sequence[Hop], index: int, stage: Stage, trouble: Trouble | None) -> tuple[Hop, ...]:
    here = replace(hops[index], stopped=stage, trouble=trouble)
    why = f"`{here.spoken}` was not passed"
    return (*hops[:index], here, *(replace(hop, blocked=why) for hop in hops[index + 1 :]))


@contextmanager
def _copy_of_known_hosts(ssh: SshConfig) -> Iterator[tuple[SshConfig, str]]:
    own = own_file(ssh.known_hosts)
    with tempfile.TemporaryDirectory(prefix="dfo-doctor-") as folder:
        copy = Path(folder) / "known_hosts"
        copy.touch()
        with contextlib.suppress(OSError):  # one that cannot be read counts as absent, as it does for a login
            shutil.copyfile(own, copy)
        yield ssh.model_copy(update={"known_hosts": str(copy)}), str(copy)
