"""The node and its container, as seen from the node."""

from __future__ import annotations

from orchestrator.doctor.facts import Node, Trouble
from orchestrator.doctor.verdict import Checks, Verdict, failed, ok, skipped, warning
from orchestrator.words import size

#: Milliseconds: above these a step is felt.
FAR_MS = 150.0
SLOW_SHELL_MS = 300.0
#: A command on an open connection takes two round trips: the channel, and the command in it.
ROUND_TRIPS = 2
#: Bytes free on the node's root, which holds the cluster's database.
LITTLE, TOO_LITTLE = 500e6, 100e6
#: MiB that Proxmox VE gives a container whose configuration says nothing.
DEFAULT_MEMORY = 512
LEAST_MEMORY, LEAST_MEMORY_FOR_GPUS = 1024, 16 * 1024
#: What pct refuses for reasons that are not the caller's.
_OF_OTHER_CHECKS = ("cluster_not_ready", "container_missing")
#: Guests whose init is systemd, by `ostype`.
SYSTEMD = frozenset({"debian", "ubuntu", "fedora", "centos", "opensuse", "archlinux", "nixos"})


def answers(node: Node | Trouble) -> Verdict:
    """The only check that sees a node that was reached and does not answer."""
    if isinstance(node, Trouble):
        return failed(node.text, node.fix)
    return ok(f"commands run as {node.user}")


def latency(node: Node) -> Verdict:
    trip = max(0.0, node.true_ms - (node.shell_ms or 0.0)) / ROUND_TRIPS
    if trip > FAR_MS:
        why = f"one round trip takes {trip:.0f} ms: every step takes several"
        return warning(why, "use a nearer way (VPN, `ssh.jump`); `ping` it to see whether the line is busy")
    return ok(f"one round trip takes {trip:.0f} ms")


def login_shell(node: Node) -> Verdict:
    if node.shell_ms is not None and node.shell_ms > SLOW_SHELL_MS:
        own = f"{node.shell_ms:.0f} ms of them in the login shell: a slow profile"
        why = f"`true` takes {node.true_ms:.0f} ms, {own}"
        return warning(why, f'`[ -z "$PS1" ] && return` as the first line of ~{node.user}/.bashrc on the node')
    return ok(f"`true` takes {node.true_ms:.0f} ms")


def quiet_shell(node: Node) -> Verdict:
    if node.printed.strip():
        first = node.printed.strip().splitlines()[0][:80]
        why = f"the login shell prints before every command: {first}"
        return warning(why, f"print to a terminal only: `[ -t 1 ] && …` in ~{node.user}/.bashrc on the node")
    return ok("the login shell prints nothing")


def version(node: Node) -> Verdict:
    if node.version is None:
        return warning(
            "`pveversion` says nothing: perhaps no Proxmox VE node", "`ssh.host` must be the container's node"
        )
    if int(node.version.split(".")[0]) < 8:
        return warning(f"Proxmox VE {node.version}: devices need 8.2", "update it; or pass GPUs by `lxc.` lines")
    return ok(f"Proxmox VE {node.version}, kernel {node.devices.kernel}")


def rights(node: Node) -> Verdict:
    trouble = _trouble(node)
    if trouble and trouble.kind not in _OF_OTHER_CHECKS:
        return failed(trouble.text, trouble.fix)
    return ok(f"{node.user} runs pct" + (" with `sudo -n`" if node.sudo else ""))


def quorum(node: Node) -> Verdict:
    trouble = _trouble(node)
    if trouble and trouble.kind == "cluster_not_ready":
        return failed(trouble.text, trouble.fix)
    if node.quorate is False:
        why = "the cluster has no quorum: a container that stops cannot be started again"
        return failed(why, "bring the other nodes back; `pvecm status` on the node. Restart nothing until then")
    if node.quorate:
        return ok("the cluster has a quorum")
    if node.clustered:
        return skipped("only root may ask `pvecm status`")
    return ok("a node of its own, no cluster")


def exists(node: Node) -> Verdict:
    trouble = _trouble(node)
    if trouble and trouble.kind == "container_missing":
        return failed(trouble.text, trouble.fix)
    return _unseen(node) or ok(f"container {node.wanted.vmid} is here")


def state(node: Node) -> Verdict:
    if verdict := _unseen(node):
        return verdict
    if node.status != "running":
        fix = f"`pct start {node.wanted.vmid}` on the node, or `dfo deploy {node.wanted.target} --start`"
        return failed(f"container {node.wanted.vmid} is {node.status}", fix)
    return ok("running")


def config_lock(node: Node) -> Verdict:
    if verdict := _unseen(node):
        return verdict
    if held := _keys(node).get("lock"):
        why = f"`lock: {held}`: it can be used, but not started, stopped, changed or snapshot"
        return warning(why, f"wait for that task; if none runs any more, `pct unlock {node.wanted.vmid}` on the node")
    return ok("no `lock:` in its configuration")


def flock(node: Node) -> Verdict:
    if verdict := _unseen(node):
        return verdict
    if node.holder:
        why = f"process {node.holder} holds its lock: a push waits 10 s for it, then fails"
        return warning(why, f"wait for it; `ps -fp {node.holder.split()[0]}` on the node shows how long it runs")
    return ok("nobody is at work on it")


def nesting(node: Node) -> Verdict:
    if verdict := _unseen(node):
        return verdict
    kind = _keys(node).get("ostype", "unmanaged")
    if kind not in SYSTEMD:
        return skipped(f"ostype {kind} needs none")
    if "nesting=1" not in _keys(node).get("features", "").split(","):
        why = "`nesting` is off: services of systemd fail with 226/NAMESPACE"
        return warning(why, f"on the node: `pct set {node.wanted.vmid} --features nesting=1`, then restart it")
    return ok("on, as systemd needs it")


def unprivileged(node: Node) -> Verdict:
    if verdict := _unseen(node):
        return verdict
    if _keys(node).get("unprivileged") != "1":
        why = "it is privileged: root in it is root on the node"
        return warning(why, "restore a backup of it with `--unprivileged 1`, or accept it")
    return ok("unprivileged")


def memory(node: Node) -> Verdict:
    if verdict := _unseen(node):
        return verdict
    given = _whole(_keys(node).get("memory"), DEFAULT_MEMORY)
    least = LEAST_MEMORY_FOR_GPUS if node.wanted.some_gpu else LEAST_MEMORY
    if given < least:
        why = f"{given} MiB: loading a model takes more, and the kernel then kills the run with signal 9"
        return warning(why, f"`pct set {node.wanted.vmid} --memory {least}` or more on the node")
    return ok(f"{given} MiB")


def cores(node: Node) -> Verdict:
    if verdict := _unseen(node):
        return verdict
    given, limit = _keys(node).get("cores"), _keys(node).get("cpulimit", "0")
    if given == "1" and node.wanted.some_gpu:
        why = "one core: data, launches of kernels and the writer of checkpoints share it"
        return warning(why, f"`pct set {node.wanted.vmid} --cores 8` on the node")
    return ok(f"{given or 'all'} cores" + (f", cpulimit {limit}" if limit not in ("0", "") else ""))


def disk(node: Node) -> Verdict:
    free = f"{size(node.free_bytes)} free on the node's root"
    fix = "`du -xsh /var/* | sort -h` on the node; old backups and templates are the usual ones"
    if node.free_bytes < TOO_LITTLE:
        return failed(f"{free}: the cluster's database there stops when it is full", fix)
    if node.free_bytes < LITTLE:
        return warning(f"{free}: an archive lies there while it is pushed", fix)
    return ok(free)


def _trouble(node: Node) -> Trouble | None:
    """What pct refused."""
    return next((fact for fact in (node.config, node.status) if isinstance(fact, Trouble)), None)


def _unseen(node: Node) -> Verdict | None:
    """Why nothing is known about the container."""
    trouble = _trouble(node)
    return skipped(trouble.what) if trouble else None


def _keys(node: Node) -> dict[str, str]:
    return {} if isinstance(node.config, Trouble) else dict(node.config.keys)


def _whole(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.isdecimal() else otherwise


CHECKS: Checks[Node] = (
    ("latency", latency),
    ("login shell", login_shell),
    ("quiet shell", quiet_shell),
    ("Proxmox VE", version),
    ("rights", rights),
    ("quorum", quorum),
    ("node disk", disk),
    ("container", exists),
    ("state", state),
    ("lock", config_lock),
    ("at work", flock),
    ("nesting", nesting),
    ("privileges", unprivileged),
    ("memory given", memory),
    ("cores given", cores),
)
