"""Why a host cannot be reached, in words."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko
from paramiko.ssh_exception import ChannelException, NoValidConnectionsError

from orchestrator.errors import ConnectError, PreflightError
from orchestrator.transport.route import Hop

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshTimeouts


def unreachable(hop: Hop, error: BaseException, limits: SshTimeouts | None = None) -> ConnectError:
    why, fix = _reason(hop, error, limits)
    return ConnectError(
        "unreachable", f"cannot reach `{hop.spoken}` ({hop.address})", why=why, fix=fix, host=hop.spoken
    )


def _reason(hop: Hop, error: BaseException, limits: SshTimeouts | None) -> tuple[str, str]:
    network = "check the network or VPN, then run the command again"
    if isinstance(error, socket.gaierror):
        return f"the name `{hop.host}` is not known here: {error.strerror}", "correct `ssh.host`, or check the VPN"
    if isinstance(error, NoValidConnectionsError):
        return "the connection was refused: nobody listens there", "start its sshd, or correct `ssh.port`"
    if isinstance(error, ChannelException):
        return f"the hop before it cannot connect: {error.text}", "check the host and port behind the jump host"
    if isinstance(error, TimeoutError):
        return str(error) if limits is None else f"no answer in {limits.connect:g} s", network
    text = said(error)
    if text == "No existing session" and limits is not None:  # paramiko's words for a key exchange that took too long
        return f"no agreement on keys in {limits.connect:g} s", network
    if "banner" in text:
        seconds = f" in {limits.banner:g} s" if limits else ""
        why = f"something listens, but says no word of SSH{seconds} ({text}); a busy sshd turns newcomers away"
        return why, "wait a minute and run it again; else look at MaxStartups and the log of its sshd"
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return f"paramiko and this server share no algorithm: {text}", "set `ssh.client` to openssh"
    return text, network


def said(error: BaseException) -> str:
    """What paramiko means; at an end of file it says nothing."""
    closed = "the other end closed the connection"
    return closed if isinstance(error, EOFError) else str(error) or type(error).__name__


def refused(hop: Hop, offered: Sequence[str], more: Sequence[str], *, locked: Path | None = None) -> ConnectError:
    """A login that was not let in. `offered`: the keys that were tried; `locked`: one with a passphrase."""
    first = f"offered were {', '.join(offered)}" if offered else "no key could be offered"
    fix = f"`ssh-copy-id -p {hop.port} {hop.user}@{hop.host}`, or name the right key in `ssh.keys`"
    if locked is not None:
        fix = f"`ssh-add {locked}`, then run the command again"
    return ConnectError(
        "login_refused",
        f"`{hop.spoken}` refused user `{hop.user}`",
        why="; ".join([first, *more]),
        fix=fix,
        host=hop.spoken,
        user=hop.user,
    )


def lost(label: str, why: str) -> ConnectError:
    return ConnectError(
        "connection_lost",
        f"the connection to `{label}` broke",
        why=why,
        fix="run the command again; nothing half-done is left in place",
    )


def no_shell(label: str, why: str) -> PreflightError:
    return PreflightError(
        "not_permitted",
        f"`{label}` may not run commands",
        why=f"the login shell ran nothing; {why}",
        fix="give the user a login shell such as /bin/sh, and its key no `command=` of its own",
    )
