"""Snapshots: a copy of the overlay's upper folder and of the configuration."""

import time

from . import power, world
from .guest_config import PENDING, GuestConfig, description
from .world import Lock, PctError, spawn

NOT_COPIED = ("description", "lock", "snaptime")  # in neither direction


def pct_snapshot(vmid, args):
    name = args["snapname"]
    if name == "current":
        raise PctError("unable to use snapshot name 'current' (reserved name)", 2)
    world.require(vmid, 255)
    with Lock(vmid):
        config = GuestConfig(vmid)
        config.require_unlocked()
        if name in config.snapshots:
            raise PctError(f"snapshot name '{name}' already used")
        section = _without(config.main, NOT_COPIED)
        section.values["snaptime"] = str(int(time.time()))
        if "description" in args:
            section.values["description"] = description(args["description"])
        config.main.values["parent"] = name
        config.sections[name] = section
        config.write()
        _copy(_disk(vmid), _store(vmid, name))
        world.record_task("vzsnapshot", vmid, "OK")


def pct_delsnapshot(vmid, args):
    name = args["snapname"]
    world.require(vmid, 255)
    with Lock(vmid):
        config = GuestConfig(vmid)
        section = _section(config, name)
        config.require_unlocked()
        for other in (config.main, *config.snapshots.values()):
            if other.values.get("parent") == name:
                other.values.pop("parent")
                if "parent" in section.values:
                    other.values["parent"] = section.values["parent"]
        del config.sections[name]
        config.write()
        spawn(["rm", "-rf", _store(vmid, name)])
        world.record_task("vzdelsnapshot", vmid, "OK")


def pct_rollback(vmid, args):
    """Stops the container, and leaves it stopped unless told otherwise."""
    name = args["snapname"]
    world.require(vmid, 255)
    with Lock(vmid):
        config = GuestConfig(vmid)
        section = _section(config, name)
        config.require_unlocked()
        if world.running(vmid):
            power.halt(vmid)
        main = _without(section, NOT_COPIED)
        main.values["parent"] = name
        if "description" in config.main.values:
            main.values["description"] = config.main.values["description"]
        config.main = main
        config.write()
        power.detach_disk(vmid)
        spawn(["rm", "-rf", _disk(vmid), f"{world.folder(vmid)}/disk/work"])
        _copy(_store(vmid, name), _disk(vmid))
        power.attach_disk(vmid)
        world.record_task("vzrollback", vmid, "OK")
        if args.get("start"):
            power.start_as_task(vmid)


def pct_listsnapshot(vmid, _):
    world.require(vmid)
    config = GuestConfig(vmid)
    names, name = [], config.main.values.get("parent")
    while name:
        names.insert(0, name)
        name = config.snapshots[name].values.get("parent")
    for depth, name in enumerate([*names, "current"]):
        values = {} if name == "current" else config.snapshots[name].values
        stamp = time.localtime(int(values["snaptime"])) if values else None
        when = time.strftime("%Y-%m-%d %H:%M:%S", stamp) if stamp else ""
        text = values.get("description", "no-description%0A").split("%0A")[0] if values else "You are here!"
        prefix = " " * depth + "`-> "
        print(f"{prefix}{name:<{32 - len(prefix)}}{when:<24}{text}")


def _section(config, name):
    if name not in config.snapshots or name == PENDING:
        raise PctError(f"snapshot '{name}' does not exist")
    return config.snapshots[name]


def _without(section, keys):
    copy = section.copy()
    for key in keys:
        copy.values.pop(key, None)
    return copy


def _disk(vmid):
    return f"{world.folder(vmid)}/disk/upper"


def _store(vmid, name):
    return f"{world.folder(vmid)}/snapshots/{name}"


def _copy(source, target):
    status, _ = spawn(["cp", "-a", "--reflink=auto", source, target])
    assert status == 0, (source, target)
