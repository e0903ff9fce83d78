"""Ways to reach a target; `open_transport` picks the one its inventory names.

    open_transport(target)            a Transport: run(argv, stdin=, deadline=), stream(argv, stdin=), close(), label
    container_of(transport)           the transport as a PctTransport if it is one, else None
        LocalTransport                child processes of this machine
        RemoteTransport               `transport: ssh`: a Link, perhaps with sudo behind it
        PctTransport                  `transport: pct`: a Link to the node, `pct exec N` behind it; has `.node`, `.vmid`

    Link                              one connection to one host: start(shell line) → Pipes, close(), label
        ParamikoLink, OpenSshLink     nothing is contacted before the first command

    Node                              what a deploy does on the Proxmox VE node itself (`PctTransport.node`)
        label                         `root@pve1`
        run(argv, stdin=, deadline=)  as the login user, without sudo; never raises for an exit status
        pct(*words, stdin=, deadline=)  `[sudo -n] /usr/sbin/pct words…`; never raises for an exit status
        failed(vmid, completed)       → the PreflightError that pct's words on stderr stand for
        status(vmid)                  "running" or "stopped"; raises container_missing, not_permitted, …
        config(vmid)                  {"lock": "backup", "unprivileged": "1", "hostname": "ct101", …}
        push(vmid, source, destination, deadline=)  `pct push`. Exit 0 proves nothing: check a hash inside
        private_folder()              context manager → absolute path of a folder only we can read; removed on leaving
        put(path, chunks, deadline=)  write a new file on the node (mode 0600) from an iterable of bytes

Every call raises ConnectError (`unreachable`, `host_key_unknown`, `host_key_mismatch`, `login_refused`,
`connection_lost`), DeadlineError, or PreflightError (`container_stopped`, `container_missing`, `not_permitted`,
`remote_failed`), and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.transport.base import Completed, Stream, Tell, Transport, silent

if TYPE_CHECKING:
    from orchestrator.inventory.models import ResolvedTarget
    from orchestrator.transport.link import Link
    from orchestrator.transport.pct import PctTransport
    from orchestrator.transport.shell import RemoteTransport


def open_transport(target: ResolvedTarget, *, tell: Tell = silent, trace: Tell = silent) -> Transport:
    """The transport of a target, ready for commands; it connects when the first one comes.

    `tell` is told what the person should know (a new host key was accepted, another client was chosen), `trace` each
    hop, for `-v`.
    """
    if target.transport == "local":
        from orchestrator.transport.local import LocalTransport

        return LocalTransport()
    from orchestrator.transport.link import open_link

    assert target.ssh is not None
    return transport_over(open_link(target.name, target.ssh, tell=tell, trace=trace), target)


def transport_over(link: Link, target: ResolvedTarget) -> RemoteTransport:
    """The transport of a target that is reached by ssh, over a link to its host."""
    from orchestrator.transport.node import Node
    from orchestrator.transport.pct import PctTransport
    from orchestrator.transport.shell import RemoteTransport, Sudo

    assert target.ssh is not None
    if target.transport == "ssh":
        return RemoteTransport(link, Sudo(link.label) if target.ssh.sudo else None)
    assert target.pct is not None and target.pct.container is not None
    node = Node(link, sudo=target.ssh.sudo, pct=target.pct.path)
    return PctTransport(node, target.pct.container, keep_env=target.pct.keep_env)


def container_of(transport: Transport) -> PctTransport | None:
    """The way into a container through its node, or None for every other way."""
    if not hasattr(transport, "vmid"):  # so that nobody else has to import paramiko
        return None
    from orchestrator.transport.pct import PctTransport

    return transport if isinstance(transport, PctTransport) else None


__all__ = ["Completed", "Stream", "Transport", "container_of", "open_transport", "transport_over"]
