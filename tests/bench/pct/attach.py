"""`pct exec` and `pct enter`: checks, then the process becomes lxc-attach, so that the rest is the kernel's doing."""

import _signal
import os
import time

from . import world
from .world import PctError

PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"


def pct_exec(vmid, args):
    _require_running(vmid)
    if not args["extra-args"]:
        raise PctError("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.")
    _become_attach(vmid, args.get("keep-env", True), ["--", *args["extra-args"]])


def pct_enter(vmid, args):
    _require_running(vmid)
    _become_attach(vmid, args.get("keep-env", True), [])


def _require_running(vmid):
    world.require(vmid)
    if not world.running(vmid):
        raise PctError(f"container '{vmid}' not running!")


def _become_attach(vmid, keep_env, command):
    if world.switch("hanging-attach") is not None:
        time.sleep(10**6)
    # LXC 6, which the original has, sets TERM; Debian's LXC 5 does not.
    argv = ["lxc-attach", "-n", str(vmid), "--set-var=TERM=linux", *([] if keep_env else ["--clear-env"]), *command]
    # Python ignores SIGPIPE; a program that inherited that would outlive its reader.
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
    environment = {**first_environment(), b"PATH": PATH}
    if world.switch("old-lxc") is None:
        os.execvpe(argv[0], argv, environment)
    status = os.spawnvpe(os.P_WAIT, argv[0], argv, environment)
    raise SystemExit(0 if status < 0 or status > 128 else status)


def first_environment():
    """The environment that `pct` was started with; Python's start may have added a locale to `os.environ`."""
    with open("/proc/self/environ", "rb") as file:
        entries = [entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry]
    return {key: value for key, value in entries if not key.startswith(b"PCT_")}
