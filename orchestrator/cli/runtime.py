"""What a command body works with; everything in it is made on first use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.console import Console

if TYPE_CHECKING:
    from orchestrator.inventory.models import ResolvedTarget
    from orchestrator.inventory.reach import SshConfig
    from orchestrator.inventory.resolve import Inventory, Resolution
    from orchestrator.proxmox.container import Container
    from orchestrator.session import Session


@dataclass
class Runtime:
    """The console, the inventory, the chosen target and the session with it.

    The inventory is read when `target` is first asked for, and named on stderr then. The transport is opened
    when `session` is first asked for, and closed after the command.
    """

    console: Console
    inventory_option: Path | None = None
    target_option: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    flags: dict[str, tuple[object, str]] = field(default_factory=dict)

    def override(self, key: str, value: object, flag: str) -> None:
        """Let a flag of the command line win over the inventory: `rt.override("deploy.keep", keep, "--keep")`.

        `None` means the flag was not given. Call it before `target` is used.
        """
        assert "resolution" not in self.__dict__, "flags come before the target is resolved"
        if value is not None:
            self.flags[key] = (value, flag)

    @cached_property
    def inventory(self) -> Inventory:
        """The inventory file, loaded and checked."""
        from orchestrator.inventory.locate import find_inventory
        from orchestrator.inventory.resolve import load_inventory

        found = find_inventory(self.inventory_option, environ=self.environ)
        self.console.say(f"inventory {found.label}")
        return load_inventory(found)

    @cached_property
    def resolution(self) -> Resolution:
        """The chosen target together with the origin of each of its values."""
        name = self.inventory.choose(self.target_option, environ=self.environ)
        return self.inventory.resolve(name, environ=self.environ, flags=self.flags)

    @property
    def target(self) -> ResolvedTarget:
        """The chosen target. Raises UsageError."""
        return self.resolution.target

    def need_ssh(self) -> SshConfig:
        """How the target's host is reached. Raises UsageError for a target that needs no ssh."""
        from orchestrator.errors import UsageError

        if self.target.ssh is None:
            what = f"`{self.target.name}` is not reached by ssh"
            why = f"its transport is `{self.target.transport}`"
            raise UsageError("usage", what, why=why, fix="name a target with `transport: ssh` or `pct`")
        return self.target.ssh

    @cached_property
    def session(self) -> Session:
        """A conversation with the target. Raises ConnectError."""
        from orchestrator.session import Session
        from orchestrator.transport import open_transport

        target = self.target
        transport = open_transport(target, tell=self.console.say, trace=self.console.debug)
        return Session(target.name, transport, target.root, target.python, self.console.debug)

    @cached_property
    def container(self) -> Container | None:
        """The target's container behind the API of Proxmox VE, if the inventory has a token. Nothing is contacted yet.

        Raises UsageError `secret_missing`.
        """
        pct = self.target.pct
        if pct is None or pct.api.token_id is None:
            return None
        from orchestrator.proxmox.client import open_api
        from orchestrator.proxmox.container import Container

        assert pct.container is not None
        return Container(open_api(pct.api, self.target.project), pct.container)

    def beside(self, name: str, console: Console) -> Runtime:
        """Another target of the same inventory, with a console of its own."""
        other = Runtime(console, target_option=name, environ=self.environ, flags=dict(self.flags))
        other.inventory = self.inventory
        return other

    def close(self) -> None:
        """Drop the connections that were made."""
        if "session" in self.__dict__:
            self.session.transport.close()
        if self.__dict__.get("container") is not None:
            self.__dict__["container"].api.close()
