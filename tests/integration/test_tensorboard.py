"""`dfo tensorboard` with a target on this machine: the real TensorBoard, carried over our own streams."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

pytest.importorskip("tensorboard")


def boards() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "tensorboard.main" in " ".join(child.cmdline())]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "dfo.yaml").write_text("version: 1\ntargets:\n  here: {transport: local}\n")
    (tmp_path / ".dfo" / "target" / "runs" / "1" / "tensorboard").mkdir(parents=True)
    return tmp_path


def show(project: Path, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "orchestrator", "tensorboard", *words, "-i", str(project / "dfo.yaml")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFO_")}
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=project, env=environ, stdout=pipe, stderr=pipe, text=True)


def test_it_shows_and_leaves_nothing_behind(project: Path) -> None:
    showing = show(project)
    assert showing.stdout is not None and showing.stderr is not None
    url = showing.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), showing.stderr.read()
    with urllib.request.urlopen(url, timeout=30) as page:
        assert b"<title>TensorBoard</title>" in page.read()
    processes = boards()
    assert processes
    showing.send_signal(signal.SIGINT)
    _, said = showing.communicate(timeout=10)
    assert showing.returncode == 0 and "shows all runs; Ctrl-C ends it." in said and "runs go on" in said
    assert not psutil.wait_procs(processes, timeout=5)[1]


def test_one_that_dies_is_an_error(project: Path) -> None:
    showing = show(project)
    assert showing.stdout is not None
    assert showing.stdout.readline()
    for process in boards():
        process.kill()
    began = time.monotonic()
    _, said = showing.communicate(timeout=20)
    assert showing.returncode == 5 and time.monotonic() - began < 10
    assert "TensorBoard does not run on the target\n  why: it ended with -9" in said


def test_a_busy_port(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _, said = show(project, "--port", str(taken.getsockname()[1])).communicate(timeout=20)
    assert "error: cannot listen on port" in said and "Address already in use" in said
