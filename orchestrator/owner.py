"""Who we are, as the target's lock and audit file name us."""

from __future__ import annotations

import getpass
import os
import socket

from orchestrator.session import Session


def owner_for(session: Session, command: str) -> dict[str, object]:
    """Who we are, for programs that take the lock. `command`: as typed, such as `dfo deploy`."""
    return {
        "user": getpass.getuser(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": command,
        "target": session.name,
    }
