"""One connection to one host, over which its login shell runs lines."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from orchestrator.errors import ConnectError, DeadlineError, DfoError, UsageError
from orchestrator.transport.base import Tell
from orchestrator.transport.route import find_route
from orchestrator.transport.streaming import Pipes

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshConfig

T = TypeVar("T")
#: sshd's MaxSessions is 10 by default; some stay free for other programs on a shared connection.
MAX_CHANNELS = 8
#: How long an orderly goodbye may take before the connection is just dropped (seconds).
GOODBYE = 3.0


class Link(Protocol):
    """Connects when the first line comes, and again after the connection was lost."""

    @property
    def label(self) -> str:
        """For people: `root@pve1`."""
        ...

    @property
    def alive(self) -> bool:
        """Whether a connection is open, as far as we know."""
        ...

    def start(self, line: str, patience: float | None = None) -> Pipes:
        """Let the login shell run a line. `patience`: seconds for that on an open connection, if they are fewer than
        `ssh.timeouts.channel`. Raises ConnectError, DeadlineError.
        """
        ...

    def lost(self, status: int | None, stderr: bytes) -> ConnectError | None:
        """Why a line has no receipt, if it is the connection that is to blame."""
        ...

    def close(self) -> None:
        """Drop the connection; safe to call twice."""
        ...


def open_link(target: str, ssh: SshConfig, *, tell: Tell, trace: Tell) -> Link:
    """The client that the inventory asks for, or that the way to the host needs. Contacts nobody."""
    route = find_route(ssh)
    for hop in route.hops:
        trace(f"  ~ hop {hop.label} ({hop.address})")
    wanted, reason = ssh.client, route.beyond_paramiko
    if wanted == "auto" and reason:
        wanted = "openssh"
        tell(f"`{ssh.host}` is reached with the ssh program: ~/.ssh/config asks for {reason}")
    if wanted == "openssh":
        from orchestrator.transport.openssh import OpenSshLink

        if shutil.which("ssh") is None:
            why = f"{reason or '`ssh.client`'} needs the ssh program, and there is none on this machine"
            fix = "install it (`apt install openssh-client`), or set `ssh.client` to paramiko"
            raise UsageError("inventory_invalid", f"cannot reach `{ssh.host}`", why=why, fix=fix)
        return OpenSshLink(target, route, ssh, tell=tell)
    from orchestrator.transport.ssh import ParamikoLink

    return ParamikoLink(target, route, ssh, tell=tell)


def not_started(label: str, patience: float, why: str) -> DeadlineError:
    return DeadlineError(
        "deadline",
        f"`{label}` did not start a command in {patience:g} s",
        why=why,
        fix="look at the load of the host, or raise `ssh.timeouts.channel`",
    )


def within(seconds: float, work: Callable[[], T], late: DfoError) -> T:
    """`work()`, or `late` raised when it takes longer: for calls of libraries that know no deadline.

    The thread of a call that is late is left behind; whoever calls closes what it hangs on.
    """
    box: list[T | BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise late
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
