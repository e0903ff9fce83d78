"""This machine: what a login and a launch will need of it."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator import __version__
from orchestrator.doctor.facts import Agent, KeyFile, Laptop, Trouble, Wanted
from orchestrator.errors import DeadlineError, DfoError, UsageError
from orchestrator.inventory.locate import Found
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.secrets import Secret

#: For programs of this machine and its agent (seconds).
DEADLINE = 5.0


def look(target: ResolvedTarget, wanted: Wanted, inventory: Found) -> Laptop:
    """Raises UsageError where ssh's own configuration cannot be read."""
    there = [(name, value) for name, value in _secrets(target) if value.command is None]
    config = target.launch.config
    needs, keys, agent = _ssh(target)
    return Laptop(
        wanted=wanted,
        python=sys.version_info[:3],
        dfo=__version__,
        inventory=inventory.label,
        inventory_mode=stat.S_IMODE(inventory.path.stat().st_mode),
        ssh=_version(),
        needs_ssh=needs,
        keys=keys,
        agent=agent,
        secrets=tuple(name for name, _ in there),
        lost_secrets=tuple(_lost(there, target.project)),
        config=config,
        config_there=config is not None and (target.project / config).is_file(),
    )


def _ssh(target: ResolvedTarget) -> tuple[str | None, tuple[KeyFile, ...], Agent | None]:
    """What the way to the host needs of this machine: why the ssh program, which key files, the agent."""
    if target.ssh is None:
        return None, (), None
    from orchestrator.transport.route import find_route

    route = find_route(target.ssh)
    needs = "`ssh.client`" if target.ssh.client == "openssh" else route.beyond_paramiko
    paths = dict.fromkeys(path for hop in route.hops for path in hop.keys)
    return needs, tuple(map(_key, paths)), _agent(any(hop.agent for hop in route.hops))


def _version() -> str | None:
    """`OpenSSH_9.6p1 …`, which it says on stderr; None without the program."""
    program = shutil.which("ssh")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-V"], stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stderr.decode(errors="replace").strip().split(",")[0] or None


def _key(path: Path) -> KeyFile:
    import paramiko
    from paramiko.pkey import UnknownKeyType

    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return KeyFile(str(path), None)
    except (paramiko.PasswordRequiredException, TypeError):
        return KeyFile(str(path), mode, locked=True)
    except UnknownKeyType:
        return KeyFile(str(path), mode, problem="paramiko does not know its kind")
    except (paramiko.SSHException, OSError, ValueError) as error:
        return KeyFile(str(path), mode, problem=str(error) or type(error).__name__)
    return KeyFile(str(path), mode)


def _agent(wanted: bool) -> Agent:
    import paramiko

    from orchestrator.transport.link import within

    place = os.environ.get("SSH_AUTH_SOCK")
    if not wanted or not place:
        return Agent(wanted, place, None)
    late = DeadlineError("deadline", "the agent does not answer", why="it hangs", fix="restart it")
    try:
        with socket.socket(socket.AF_UNIX) as line:  # paramiko takes one that is gone for one without keys
            line.settimeout(DEADLINE)
            line.connect(place)
        return Agent(wanted, place, within(DEADLINE, lambda: len(paramiko.Agent().get_keys()), late))
    except (DfoError, paramiko.SSHException, OSError, EOFError):
        return Agent(wanted, place, None)


def _secrets(target: ResolvedTarget) -> Iterator[tuple[str, Secret]]:
    token = target.pct.api.token if target.pct is not None else None
    for name, value in {**target.env, "pct.api.token": token}.items():
        if isinstance(value, Secret):
            yield name, value


def _lost(secrets: Sequence[tuple[str, Secret]], project: Path) -> Iterator[Trouble]:
    for name, secret in secrets:
        try:
            secret.reveal(name, project=project)
        except UsageError as error:
            yield Trouble.of(error)
