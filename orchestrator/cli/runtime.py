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
    from orchestrator.inventory.resolve import Inventory, Resolution
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

    @cached_property
    def session(self) -> Session:
        """A conversation with the target. Raises ConnectError."""
        from orchestrator.session import Session
        from orchestrator.transport import open_transport

        target = self.target
        return Session(target.name, open_transport(target), target.root, target.python, self.console.debug)

    def close(self) -> None:
        """Drop the connection, if one was made."""
        if "session" in self.__dict__:
            self.session.transport.close()
