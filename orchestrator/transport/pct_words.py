"""What pct says when it fails, and what that means: its exit status alone says nothing (255, 2 and 4 mix)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import ConnectError, DfoError, LockError, PreflightError
from orchestrator.transport.base import Completed
from orchestrator.transport.shell import refused_by_sudo

MISSING = re.compile(r"Configuration file 'nodes/[^']*' does not exist|^\d+ doesn't exist$", re.MULTILINE)
STOPPED = re.compile(
    r"container '\d+' not running|can only (push|pull) files (to|from) a running|(CT|VM) \d+ not running"
)
LOCKED = re.compile(r"can't lock file '[^']*' - got timeout|CT is locked \([a-z-]+\)")
_NOT_ROOT = re.compile(r"Unable to load access control list: Unknown error|please run as root")
CLUSTER = re.compile(
    r"cluster not ready|no quorum|Unable to load access control list: Connection refused"
    r"|unable to open file '/etc/pve/[^']*' - Permission denied"  # without quorum, /etc/pve is read-only
)


@dataclass(frozen=True)
class Asker:
    """Who called pct: `root@pve1`, by which path, with sudo or without."""

    label: str
    pct: str
    sudo: bool

    @property
    def node(self) -> str:
        return self.label.rpartition("@")[2]

    @property
    def rule(self) -> str:
        """The line of sudoers that lets the login user run pct."""
        return f"{self.label.rpartition('@')[0]} ALL=(root) NOPASSWD: {self.pct}"


def explain(asker: Asker, vmid: int, ended: Completed, elsewhere: Callable[[], str | None]) -> DfoError:
    """The error behind a pct call that failed. `elsewhere` is asked which node has a container that is not here."""
    said = ended.stderr.decode(errors="replace")
    container = f"container {vmid}"
    if asker.sudo and (refused := refused_by_sudo(asker.label, ended, asker.rule)):
        return refused
    if MISSING.search(said):
        return _missing(asker.node, container, elsewhere())
    if STOPPED.search(said):
        return PreflightError(
            "container_stopped",
            f"{container} is stopped",
            why=f"pct on `{asker.node}` says: {_line(STOPPED, said)}",
            fix=f"`pct start {vmid}` on `{asker.node}`",
        )
    if LOCKED.search(said):
        return LockError(
            "lock_held",
            f"{container} is locked on `{asker.node}`",
            why=f"pct says: {_line(LOCKED, said)}; a backup, a snapshot or another push is at work",
            fix="wait for the task to end (the task list of the node shows it), then run the command again",
        )
    return _node_unfit(asker, said, ended) or _unclear(asker, container, ended)


def _missing(node: str, container: str, other: str | None) -> PreflightError:
    return PreflightError(
        "container_missing",
        f"{container} does not exist on `{node}`",
        why=f"the cluster has it on node `{other}`" if other else f"`{node}` has no configuration for it",
        fix=f"set `ssh.host` to `{other}`"
        if other
        else f"`pct list` on `{node}` shows those it has; set `pct.container`",
        **({"node": other} if other else {}),
    )


def _node_unfit(asker: Asker, said: str, ended: Completed) -> PreflightError | None:
    """What is wrong with the node, or with our rights on it."""
    if CLUSTER.search(said):
        return PreflightError(
            "cluster_not_ready",
            f"the cluster of `{asker.node}` is not ready",
            why=f"pct says: {_line(CLUSTER, said)}",
            fix=f"`systemctl status pve-cluster corosync` and `pvecm status` on `{asker.node}`",
        )
    if _NOT_ROOT.search(said) or (ended.returncode == 126 and not asker.sudo):
        return PreflightError(
            "not_permitted",
            f"`{asker.label.rpartition('@')[0]}` may not run pct on `{asker.node}`",
            why="pct needs root",
            fix=f"connect as root, or set `ssh.sudo: true` and, as root there, "
            f"`echo '{asker.rule}' > /etc/sudoers.d/dfo-{asker.label.rpartition('@')[0]}`",
        )
    if ended.returncode == 127 and asker.pct in said:
        why = f"there is no {asker.pct}"
        fix = "`ssh.host` must be a Proxmox VE node; if pct is elsewhere, set `pct.path`"
        return PreflightError("remote_failed", f"`{asker.node}` has no pct", why=why, fix=fix)
    if "Unknown option: keep-env" in said:
        fix = "set `pct.keep_env: true`, or update pve-container"
        what = f"pct on `{asker.node}` is too old for a clean environment"
        return PreflightError("remote_failed", what, why="it does not know `--keep-env`", fix=fix)
    return None


def _unclear(asker: Asker, container: str, ended: Completed) -> DfoError:
    why = f"pct ended with {ended.returncode}: {ended.last_words}"
    if ended.returncode < 0:
        return ConnectError(
            "connection_lost",
            f"{container} ended a command in the middle",
            why=f"{why}; so it is when the container is stopped or restarted",
            fix=f"`pct status` on `{asker.node}`, then run the command again",
        )
    return PreflightError(
        "remote_failed",
        f"pct on `{asker.node}` cannot run commands in {container}",
        why=why,
        fix="run it again with `-vv`; if it repeats, report it with that output",
    )


def _line(pattern: re.Pattern[str], said: str) -> str:
    return next(line.strip() for line in said.splitlines() if pattern.search(line))[:300]
