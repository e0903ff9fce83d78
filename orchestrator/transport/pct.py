"""Inside a container, through the node it runs on; the container needs no sshd."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import DfoError
from orchestrator.transport.base import Completed
from orchestrator.transport.node import Node
from orchestrator.transport.shell import INSIDE, RemoteTransport
from orchestrator.transport.words import LOCALE, with_receipt

#: `--keep-env 0` leaves no HOME and no LANG; without it, PATH has no /usr/local.
ENVIRONMENT = {"HOME": "/root", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **LOCALE}


class PctTransport(RemoteTransport):
    """Runs argv as root in container `vmid` of `node`."""

    def __init__(self, node: Node, vmid: int, *, keep_env: bool = False) -> None:
        super().__init__(node.link, ContainerDoor(node, vmid, keep_env=keep_env))
        self.node = node
        self.vmid = vmid


class ContainerDoor:
    """`pct exec`: an argv, not a shell line, so only the login shell of the node needs quotes."""

    def __init__(self, node: Node, vmid: int, *, keep_env: bool) -> None:
        self._node = node
        self._vmid = vmid
        self._options = () if keep_env else ("--keep-env", "0")

    @property
    def label(self) -> str:
        return f"{self._node.label}, container {self._vmid}"

    def through(self, argv: Sequence[str]) -> tuple[str, ...]:
        inside = with_receipt(argv, INSIDE, ENVIRONMENT)
        return (*self._node.pct_command, "exec", str(self._vmid), *self._options, "--", *inside)

    def shut(self, ended: Completed) -> DfoError:
        return self._node.failed(self._vmid, ended)
