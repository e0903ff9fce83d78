"""A target that runs the fake core: everything between `dfo` and the processes is real."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.resolve import load_inventory
from orchestrator.runs.launch import Started, prepare, start
from orchestrator.runs.run import RunStatus
from orchestrator.runs.status import fetch_status
from orchestrator.runs.stop import Stopped, stop_run
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

FAKE = Path(__file__).parent.parent / "fake_release"
OLD, NEW = "20261130-1612-9f3c1a", "20261201-0800-77b0e2"


def until(found: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `found` returns once it is true."""
    limit = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < limit, f"waited {seconds} s in vain"
        time.sleep(0.02)
    return value


@dataclass
class Bench:
    """A project folder with an inventory, and a target folder with the fake core as its release."""

    project: Path
    root: Path
    launch: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    gpus: list[int] | None = None

    def deploy(self, release: str = OLD) -> None:
        shutil.copytree(FAKE, self.root / "releases" / release, ignore=shutil.ignore_patterns("__pycache__"))
        fresh = self.root / "current.new"
        fresh.symlink_to(f"releases/{release}")
        fresh.replace(self.root / "current")

    def configure(self, **stages: Any) -> None:
        """The actions of each stage; a run has only the stages named here (and warm-up if asked)."""
        self.launch["stages"] = [name for name in ("preflight", "train", "evaluate", "export") if name in stages]
        (self.project / "run.yaml").write_text(yaml.safe_dump({"version": 1, **stages}))

    @property
    def inventory(self) -> Path:
        """Written anew at each look, so that a test may change `launch`, `env` and `gpus`."""
        path = self.project / "inventory" / "dfo.yaml"
        path.parent.mkdir(exist_ok=True)
        target = {
            "transport": "local",
            "python": sys.executable,
            "deploy": {"root": str(self.root)},
            "env": self.env,
            "gpus": self.gpus,
            "launch": {"config": "run.yaml", "stop": {"grace": "10s"}, **self.launch},
        }
        path.write_text(yaml.safe_dump({"version": 1, "targets": {"lab": target}}))
        return path

    @property
    def target(self) -> ResolvedTarget:
        return load_inventory(find_inventory(self.inventory, environ={})).resolve("lab", environ={}).target

    @property
    def session(self) -> Session:
        return Session("lab", LocalTransport(), str(self.root), sys.executable)

    def start(self, *, warmup: bool = False, force: bool = False, **options: Any) -> Started:
        plan = prepare(self.session, self.target, warmup=warmup, **options)
        return start(self.session, self.target, plan, force=force, lock_wait=20.0)

    def run(self, *, warmup: bool = False, **options: Any) -> RunStatus:
        """Start a run and wait for its end."""
        return self.wait(self.start(warmup=warmup, **options).run)

    def status(self, run: int) -> RunStatus:
        return fetch_status(self.session, run=run).runs[0]

    def wait(self, run: int, seconds: float = 30.0) -> RunStatus:
        return until(lambda: status if (status := self.status(run)).state.ended else None, seconds)

    def stop(self, run: int | None = None, grace: float | None = None) -> Stopped:
        return stop_run(self.session, run=run, grace=grace)

    def folder(self, run: int) -> Path:
        return self.root / "runs" / str(run)

    def log(self, run: int, stage: str) -> str:
        path = self.folder(run) / "logs" / f"{stage}.log"
        return path.read_text() if path.exists() else ""

    def await_log(self, run: int, text: str, stage: str = "train") -> None:
        until(lambda: text in self.log(run, stage))

    def spec(self, run: int) -> dict[str, Any]:
        return json.loads((self.folder(run) / "run.json").read_text())

    def state(self, run: int) -> dict[str, Any]:
        return json.loads((self.folder(run) / "state.json").read_text())

    def begun(self, run: int) -> list[str]:
        lines = (self.folder(run) / "stages.jsonl").read_text().splitlines()
        return [event["stage"] for event in map(json.loads, lines) if event["event"] == "begin"]

    def stage_pid(self, run: int) -> int:
        """The process of the running stage: the one whose command line names the core."""
        return until(lambda: next((p for p in self.pids(run) if b"dflash_core\0" in _read(p, "cmdline")), None))

    def pids(self, run: int) -> list[int]:
        """Every living process that carries the run's mark, looked up without the code under test."""
        mark = f"DFO_RUN_ID={self.spec(run)['marker']}".encode()
        return [pid for pid in _processes() if mark in _read(pid, "environ").split(b"\0")]

    def gone(self, run: int) -> bool:
        """Whether no process of the run is left; its supervisor gets the moment it needs after its last word."""
        return bool(until(lambda: not self.pids(run), 2))

    def dfo(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """The command itself, as a process of its own."""
        argv = [sys.executable, "-m", "orchestrator", *words, "-i", str(self.inventory)]
        environ = {**os.environ, "PYTHONPATH": str(FAKE.parents[2]), **variables}
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.project, env=environ, stdout=pipe, stderr=pipe, text=True)

    def numbers(self) -> list[int]:
        folder = self.root / "runs"
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []

    def end(self) -> list[int]:
        """Kill what a test left running; returns the pids."""
        left = [pid for run in self.numbers() for pid in self.pids(run)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    project = tmp_path / "project"
    project.mkdir()
    made = Bench(project, tmp_path / "target")
    made.deploy()
    yield made
    made.end()
