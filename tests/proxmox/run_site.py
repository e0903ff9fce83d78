"""A laptop that launches runs of the fake core into container 200: real units, real cgroups, a real way there."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.node import Node
from bench.sshd import Endpoint

from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.resolve import load_inventory
from orchestrator.runs.follow import Follower, LogRequest
from orchestrator.runs.reconnect import Backoff
from orchestrator.session import Session
from orchestrator.transport import open_transport

from .site import Site, site_on

FAKE = Path(__file__).parents[1] / "integration" / "fake_release"
#: The interpreter of the tests has what the fake core needs; nodes show it in their containers.
SHARED = sorted({sys.prefix, sys.base_prefix} - {"/usr"})


@dataclass
class RunSite(Site):
    """Target `lab` runs the stages that `configure` names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in FAKE.rglob("*.py"):
            self.write(str(path.relative_to(FAKE)), path.read_bytes())
        self.configure(train=[])

    def target(self, endpoint: Endpoint, vmid: int | None = 200, **more: Any) -> dict[str, Any]:
        deploy = {"include": ["dflash_core"], **more.pop("deploy", {})}
        stages = [stage for stage in ("preflight", "train", "export") if stage in self.stages]
        launch = {"config": "run.yaml", "stages": stages, "stop": {"grace": "5s"}, **more.pop("launch", {})}
        return super().target(endpoint, vmid, python=sys.executable, deploy=deploy, launch=launch, **more)

    @property
    def stages(self) -> dict[str, Any]:
        path = self.project / "run.yaml"
        return json.loads(path.read_text()) if path.exists() else {"train": []}

    def configure(self, endpoint: Endpoint | None = None, more: dict[str, Any] | None = None, **stages: Any) -> None:
        """The actions of each stage, the way there, and what else an inventory says."""
        self.write("run.yaml", json.dumps({"version": 1, **stages}))
        self.targets["lab"] = self.target(endpoint or self.node.ssh, **(more or {}))

    def result(self, *words: str) -> dict[str, Any]:
        done = self.dfo(*words, "--json")
        assert done.code == 0, done.out
        result: dict[str, Any] = json.loads(done.out.splitlines()[-1])["result"]
        return result

    def launch(self, *words: str) -> int:
        return int(self.result("launch", "lab", *words)["run"])

    def status(self, run: int) -> dict[str, Any]:
        found: dict[str, Any] = self.result("status", str(run), "lab")["runs"][0]
        return found

    def ended(self, run: int, seconds: float = 30) -> dict[str, Any]:
        """How the run stands once it has ended."""
        terminal = ("succeeded", "failed", "stopped")
        return until(lambda: found if (found := self.status(run))["state"] in terminal else None, seconds)

    def log(self, run: int, stage: str = "train") -> bytes:
        path = self.inside(f"runs/{run}/logs/{stage}.log")
        return path.read_bytes() if path.exists() else b""

    def await_log(self, run: int, text: bytes, stage: str = "train") -> None:
        until(lambda: text in self.log(run, stage))

    def state(self, run: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.inside(f"runs/{run}/state.json").read_text())
        return found

    def unit(self, run: int) -> str:
        name: str = self.state(run)["unit"]
        return name

    def shown(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit, as systemd in the container says them."""
        said = self.container.run(["systemctl", "show", unit, *(f"--property={name}" for name in names)]).stdout
        return dict(line.split("=", 1) for line in said.decode().splitlines())

    def processes(self, word: str) -> list[int]:
        """Pids inside whose command line has `word`."""
        done = self.container.run(["pgrep", "-f", word], check=False)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, word: str, *, number: int = 9) -> None:
        self.container.run(["pkill", f"-{number}", "-f", word])

    @contextmanager
    def session(self, name: str = "lab") -> Iterator[Session]:
        """As a command would open it."""
        self.argv()
        inventory = load_inventory(find_inventory(self.project / "inventory.yaml", environ={}))
        target = inventory.resolve(name, environ={}).target
        transport = open_transport(target)
        try:
            yield Session(target.name, transport, target.root, target.python)
        finally:
            transport.close()

    @contextmanager
    def follower(self, *, restart: float = 20.0, silence: float = 15.0, **request: Any) -> Iterator[Follower]:
        with self.session() as session:
            wanted = LogRequest(follow=True, **request)
            quick = Backoff((0.05, 0.1, 0.2, 0.5))
            yield Follower(session, wanted, backoff=quick, restart=restart, silence=silence)


def until(found: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `found` returns once it is true."""
    limit = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < limit, f"waited {seconds} s in vain"
        time.sleep(0.05)
    return value


@contextmanager
def run_site_on(node: Node, folder: Path) -> Iterator[RunSite]:
    """A deployed site in container 200; what still runs in the end is ended."""
    with site_on(node, folder, RunSite) as site:
        site.deploy()
        yield site
        if site.container.running:
            site.container.run(["systemctl", "kill", "--signal=KILL", "dfo-*"], check=False)
            site.container.run(["systemctl", "reset-failed"], check=False)
