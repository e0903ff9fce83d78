"""`pct set`, `pct unlock`: changes to the configuration."""

import os

from . import power, world
from .guest_config import PENDING, GuestConfig, Section, description
from .world import Lock, PctError, warn

AT_NEXT_START = ("features", "unprivileged", "ostype", "arch", "console", "tty")
HOTPLUGGED = ("dev", "mp")
ADDRESSED = ("delete", "revert", "digest", "force", "vmid")


def pct_set(vmid, args):
    changes = {key: _text(key, value) for key, value in args.items() if key not in ADDRESSED}
    deletes = [key for part in args.get("delete", []) for key in part.replace(";", ",").split(",")]
    if not changes and not deletes and "revert" not in args:
        raise PctError("no options specified", 2)
    world.require(vmid)
    for key, value in changes.items():
        if _is_device(key) and not os.path.exists(power.device(value)["path"]):
            raise PctError(f"Device {power.device(value)['path']} does not exist", 2)
    with Lock(vmid):
        config = GuestConfig(vmid)
        config.require_unlocked()
        _apply(config, changes, deletes, world.running(vmid))
        config.write()


def _apply(config, changes, deletes, running):
    for key in deletes:
        if key in config.main.values:
            del config.main.values[key]
        else:
            warn(f"cannot delete '{key}' - not set in current configuration!")
    for key, value in changes.items():
        if running and key.rstrip("0123456789") in HOTPLUGGED and key[-1].isdigit():
            raise refuse(f"{key}: unable to hotplug {key}: failed to change apparmor profile: Invalid argument\n")
        if running and key in AT_NEXT_START:
            config.sections.setdefault(PENDING, Section()).values[key] = value
        else:
            config.main.values[key] = value


def pct_unlock(vmid, _):
    world.require(vmid)
    with Lock(vmid):
        config = GuestConfig(vmid)
        if "lock" not in config.main.values:
            raise PctError("no lock found trying to remove any lock")
        del config.main.values["lock"]
        config.write()


def refuse(text):
    return PctError(f"400 Parameter verification failed.\n{text}\npct set <vmid> [OPTIONS]", 1)


def _text(key, value):
    if isinstance(value, bool):
        return str(int(value))
    if key == "description":
        return description(value)
    return value


def _is_device(key):
    return key.startswith("dev") and key[3:].isdigit()
