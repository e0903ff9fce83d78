"""What the bench needs of the machine, and what to do where that is missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PROGRAMS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "lxc-start": "lxc",
    "newuidmap": "uidmap",
    "mmdebstrap": "mmdebstrap",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "sudo": "sudo",
}
SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> str:
    """Why the bench cannot run here, with the cure; empty when it can."""
    if sys.platform != "linux":
        return "the bench needs Linux"
    packages = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=SEARCH)})
    if not Path("/usr/bin/python3").exists():
        packages.append("python3")
    if packages:
        return f"the bench needs Debian packages that are not here: apt install {' '.join(packages)}"
    if os.geteuid() != 0:
        return "the bench starts containers, so it needs root: run the tests as root, in a virtual machine"
    return ""
