"""Whose key it is that a server shows: known_hosts files, pinned fingerprints, and what to do with a new one.

Our own file is asked first; what it says of a host was accepted by somebody. The files of ssh are asked for hosts that
it does not know, and never written.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

from orchestrator.errors import ConnectError
from orchestrator.transport.base import Tell, silent

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshConfig
    from orchestrator.transport.route import Hop, Route

Policy = Literal["accept-new", "strict"]


def lookup_name(host: str, port: int) -> str:
    """How known_hosts files call a host: `pve1`, `[pve1]:2222`."""
    return host.lower() if port == paramiko.config.SSH_PORT else f"[{host.lower()}]:{port}"


def words_for(key: paramiko.PKey) -> str:
    """`ED25519 SHA256:…`, as `ssh-keygen -lf` would show it."""
    kind = key.get_name().removeprefix("ssh-").removeprefix("ecdsa-sha2-")
    return f"{'ECDSA' if kind.startswith('nistp') else kind.upper()} {key.fingerprint}"


@dataclass(frozen=True)
class Known:
    """What the files say of one host; `source` is the file that the keys are from."""

    keys: tuple[paramiko.PKey, ...]
    source: Path | None
    revoked: tuple[paramiko.PKey, ...] = ()


@dataclass(frozen=True)
class KnownHosts:
    """Our own file, which is written, and those of ssh, which are not."""

    own: Path
    others: tuple[Path, ...] = ()

    def lookup(self, name: str) -> Known:
        """The keys of a host from the first file that has any. Unreadable files and lines count as absent."""
        revoked = tuple(key for path in (self.own, *self.others) for key in _keys(path, name, marker="@revoked"))
        for path in (self.own, *self.others):
            if keys := tuple(_keys(path, name)):
                return Known(keys, path, revoked)
        return Known((), None, revoked)

    def accept(self, name: str, key: paramiko.PKey) -> None:
        """From now on, `key` is the key of this host: it replaces all we had. Raises OSError."""
        self.own.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = _lines(self.own)
        kept = [_without(line, name) for line in lines]
        entry = f"{name} {key.get_name()} {key.get_base64()}\n"
        if kept == lines:
            if lines and not self.own.read_bytes().endswith(b"\n"):
                entry = f"\n{entry}"
            # One write at the end: several targets may meet new hosts at the same time.
            with open(self.own, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(entry)
            return
        with tempfile.NamedTemporaryFile("w", dir=self.own.parent, prefix=f".{self.own.name}-", delete=False) as file:
            try:
                file.writelines(f"{rest}\n" for line, rest in zip(lines, kept, strict=True) if rest or not line)
                file.write(entry)
                file.close()
                Path(file.name).replace(self.own)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").splitlines()
    return []


def _entry(line: str) -> tuple[str, HostKeyEntry | None]:
    """The marker of a line (`@revoked`, `@cert-authority` or none) and its entry."""
    marker, _, rest = line.strip().partition(" ") if line.lstrip().startswith("@") else ("", "", line.strip())
    try:
        return marker, HostKeyEntry.from_line(rest.strip()) if rest and not rest.startswith("#") else None
    except (paramiko.SSHException, InvalidHostKey, ValueError):
        return marker, None


def _keys(path: Path, name: str, marker: str = "") -> Iterator[paramiko.PKey]:
    for line in _lines(path):
        found, entry = _entry(line)
        if found == marker and entry is not None and _matches(entry, name):
            yield entry.key


def _without(line: str, name: str) -> str:
    """A line that no longer lists a host by its name; empty when it listed no other. Patterns and markers stay."""
    marker, entry = _entry(line)
    listed = entry.hostnames or [] if entry is not None and not marker else []
    others = [pattern for pattern in listed if not _is_name(pattern, name)]
    if len(others) == len(listed):
        return line
    return f"{','.join(others)} {line.split(None, 1)[1]}" if others else ""


def _is_name(pattern: str, name: str) -> bool:
    """Whether it is exactly this name, in clear or hashed."""
    return HostKeys.hash_host(name, pattern) == pattern if pattern.startswith("|1|") else pattern.lower() == name


def _matches(entry: HostKeyEntry, name: str) -> bool:
    """By name, hashed name, or pattern with `*`, `?` and `!`, as sshd(8) describes them."""
    hit = False
    for pattern in entry.hostnames or ():
        if _is_name(pattern, name):
            hit = True
        elif fnmatch.fnmatchcase(name, pattern.removeprefix("!").lower().replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


@dataclass
class HostKeyCheck:
    """What the key of one host has to be. `host` is for people, `name` for the files, `target` for `dfo trust`."""

    known_hosts: KnownHosts
    host: str
    name: str
    target: str
    policy: Policy
    pins: Sequence[str] = ()
    tell: Tell = silent
    _new: paramiko.PKey | None = field(default=None, init=False)

    @property
    def known(self) -> Known:
        return self.known_hosts.lookup(self.name)

    @property
    def types(self) -> list[str]:
        """Key types to ask the server for first: those that we can compare with."""
        return [] if self.pins else list(dict.fromkeys(key.get_name() for key in self.known.keys))

    def check(self, key: paramiko.PKey) -> None:
        """Raises ConnectError `host_key_mismatch` or `host_key_unknown`."""
        known = self.known
        if key in known.revoked:
            raise self.mismatch(words_for(key), ["another, for it is revoked"])
        if self.pins:
            if key.fingerprint not in self.pins:
                raise self.mismatch(words_for(key))
        elif known.keys:
            if key not in known.keys:
                raise self.mismatch(words_for(key))
        elif self.policy == "strict":
            raise self.unknown(words_for(key))
        else:
            self._new = key

    def logged_in(self) -> None:
        """Remember a new key, now that the host has let us in."""
        key, self._new = self._new, None
        if key is None:
            return
        try:
            self.known_hosts.accept(self.name, key)
        except OSError as error:
            why = f"it cannot be written to {error.filename}: {error.strerror}"
            self.tell(f"the host key of `{self.host}` is new ({words_for(key)}) and will be again: {why}")
        else:
            self.tell_new(words_for(key))

    def tell_new(self, key: str) -> None:
        self.tell(f"the host key of `{self.host}` is new and accepted from now on: {key}")

    def unknown(self, got: str) -> ConnectError:
        """`got` is as `words_for` has it."""
        return ConnectError(
            "host_key_unknown",
            f"the host key of `{self.host}` is not known",
            why=f"it showed {got}; no known_hosts file has `{self.name}`, and the policy is strict",
            fix=f"compare it with the console of the host, then `dfo trust {self.target}`",
            host=self.host,
            got=got.split()[-1],
        )

    def mismatch(self, got: str, expected: Sequence[str] = ()) -> ConnectError:
        """`got` and `expected` are as `words_for` has them; expected are all that would do."""
        known = self.known
        expected = expected or self.pins or [words_for(key) for key in known.keys]
        again = f"`dfo trust {self.target}`"
        if self.pins:
            again = f"set `ssh.host_key` to [{got.split()[-1]}] ({again} shows both)"
        return ConnectError(
            "host_key_mismatch",
            f"the host key of `{self.host}` is not the one in {'the inventory' if self.pins else known.source}",
            why=f"got {got}, expected {' or '.join(expected)}",
            fix=f"if the host was reinstalled, {again}; if not, stop and ask",
            host=self.host,
            got=got.split()[-1],
            expected=[word.split()[-1] for word in expected],
        )


def own_file(configured: str | None) -> Path:
    """The file of `ssh.known_hosts`, else the one in the configuration folder of this user."""
    from platformdirs import user_config_path

    return Path(configured) if configured else user_config_path("dfo") / "known_hosts"


def readable(paths: Sequence[str]) -> tuple[Path, ...]:
    """Of the known_hosts files that ssh names, those that exist."""
    found = (Path(path).expanduser() for path in paths)
    return tuple(path for path in found if path.is_file() and os.access(path, os.R_OK))


def check_of(hop: Hop, route: Route, ssh: SshConfig, target: str, tell: Tell) -> HostKeyCheck:
    """What the key of a hop has to be; pinned fingerprints are those of the last one."""
    pins = ssh.host_key if hop is route.hops[-1] else ()
    known = KnownHosts(own_file(ssh.known_hosts), hop.known_hosts)
    return HostKeyCheck(known, hop.spoken, hop.name, target, ssh.host_key_policy, pins, tell)
