"""The hops to a host: what the inventory says, and for the rest what ssh itself would do.

`ssh -G` is asked for the effective configuration, so that Include, Match and patterns are read by the one program that
knows them all; without an ssh program on this machine, paramiko reads ~/.ssh/config.
"""

from __future__ import annotations

import getpass
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UsageError
from orchestrator.transport.host_keys import lookup_name, readable

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshConfig

Effective = Mapping[str, Sequence[str]]
MAX_HOPS = 8
_ASK_DEADLINE = 10.0
#: What a hardware key's public half begins with.
_HARDWARE = ("sk-ssh-", "sk-ecdsa-")


@dataclass(frozen=True)
class Hop:
    """One host on the way. `spoken` is what the user calls it; `name` is what known_hosts files call it."""

    spoken: str
    host: str
    port: int
    user: str
    name: str
    keys: tuple[Path, ...]
    agent: bool
    only_keys: bool
    known_hosts: tuple[Path, ...]
    proxy_command: str | None = None

    @property
    def label(self) -> str:
        return f"{self.user}@{self.spoken}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Route:
    """All hops, the nearest first; the last one is the host. `beyond_paramiko` says what asks for the ssh program."""

    hops: tuple[Hop, ...]
    beyond_paramiko: str | None


def find_route(ssh: SshConfig) -> Route:
    """Work out the way without contacting anybody. Raises UsageError `inventory_invalid`."""
    assert ssh.host is not None
    effective = effective_config(ssh.host, ssh)
    host = _hop(ssh.host, effective, ssh, explicit=True)
    jump = _jumps(effective) if ssh.jump is None else ssh.jump
    before = _chain(jump, ssh) if jump else []
    reasons = (reason for hop, config in [*before, (host, effective)] if (reason := _beyond_paramiko(hop, config)))
    return Route((*(hop for hop, _ in before), host), next(reasons, None))


def effective_config(host: str, ssh: SshConfig) -> Effective:
    """What ssh's configuration says of a host, by keyword in lower case; every value is a list."""
    program = shutil.which("ssh")
    if program is None:
        return _read_by_paramiko(host, ssh.config)
    where = ["-F", ssh.config] if ssh.config else []
    done = subprocess.run(
        [program, *where, "-G", "--", host],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_ASK_DEADLINE,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise _unusable(ssh, f"`ssh -G {host}` says: {last}")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def _read_by_paramiko(host: str, config: str | None) -> Effective:
    import paramiko

    path = Path(config or "~/.ssh/config").expanduser()
    if config == "none" or not path.is_file():
        return {}
    values = paramiko.SSHConfig.from_path(str(path)).lookup(host)
    return {key: [value] if isinstance(value, str) else value for key, value in values.items()}


def _unusable(ssh: SshConfig, why: str) -> UsageError:
    file = ssh.config or "~/.ssh/config"
    return UsageError("inventory_invalid", f"cannot read {file}", why=why, fix="correct it, or set `ssh.config`")


def _hop(spoken: str, effective: Effective, ssh: SshConfig, *, explicit: bool = False, **given: object) -> Hop:
    """One hop; `explicit` is the host itself, for which the inventory has values of its own."""
    host = _first(effective, "hostname") or spoken
    port = given.get("port") or (ssh.port if explicit else None) or int(_first(effective, "port") or 22)
    user = given.get("user") or (ssh.user if explicit else None) or _first(effective, "user") or getpass.getuser()
    assert isinstance(port, int)
    keys = [Path(key).expanduser() for key in ssh.keys or effective.get("identityfile", ())]
    alias = _first(effective, "hostkeyalias")
    files = " ".join([*effective.get("userknownhostsfile", ("~/.ssh/known_hosts",)), *_global_files(effective)])
    return Hop(
        spoken=spoken,
        host=host,
        port=port,
        user=str(user),
        name=alias.lower() if alias else lookup_name(host, port),
        # Those that the user names must exist; those that ssh tries anyway need not.
        keys=tuple(key for key in keys if ssh.keys or key.is_file()),
        agent=ssh.agent,
        only_keys=_first(effective, "identitiesonly") == "yes",
        known_hosts=readable(files.split()),
        proxy_command=_first(effective, "proxycommand") if not (explicit and ssh.jump is not None) else None,
    )


def _global_files(effective: Effective) -> Sequence[str]:
    return effective.get("globalknownhostsfile", ("/etc/ssh/ssh_known_hosts",))


def _first(effective: Effective, key: str) -> str | None:
    value = next(iter(effective.get(key, ())), None)
    return None if value is None or value.lower() == "none" else value


def _jumps(effective: Effective) -> list[str]:
    return [hop for hop in (_first(effective, "proxyjump") or "").split(",") if hop]


def _chain(jump: Sequence[str], ssh: SshConfig, depth: int = 0) -> list[tuple[Hop, Effective]]:
    """The hops of a jump list. As with ssh, only the first of them may have a ProxyJump of its own."""
    if len(jump) + depth > MAX_HOPS:
        raise _unusable(
            ssh, f"the way to `{ssh.host}` has more than {MAX_HOPS} hops; does a ProxyJump lead in a circle?"
        )
    chain = []
    for index, text in enumerate(jump):
        user, spoken, port = split_hop(text)
        effective = effective_config(spoken, ssh)
        if index == 0 and (further := _jumps(effective)):
            chain += _chain(further, ssh, depth + len(jump))
        chain.append((_hop(spoken, effective, ssh, user=user, port=port), effective))
    return chain


def split_hop(text: str) -> tuple[str | None, str, int | None]:
    """`ada@bastion:2222` → user, host, port. Brackets around an IPv6 address are taken off."""
    text = text.removeprefix("ssh://")
    user, _, place = text.rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.endswith("]")):
        host, port = place, ""
    return user or None, host.strip("[]"), int(port) if port else None


def _beyond_paramiko(hop: Hop, effective: Effective) -> str | None:
    """What in ssh's configuration of a host only the ssh program can do."""
    if hop.proxy_command:
        return "ProxyCommand"
    agent = _first(effective, "identityagent")
    if agent not in (None, "SSH_AUTH_SOCK", "$SSH_AUTH_SOCK"):
        return "IdentityAgent"
    for keyword, name in (("pkcs11provider", "PKCS11Provider"), ("certificatefile", "CertificateFile")):
        if _first(effective, keyword):
            return name
    hardware = next((key for key in hop.keys if _public_half(key).startswith(_HARDWARE)), None)
    return f"the hardware key {hardware}" if hardware else None


def _public_half(key: Path) -> str:
    try:
        return key.with_name(f"{key.name}.pub").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
