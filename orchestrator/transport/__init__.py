"""Ways to reach a target; `open_transport` picks the one its inventory names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.transport.base import Completed, Stream, Transport

if TYPE_CHECKING:
    from orchestrator.inventory.models import ResolvedTarget


def open_transport(target: ResolvedTarget) -> Transport:
    """The transport of a target, ready for commands."""
    from orchestrator.transport.local import LocalTransport

    assert target.transport == "local", f"no transport for {target.transport!r}"
    return LocalTransport()


__all__ = ["Completed", "Stream", "Transport", "open_transport"]
