"""Power of a target's container."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from orchestrator.errors import PreflightError
from orchestrator.session import Session
from orchestrator.transport import container_of

if TYPE_CHECKING:
    from orchestrator.proxmox.container import Container

#: `pct start` returns when init runs; a node that boots many may take long (seconds).
START_DEADLINE = 120.0
ANSWER_DEADLINE = 30.0


def start(session: Session, api: Container | None = None) -> None:
    """Start it, through the API if there is one, else by `pct start`, and wait until programs run inside.

    Raises PreflightError (`container_stopped` when it does not stay up, `cluster_not_ready`, …), LockError.
    """
    transport = container_of(session.transport)
    assert transport is not None, "only containers have power of their own"
    if api is not None:
        api.start(deadline=START_DEADLINE)
    else:
        ended = transport.node.pct("start", str(transport.vmid), deadline=START_DEADLINE)
        if ended.returncode != 0:
            raise transport.node.failed(transport.vmid, ended)
    limit = time.monotonic() + ANSWER_DEADLINE
    while True:
        try:
            transport.run(("true",), deadline=ANSWER_DEADLINE)
            return
        except PreflightError:
            if time.monotonic() > limit:
                raise
        time.sleep(0.5)
