"""The node: one script as the login user, one look at its devices, and two calls of pct, all at once."""

from __future__ import annotations

import re

from orchestrator.doctor.facts import Node, Wanted, or_trouble
from orchestrator.doctor.look.way import Arrival
from orchestrator.doctor.side_by_side import threads
from orchestrator.proxmox import gpu
from orchestrator.transport.node import Node as NodeLink

#: For the script (seconds); what may hang in it has a limit of its own.
DEADLINE = 30.0
SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager")
#: How long the login shell took: since sshd started it, which is our oldest ancestor that is not sshd.
_SHELL = r"""
read now _ < /proc/uptime
of() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f "$2"; }
pid=$$
while parent=$(of $pid 2) && [ "${parent:-0}" -gt 1 ] && ! grep -q '^sshd' "/proc/$parent/comm"; do pid=$parent; done
[ "${parent:-0}" -gt 1 ] && awk "BEGIN { print \"shell\", 1000 * ($now - $(of $pid 20) / $(getconf CLK_TCK)) }"
"""
#: A held flock is read from /proc/locks: trying it would take it, for a moment, from whoever comes.
_SCRIPT = rf"""{_SHELL}
PATH=$PATH:/usr/sbin:/sbin
echo "user $(id -un)"
[ -e /etc/pve/corosync.conf ] && echo clustered
timeout 10 pvecm status 2>/dev/null | sed -n 's/^Quorate: */quorate /p'
lock=/run/lock/lxc/pve-config-$1.lock
if inode=$(stat -c %i "$lock" 2>/dev/null); then
    pid=$(sed -n "s/^[0-9]*: FLOCK  *ADVISORY  *WRITE \([0-9]*\) [^ ]*:$inode .*/\1/p" /proc/locks | head -n 1)
    [ -n "$pid" ] && echo "holder $pid $(ps -o args= -p "$pid" 2>/dev/null)"
fi
df -Pk / | awk 'END {{ print "free", $4 }}'
for name in {" ".join(SERVICES)}; do echo "service $name $(systemctl is-active $name 2>/dev/null)"; done
"""


def look(node: NodeLink, vmid: int, wanted: Wanted, arrival: Arrival, *, sudo: bool) -> Node:
    """Raises what a broken connection raises; what pct refuses is a fact."""
    with threads(5) as pool:
        script = pool.submit(lambda: node.run(("sh", "-c", _SCRIPT, "look", str(vmid)), deadline=DEADLINE).stdout)
        version = pool.submit(node.version)
        devices = pool.submit(gpu.look, node)
        status = pool.submit(or_trouble, lambda: node.status(vmid))
        config = pool.submit(or_trouble, lambda: gpu.read_config(node, vmid))
    said = script.result().decode(errors="replace")
    shell = _found(r"^shell ([0-9.]+)$", said)
    return Node(
        wanted=wanted,
        sudo=sudo,
        true_ms=arrival.true_ms,
        shell_ms=float(shell) if shell else None,
        printed=arrival.printed,
        user=_found(r"^user (\S+)$", said) or "unknown",
        version=version.result(),
        clustered=bool(re.search(r"^clustered$", said, re.MULTILINE)),
        quorate={"Yes": True, "No": False}.get(_found(r"^quorate (\w+)", said) or ""),
        status=status.result(),
        config=config.result(),
        holder=_found(r"^holder (.*)$", said),
        free_bytes=int(_found(r"^free (\d+)$", said) or 0) * 1024,
        devices=devices.result(),
        services=dict(re.findall(r"^service (\S+) (\S+)$", said, re.MULTILINE)),
    )


def _found(pattern: str, said: str) -> str | None:
    found = re.search(pattern, said, re.MULTILINE)
    return found[1].strip() if found else None
