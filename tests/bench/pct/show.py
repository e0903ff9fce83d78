"""What `pct` tells without touching anything: no lock is taken, and a container's lock does not matter."""

import os

from . import world
from .guest_config import PENDING, GuestConfig
from .world import PctError


def pct_list(_vmid, _args):
    rows = [("VMID", "Status", "Lock", "Name")]
    for vmid in world.vmids():
        values = GuestConfig(vmid).main.values
        rows.append((str(vmid), _status(vmid), values.get("lock", ""), values.get("hostname", f"CT{vmid}")))
    if len(rows) > 1:
        for row in rows:
            print("%-10s %-10s %-12s %-20s" % row)


def pct_status(vmid, args):
    world.require(vmid)
    if not args.get("verbose"):
        print(f"status: {_status(vmid)}")
        return
    values = GuestConfig(vmid).main.values
    facts = {
        "cpus": values.get("cores", os.cpu_count()),
        "maxmem": int(values.get("memory", 512)) << 20,
        "maxswap": int(values.get("swap", 512)) << 20,
        "name": values.get("hostname"),
        "status": _status(vmid),
        "type": "lxc",
        "vmid": vmid,
        **dict.fromkeys(("disk", "diskread", "diskwrite", "mem", "netin", "netout", "swap", "uptime"), 0),
    }
    disk = os.statvfs(f"{world.folder(vmid)}/disk")
    facts["maxdisk"] = disk.f_blocks * disk.f_frsize
    if "lock" in values:
        facts["lock"] = values["lock"]
    if world.running(vmid):
        facts["pid"] = world.init_pid(vmid)
        facts["disk"] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        facts["uptime"] = _uptime(facts["pid"])
    for key in sorted(facts):
        print(f"{key}: {facts[key]}")


def pct_config(vmid, args):
    world.require(vmid)
    config = GuestConfig(vmid)
    if "snapshot" in args:
        if args["snapshot"] not in config.snapshots:
            raise PctError(f"snapshot '{args['snapshot']}' does not exist")
        section = config.snapshots[args["snapshot"]]
    else:
        section = config.main.copy()
        if not args.get("current") and PENDING in config.sections:
            section.values.update(config.sections[PENDING].values)
    hidden = ("parent", "snaptime")
    print("\n".join(line for line in section.lines() if not line.startswith(hidden)))


def pct_pending(vmid, _):
    world.require(vmid)
    config = GuestConfig(vmid)
    new = config.sections[PENDING].values if PENDING in config.sections else {}
    for key in sorted({*config.main.values, *new}):
        if key in config.main.values:
            print(f"cur {key}: {config.main.values[key]}")
        if key in new:
            print(f"new {key}: {new[key]}")


def pct_df(vmid, _):
    if not world.exists(vmid):
        missing = f"Configuration file 'nodes/{world.node_name()}/lxc/{vmid}.conf' does not exist"
        raise PctError(f"{vmid} doesn't exist\n{missing}", 2)
    volume = GuestConfig(vmid).main.values["rootfs"].split(",")[0]
    disk = os.statvfs(f"{world.folder(vmid)}/disk")
    total, free = (blocks * disk.f_frsize for blocks in (disk.f_blocks, disk.f_bfree))
    used = f"{100 * (total - free) / total:.1f}"
    head = ("MP", "Volume", "Size", "Used", "Avail", "Use%", "Path")
    row = ("rootfs", volume, _human(total), _human(total - free), _human(free), used, "/")
    widths = [max(map(len, cells)) for cells in zip(head, row, strict=True)]
    for cells in (head, row):
        left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(cells[2:6], widths[2:6], strict=True)]
        print(" ".join([*left, *right, cells[6]]))


def _status(vmid):
    return "running" if world.running(vmid) else "stopped"


def _uptime(pid):
    with open(f"/proc/{pid}/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    with open("/proc/uptime") as file:
        return int(float(file.read().split()[0]) - started)


def _human(size):
    for unit in ("B", "K", "M"):
        if size < 1024:
            return f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.1f}G"
