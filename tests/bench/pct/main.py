"""`pct` of the bench: behaves as Proxmox VE's, above all where that is surprising. README.md says how far."""

import os
import sys
import time

from . import options, world
from .verify import verify
from .world import PctError

# Where a command lives; only that module is imported.
HOMES = {
    "attach": ("enter", "exec"),
    "power": ("reboot", "shutdown", "start", "stop", "suspend"),
    "settings": ("set", "unlock"),
    "show": ("config", "df", "list", "pending", "status"),
    "snapshots": ("delsnapshot", "listsnapshot", "rollback", "snapshot"),
    "transfer": ("pull", "push"),
}


def main():
    try:
        time.sleep(float(world.switch("delay") or 0))
        argv = _as_perl_reads(sys.argv[1:])
        _require_cluster()
        command = options.find(argv)
        values = options.parse(command, argv[1:])
        verify(command, values)
        _implementation(command.name)(values.pop("vmid", None), values)
    except PctError as error:
        sys.stdout.flush()
        world.warn(error.text)
        raise SystemExit(error.status) from None


def _implementation(name):
    homes = [home for home, names in HOMES.items() if name in names]
    if not homes:
        raise PctError(f"pct {name} is not part of the bench", 70)
    module = __import__(f"pct.{homes[0]}", fromlist=[name])
    return getattr(module, f"pct_{name}")


def _require_cluster():
    """Every call talks to the cluster file system first, which only root may, and only while it runs."""
    down = world.switch("cluster-down") is not None
    if os.geteuid() == 0 and not down:
        return
    reason = "Connection refused" if down else "Unknown error -1"
    for number in (1, 2, 3):
        world.warn(f"ipcc_send_rec[{number}] failed: {reason}")
    raise PctError(f"Unable to load access control list: {reason}", 111 if down else 255)


def _as_perl_reads(argv):
    """Arguments decoded by the locale: what it cannot read becomes U+FFFD, byte by byte."""
    encoding = _encoding()
    if encoding == "utf-8":
        return [os.fsencode(word).decode("utf-8", "replace") for word in argv]
    return ["".join(chr(byte) if byte < 128 else "\ufffd" for byte in os.fsencode(word)) for word in argv]


def _encoding():
    """What the caller's locale says; a locale that is not installed makes Perl complain and take plain C."""
    import _locale

    from .attach import first_environment

    environment = {key.decode(): value.decode("utf-8", "replace") for key, value in first_environment().items()}
    name = next((environment[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(key)), "C")
    try:
        _locale.setlocale(_locale.LC_CTYPE, name)
    except _locale.Error:
        _complain(environment)
        return "ascii"
    return "utf-8" if name.lower().replace("-", "").endswith(".utf8") else "ascii"


def _complain(environment):
    world.warn("perl: warning: Setting locale failed.\nperl: warning: Please check that your locale settings:")
    values = [f'"{environment[key]}"' if environment.get(key) else "(unset)" for key in ("LANGUAGE", "LC_ALL", "LANG")]
    world.warn("\tLANGUAGE = {},\n\tLC_ALL = {},\n\tLANG = {}".format(*values))
    world.warn("    are supported and installed on your system.")
    world.warn('perl: warning: Falling back to the standard locale ("C").')
