"""Looking at the host keys of every hop, and accepting them when somebody says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import paramiko

from orchestrator.errors import ConnectError, PreflightError
from orchestrator.transport.base import silent
from orchestrator.transport.host_keys import HostKeyCheck, check_of, words_for
from orchestrator.transport.route import Hop, find_route
from orchestrator.transport.ssh import connect, drop

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshConfig


@dataclass(frozen=True)
class Seen:
    """The key that one hop showed. `expected` are the ones we had, with where from; `accepted`: written down now."""

    host: str
    address: str
    key: str
    state: Literal["known", "pinned", "new", "changed"]
    expected: tuple[str, ...]
    source: str | None
    accepted: bool = False

    @property
    def fingerprint(self) -> str:
        return self.key.split()[-1]


def look(target: str, ssh: SshConfig, decide: Callable[[Seen], bool]) -> tuple[list[Seen], str]:
    """Connect up to the last host's key and let `decide` about each new or changed one; keys accepted are written.

    Hops on the way are logged in to, the last host is not. Returns what was seen, nearest first, and our file.
    Raises ConnectError (`host_key_unknown` or `host_key_mismatch` for one that was declined), PreflightError.
    """
    route = find_route(ssh)
    seen: list[Seen] = []

    def check_for(hop: Hop) -> HostKeyCheck:
        return _Decided(check_of(hop, route, ssh, target, silent), hop, decide, seen, last=hop is route.hops[-1])

    try:
        for connection in connect(route.hops, check_for, ssh):
            drop(connection.transport)
    except _SeenEnough:
        pass
    return seen, str(check_of(route.hops[-1], route, ssh, target, silent).known_hosts.own)


class _SeenEnough(Exception):
    """The key of the last host is known now; a login would add nothing."""


class _Decided(HostKeyCheck):
    """A check in which somebody is asked."""

    def __init__(
        self, usual: HostKeyCheck, hop: Hop, decide: Callable[[Seen], bool], seen: list[Seen], *, last: bool
    ) -> None:
        super().__init__(**{name: getattr(usual, name) for name in _FIELDS})
        self._hop, self._decide, self._seen, self._last = hop, decide, seen, last

    def check(self, key: paramiko.PKey) -> None:
        found = self._compare(key)
        if found.state in ("new", "changed"):
            if self.pins or key in self.known.revoked:
                super().check(key)
            if not self._decide(found):
                raise self._declined(found)
            self._accept(key)
            found = replace(found, accepted=True)
        self._seen.append(found)
        if self._last:
            raise _SeenEnough

    def _accept(self, key: paramiko.PKey) -> None:
        try:
            self.known_hosts.accept(self.name, key)
        except OSError as error:
            why = f"{error.filename or self.known_hosts.own}: {error.strerror}"
            fix = "correct its rights, or set `ssh.known_hosts` to another file"
            raise PreflightError("not_permitted", "cannot write the known hosts of dfo", why=why, fix=fix) from error

    def _declined(self, seen: Seen) -> ConnectError:
        return ConnectError(
            "host_key_unknown" if seen.state == "new" else "host_key_mismatch",
            f"the {seen.state} host key of `{seen.host}` was not accepted",
            why=f"it is {seen.key}{f'; {seen.source} has ' + ' or '.join(seen.expected) if seen.expected else ''}",
            fix="nothing was written for it; if you did not expect this key, stop and ask who runs the host",
            host=seen.host,
            got=seen.fingerprint,
            expected=[had.split()[-1] for had in seen.expected],
        )

    def _compare(self, key: paramiko.PKey) -> Seen:
        known = self.known
        seen = Seen(self.host, self._hop.address, words_for(key), "new", (), None)
        if self.pins:
            state: Literal["pinned", "changed"] = "pinned" if key.fingerprint in self.pins else "changed"
            return replace(seen, state=state, expected=tuple(self.pins), source="the inventory")
        if not known.keys:
            return seen
        fits = key in known.keys and key not in known.revoked
        had = tuple(words_for(other) for other in known.keys)
        return replace(seen, state="known" if fits else "changed", expected=had, source=str(known.source))


_FIELDS = ("known_hosts", "host", "name", "target", "policy", "pins", "tell")
