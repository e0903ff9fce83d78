"""`pvesh get …` of the bench, as JSON only: what a caller of `pct` may want to look up."""

import json
import sys

from . import world
from .guest_config import GuestConfig


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if words[:1] != ["get"] or len(words) < 2:
        _refuse("the bench knows only 'pvesh get'")
    parts = words[1].strip("/").split("/")
    node = ["nodes", world.node_name()]
    if parts == ["version"]:
        answer = {"release": "9.2", "repoid": "bench", "version": "9.2.11"}
    elif parts == [*node, "tasks"]:
        answer = _tasks(_option("typefilter"), _option("vmid"))[: int(_option("limit") or 50)]
    elif parts == [*node, "lxc"]:
        answer = [_guest(vmid) for vmid in world.vmids()]
    else:
        _refuse(f"No '{words[0]}' handler defined for '{words[1]}'")
    print(json.dumps(answer, separators=(",", ":")))


def _option(name):
    if f"--{name}" in sys.argv:
        return sys.argv[sys.argv.index(f"--{name}") + 1]
    return None


def _tasks(kind, vmid):
    """Newest first."""
    try:
        with open(f"{world.TASKS}/index") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    tasks = [_task(*line.split(" ", 2)) for line in reversed(lines)]
    return [task for task in tasks if kind in (None, task["type"]) and vmid in (None, task["id"])]


def _task(upid, end, status):
    _, node, pid, pstart, start, kind, vmid, user, _ = upid.split(":")
    times = {"pid": int(pid, 16), "pstart": int(pstart, 16), "starttime": int(start, 16), "endtime": int(end, 16)}
    return {"id": vmid, "node": node, "status": status, "type": kind, "upid": upid, "user": user, **times}


def _guest(vmid):
    values = GuestConfig(vmid).main.values
    status = "running" if world.running(vmid) else "stopped"
    sizes = {"maxmem": int(values.get("memory", 512)) << 20, "maxswap": int(values.get("swap", 512)) << 20}
    return {"name": values.get("hostname"), "status": status, "type": "lxc", "vmid": vmid, **sizes}


def _refuse(text):
    world.warn(text)
    raise SystemExit(255)
