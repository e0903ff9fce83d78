"""`dfo tensorboard` through a node into a container, and on this machine: the real TensorBoard, over our streams."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bench.node import Node
from support.json_keys import check_keys

from .run_site import SHARED, RunSite, run_site_on, until

pytest.importorskip("tensorboard")


@pytest.fixture(scope="module")
def home(bench_machine: None) -> Iterator[Node]:
    with Node(shared=SHARED) as node:
        guest = node.create(200)
        # As Proxmox writes it at each start; TensorBoard asks for `localhost`.
        guest.run(["sh", "-c", "echo 127.0.0.1 localhost > /etc/hosts"])
        yield node


@pytest.fixture
def site(home: Node, tmp_path: Path) -> Iterator[RunSite]:
    with run_site_on(home, tmp_path) as fresh:
        yield fresh


def started(process: subprocess.Popen[bytes]) -> str:
    """The URL, once a browser may come."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert b'"url"' in line, line + process.stderr.read()
    url: str = json.loads(line)["url"]
    return url


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def looks_right(url: str, runs: set[str]) -> None:
    assert b"<title>TensorBoard</title>" in get(url)
    with ThreadPoolExecutor(6) as browser:  # as many connections as a browser makes
        bodies = list(browser.map(get, [f"{url}data/environment"] * 5 + [f"{url}index.js"]))
    assert all(b"data_location" in body for body in bodies[:5]) and len(bodies[5]) > 1_000_000
    until(lambda: set(json.loads(get(f"{url}data/runs"))) == runs)


def interrupt(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0, err.decode()
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    check_keys(["tensorboard"], answer)
    return answer["result"]


def scalars(site: RunSite, run: int) -> None:
    """What training writes there, written by the same library."""
    code = (
        "import sys; from tensorboard.compat.proto import event_pb2, summary_pb2\n"
        "from tensorboard.summary.writer.event_file_writer import EventFileWriter\n"
        "w = EventFileWriter(sys.argv[1])\n"
        "w.add_event(event_pb2.Event(step=1, summary=summary_pb2.Summary("
        "value=[summary_pb2.Summary.Value(tag='loss', simple_value=2.5)])))\nw.close()\n"
    )
    site.container.run([sys.executable, "-c", code, f"{site.root}/runs/{run}/tensorboard"])


def test_in_a_container(site: RunSite) -> None:
    first, second = site.launch(), 2
    site.ended(first)
    assert site.launch() == second
    site.ended(second)
    for run in (first, second):
        scalars(site, run)
    showing = site.process("tensorboard", "1", "lab", "--json")
    url = started(showing)
    looks_right(url, {"tensorboard"})
    assert site.processes("tensorboard.main")
    assert interrupt(showing) == {"target": "lab", "run": 1, "url": url}
    until(lambda: not site.processes("tensorboard.main"))
    everything = site.process("tensorboard", "lab", "--json")
    looks_right(started(everything), {"1/tensorboard", "2/tensorboard"})
    everything.kill()  # a laptop that dies leaves nothing behind either
    everything.communicate()
    until(lambda: not site.processes("tensorboard.main"))


def test_a_target_without_it_says_so(site: RunSite) -> None:
    site.launch()
    site.targets["lab"]["python"] = "python3"
    error = json.loads(site.dfo("tensorboard", "lab", "--json").out)["error"]
    assert error["kind"] == "remote_failed" and "No module named" in error["why"]
    assert "-m pip install tensorboard" in error["fix"]


def test_a_port_that_is_taken(site: RunSite) -> None:
    error = json.loads(site.dfo("tensorboard", "lab", "--port", str(site.node.ssh.port), "--json").out)["error"]
    assert error["kind"] == "usage" and error["what"].startswith("cannot listen on port ")


def test_an_unknown_run(site: RunSite) -> None:
    assert json.loads(site.dfo("tensorboard", "9", "lab", "--json").out)["error"]["kind"] == "unknown_run"
