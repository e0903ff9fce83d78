"""Tasks: what the API calls the work that goes on after its answer."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from orchestrator.errors import DeadlineError, PreflightError
from orchestrator.proxmox.client import Api
from orchestrator.proxmox.words import told

#: Pauses between looks at a task (seconds): most end within a second, some take minutes.
FIRST_LOOK, LAST_LOOK = 0.2, 2.0
_UPID = re.compile(r"UPID:(?P<node>[A-Za-z0-9.-]+):[0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+:(?P<type>[a-z]+):[^/\s]*")


@dataclass(frozen=True)
class Ended:
    """A task that did its work. `warnings` of it are in its log."""

    upid: str
    warnings: int
    seconds: float


def wait(api: Api, upid: object, about: str, *, deadline: float) -> Ended:
    """Look at a task until it has ended well. `about`: whose it is, such as `container 101`.

    Raises what its error text stands for (LockError, PreflightError `cluster_not_ready`, `device_missing`, …, else
    `api_failed`), DeadlineError after `deadline` seconds; the task itself then goes on.
    """
    found = _UPID.fullmatch(upid) if isinstance(upid, str) else None
    if found is None or not isinstance(upid, str):
        raise _failed(api, about, "start", f"it named no task but {str(upid)[:80]!r}", str(upid))
    started, pause = time.monotonic(), FIRST_LOOK
    while True:
        seen = api.mapping("nodes", found["node"], "tasks", upid, "status")
        seconds = time.monotonic() - started
        if seen.get("status") == "stopped":
            return _judged(api, found["node"], Ended(upid, 0, seconds), str(seen.get("exitstatus")), about)
        if seconds > deadline:
            raise DeadlineError(
                "deadline",
                f"the task `{found['type']}` of {about} did not end in {deadline:g} s",
                why="our own deadline for it passed; the task goes on",
                fix=f"`pvenode task status '{upid}'` on `{found['node']}`, then run the command again",
                upid=upid,
            )
        time.sleep(min(pause, max(0.0, deadline - seconds) + 0.01))
        pause = min(2 * pause, LAST_LOOK)


def _judged(api: Api, node: str, ended: Ended, status: str, about: str) -> Ended:
    if status == "OK":
        return ended
    if warned := re.fullmatch(r"WARNINGS: (\d+)", status):
        return Ended(ended.upid, int(warned[1]), ended.seconds)
    lines = [str(row.get("t", "")) for row in api.rows("nodes", node, "tasks", ended.upid, "log", limit=500)]
    before = [line.strip() for line in lines if line.strip() and not line.startswith("TASK ERROR") and line != status]
    why = "; ".join([status, *before[-2:]])
    kind = ended.upid.split(":")[5]
    raise told(why, api.label, about) or _failed(api, about, kind, why, ended.upid)


def _failed(api: Api, about: str, task: str, why: str, upid: str) -> PreflightError:
    return PreflightError(
        "api_failed",
        f"the task `{task}` of {about} failed on `{api.label}`",
        why=why,
        fix=f"`pvenode task log '{upid}'` on the node shows all of it",
        upid=upid,
    )
