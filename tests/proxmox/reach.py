"""Transports of the product to the nodes of the bench."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from bench.node import Node as BenchNode
from bench.sshd import Endpoint

from orchestrator.inventory.reach import SshConfig, SshTimeouts
from orchestrator.transport.base import Tell, silent
from orchestrator.transport.link import open_link
from orchestrator.transport.node import Node
from orchestrator.transport.pct import PctTransport
from orchestrator.transport.shell import RemoteTransport, Sudo

CLIENTS = ("paramiko", "openssh")


def ssh_config(endpoint: Endpoint, client: str = "paramiko", **more: Any) -> SshConfig:
    """As an inventory would say it, with nothing of the tester's own ~/.ssh."""
    values: dict[str, Any] = {
        "host": endpoint.host,
        "port": endpoint.port,
        "user": endpoint.user,
        "keys": [str(endpoint.key)],
        "agent": False,
        "config": "none",
        "known_hosts": str(endpoint.known_hosts),
        "host_key_policy": "strict",
        "client": client,
        **more,
    }
    return SshConfig(**values)


def quick(**more: float) -> SshTimeouts:
    """Timeouts for tests that wait for them."""
    return SshTimeouts.model_construct(**{"connect": 2.0, "banner": 2.0, "auth": 3.0, "channel": 2.0, **more})


def ssh_to(
    endpoint: Endpoint, client: str = "paramiko", *, tell: Tell = silent, **more: Any
) -> closing[RemoteTransport]:
    """`transport: ssh`, closed after the block."""
    config = ssh_config(endpoint, client, **more)
    link = open_link("lab", config, tell=tell, trace=silent)
    return closing(RemoteTransport(link, Sudo(link.label) if config.sudo else None))


def node_at(endpoint: Endpoint, client: str = "paramiko", **more: Any) -> Node:
    config = ssh_config(endpoint, client, **more)
    return Node(open_link("lab", config, tell=silent, trace=silent), sudo=config.sudo)


def pct_to(endpoint: Endpoint, vmid: int = 200, client: str = "paramiko", **more: Any) -> closing[PctTransport]:
    """`transport: pct`, closed after the block."""
    return closing(PctTransport(node_at(endpoint, client, **more), vmid))


def served(node: BenchNode) -> int:
    """How many connections sshd serves."""
    return node.run(["ps", "axo", "args"]).stdout.count(b"sshd: root@")


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
