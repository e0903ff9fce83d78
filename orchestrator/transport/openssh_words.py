"""What `ssh -v` tells of a way that failed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import DfoError
from orchestrator.transport.host_keys import HostKeyCheck
from orchestrator.transport.route import Hop
from orchestrator.transport.trouble import no_shell, refused, unreachable

if TYPE_CHECKING:
    from orchestrator.inventory.reach import SshTimeouts

_AT = re.compile(r"Authenticating to (\S+):(\d+) as ")
_KEY = re.compile(r"Server host key: (\S+) (SHA256:\S+)")
_OFFERED = re.compile(r"Offering public key: (.*)")
_NOISE = re.compile(r"^(debug\d:|OpenSSH_|Warning: |@+|\s*$|mux_client|Pseudo-terminal)")


@dataclass(frozen=True)
class Story:
    """stderr of a master and of the hops before it."""

    text: str
    timed_out: bool

    @property
    def last(self) -> str:
        """What ssh itself has to say, without its debugging."""
        lines = [line.strip() for line in self.text.splitlines() if not _NOISE.match(line)]
        return lines[-1][:300] if lines else "no message"

    def part(self, hop: Hop) -> str:
        """From where this hop was talked to, up to the next one."""
        starts = [found for found in _AT.finditer(self.text) if (found[1], int(found[2])) == (hop.host, hop.port)]
        if not starts:
            return ""
        after = self.text[starts[-1].start() :]
        further = _AT.search(after, 1)
        return after[: further.start()] if further else after

    def host_key(self, hop: Hop) -> str:
        """`ED25519 SHA256:…` that the hop showed."""
        found = _KEY.search(self.part(hop))
        if found is None:
            return "an unknown key"
        kind = found[1].removeprefix("ssh-").removeprefix("ecdsa-sha2-")
        return f"{'ECDSA' if kind.startswith('nistp') else kind.upper()} {found[2]}"

    def accepted(self, hop: Hop) -> str | None:
        """The key of a hop that ssh has just remembered."""
        return self.host_key(hop) if "Permanently added" in self.part(hop) else None


def explain(hops: Sequence[Hop], checks: Mapping[Hop, HostKeyCheck], story: Story, limits: SshTimeouts) -> DfoError:
    """Why the login failed, and at which hop."""
    hop = next((hop for hop in reversed(hops) if story.part(hop)), hops[0])
    check, part, key = checks[hop], story.part(hop), story.host_key(hop)
    if "HOST IDENTIFICATION HAS CHANGED" in part or "has changed and you have requested" in part:
        return check.mismatch(key)
    if "Host key verification failed" in story.text:
        return check.mismatch(key) if check.pins or check.known.keys else check.unknown(key)
    if "Permission denied" in part or "Too many authentication failures" in part:
        offered = [f"the key {' '.join(found.split())}" for found in _OFFERED.findall(part)]
        return refused(hop, offered, [story.last])
    if hop is hops[-1] and "Authenticated to" in part:
        return no_shell(hop.label, f"it ended at once: {story.last}")
    if story.timed_out:
        return unreachable(hop, TimeoutError("no login in time"), limits)
    return unreachable(hop, OSError(story.last), limits)
