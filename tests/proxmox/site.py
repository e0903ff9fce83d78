"""A laptop with a project and an inventory, and what its deploys did to a node and a container of the bench."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from bench.container import Container
from bench.node import Node
from bench.sshd import Endpoint

from orchestrator.cli.entry import run

ODD_NAME = 'pkg/it\'s "a"\nname with é and 日本.txt'


@dataclass
class Site:
    """Target `lab` is container 200 on `node`. What a deploy sends is at least 300 kB, and cannot be compressed."""

    node: Node
    project: Path
    root: str

    def __post_init__(self) -> None:
        self._at_start = set(self.node.leftovers())
        self.targets = {"lab": self.target(self.node.ssh)}
        self.write("pkg/__init__.py", "version = 1\n")
        self.write("pkg/model.py", "from . import version\n")
        self.write(ODD_NAME, "odd\n")
        self.write("pkg/noise.bin", os.urandom(300_000))

    @property
    def container(self) -> Container:
        return self.node.containers[200]

    def target(self, endpoint: Endpoint, vmid: int | None = 200, **more: Any) -> dict[str, Any]:
        """As an inventory says it: `transport: pct`, or `ssh` without a `vmid`."""
        ssh = {"host": endpoint.host, "port": endpoint.port, "user": endpoint.user, "keys": [str(endpoint.key)]}
        ssh |= {"agent": False, "config": "none", "known_hosts": str(endpoint.known_hosts), "host_key_policy": "strict"}
        way = {"transport": "pct", "pct": {"container": vmid}} if vmid else {"transport": "ssh"}
        deploy = {"root": self.root, "include": ["pkg"], **more.pop("deploy", {})}
        return {**way, "ssh": {**ssh, **more.pop("ssh", {})}, "deploy": deploy, **more}

    def write(self, path: str, data: str | bytes) -> None:
        full = self.project / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(data.encode() if isinstance(data, str) else data)

    def change(self) -> None:
        """Something new to send."""
        self.write("pkg/noise.bin", os.urandom(300_000))

    # Calling dfo

    def argv(self, *arguments: str) -> list[str]:
        inventory = self.project / "inventory.yaml"
        groups = {group: {} for target in self.targets.values() for group in target.get("groups", [])}
        inventory.write_text(json.dumps({"version": 1, "groups": groups, "targets": self.targets}))
        return [*arguments, "-i", str(inventory)]

    def dfo(self, *arguments: str) -> SimpleNamespace:
        """`code`, `out`, `err` of a command."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run(self.argv(*arguments))
        return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())

    def deploy(self, *arguments: str) -> dict[str, Any]:
        """The `result` of a deploy that works."""
        done = self.dfo("deploy", "lab", "--json", *arguments)
        assert done.code == 0, done.out
        result: dict[str, Any] = json.loads(done.out)["result"]
        return result

    def refused(self, *arguments: str) -> SimpleNamespace:
        """`code` and the fields of the `error` of a deploy that fails."""
        done = self.dfo("deploy", "lab", "--json", *arguments)
        answer = json.loads(done.out)
        assert not answer["ok"], done.out
        return SimpleNamespace(code=done.code, **answer["error"])

    def process(self, *arguments: str, first: str = "") -> subprocess.Popen[bytes]:
        """dfo in a process of its own; `first` is Python that it runs before."""
        code = f"import os, signal, sys, threading, time\n{first}\nfrom orchestrator.cli import main\nsys.exit(main())"
        command = [sys.executable, "-c", code, *self.argv(*arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    # Looking at what it did

    def inside(self, path: str = "") -> Path:
        return self.container.root / self.root.lstrip("/") / path

    @property
    def current(self) -> str | None:
        link = self.inside("current")
        return link.readlink().name if link.is_symlink() else None

    def whole(self) -> dict[str, bytes]:
        """The files of the current release; fails if one is not what its manifest says."""
        assert self.current is not None
        folder = self.inside(f"releases/{self.current}")
        manifest = json.loads((folder / ".dfo-manifest.json").read_text())["files"]
        files = {name: (folder / name).read_bytes() for name in manifest}
        assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == {
            name: entry["sha256"] for name, entry in manifest.items()
        }
        return files

    def is_deployed(self) -> None:
        """The current release is the project, and nothing else is anywhere."""
        files = self.whole()
        for path in (path for path in (self.project / "pkg").rglob("*") if path.is_file()):
            assert files.pop(str(path.relative_to(self.project))) == path.read_bytes()
        assert not files
        self.is_clean()

    def is_clean(self, patience: float = 10.0) -> None:
        """Nothing is left on the node and in the container; orphans of a laptop that died get a moment."""
        limit = time.monotonic() + patience
        while (found := self.traces()) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not found, found

    def traces(self) -> list[str]:
        left = sorted(set(self.node.leftovers()) - self._at_start)
        patterns = ("releases/*.partial", "tmp/lock-*", "tmp/pushed-*", "current.*", "lock")
        return left + [str(path) for pattern in patterns for path in self.inside().glob(pattern)]


AnySite = TypeVar("AnySite", bound=Site)


@contextmanager
def site_on(node: Node, folder: Path, kind: type[AnySite] = Site) -> Iterator[AnySite]:  # type: ignore[assignment]
    """A site with a folder of its own in container 200, gone afterwards."""
    root = f"/opt/{folder.name}"
    yield kind(node, folder, root)
    container = node.containers[200]
    if container.running:
        container.run(["rm", "-rf", root])


@contextmanager
def counted(node: Node) -> Iterator[list[str]]:
    """The `pct` commands that ran meanwhile: `exec 200`, `push 200`, …"""
    program, log = node.root / "usr/sbin/pct", node.root / "run/bench/calls"
    text, calls = program.read_text(), []
    note = "open('/run/bench/calls', 'a').write(' '.join(sys.argv[1:3]) + '\\n')"
    program.write_text(text.replace("import sys\n", f"import sys\n{note}\n"))
    try:
        yield calls
    finally:
        calls += log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        program.write_text(text)
