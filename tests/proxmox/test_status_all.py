"""`dfo status --all` and `--watch` over targets of which one does not exist and one does not answer."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.node import Node
from bench.relay import Relay

from .run_site import SHARED, RunSite, run_site_on


@pytest.fixture(scope="module")
def home(bench_machine: None) -> Iterator[Node]:
    with Node(shared=SHARED) as node:
        node.create(200)
        yield node


@pytest.fixture
def site(home: Node, tmp_path: Path) -> Iterator[RunSite]:
    with run_site_on(home, tmp_path) as fresh:
        fresh.configure(train=["events 3", "print step 3", "sleep 60"])
        fresh.launch()
        fresh.await_log(1, b"step 3")
        fresh.targets["gone"] = fresh.target(home.ssh, vmid=333)
        fresh.targets["fresh"] = fresh.target(home.ssh, deploy={"root": f"{fresh.root}-fresh"})
        yield fresh


def test_everyone_is_in_the_table(site: RunSite) -> None:
    done = site.dfo("status", "--all")
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert done.code == 0, done.err
    assert " running " in lines["lab"] and "41.2k tok/s" in lines["lab"] and lines["lab"].endswith("step 3")
    assert "container_missing" in lines["gone"] and "nothing was launched yet" in lines["fresh"]
    assert "`gone`: container 333 does not exist" in done.err
    targets = json.loads(site.dfo("status", "--all", "--json").out)["result"]["targets"]
    assert [(one["target"], one["ok"]) for one in targets] == [("lab", True), ("gone", False), ("fresh", True)]
    assert targets[0]["result"]["runs"][0]["state"] == "running"
    assert targets[1]["error"]["kind"] == "container_missing"


def test_they_are_asked_at_once(site: RunSite) -> None:
    for number in range(4):
        site.targets[f"t{number}"] = site.target(site.node.ssh)
    with site.node.delay(1.0):
        began = time.monotonic()
        assert site.dfo("status", "--all").code == 0
        assert time.monotonic() - began < 6, "seven targets, one second each at least"


def test_when_nobody_answers_it_is_an_error(site: RunSite) -> None:
    site.targets = {"gone": site.target(site.node.ssh, vmid=333, groups=["far"])}
    error = json.loads(site.dfo("status", "--group", "far", "--json").out)["error"]
    assert error["kind"] == "container_missing"


def test_what_excludes_each_other(site: RunSite) -> None:
    for words in (["1", "--all"], ["lab", "--all"], ["--all", "--group", "far"], ["1", "lab", "--watch"]):
        assert json.loads(site.dfo("status", *words, "--json").out)["error"]["kind"] == "usage"


def test_watching_goes_on_though_one_falls_silent(site: RunSite, relay: Callable[..., Relay]) -> None:
    way = relay(site.node.ssh)
    site.targets["far"] = site.target(way.endpoint)
    watching = site.process("status", "--all", "--watch", "--json")
    assert watching.stdout is not None

    def next_event() -> dict[str, dict[str, object]]:
        assert watching.stdout is not None
        line = json.loads(watching.stdout.readline())
        assert line["event"] == "status", line
        return {one["target"]: one for one in line["targets"]}

    while not (next_event()["far"]["result"]):
        pass
    with way.black_hole():
        newest: list[float] = []
        while len(set(newest)) < 3:
            result = next_event()["lab"]["result"]
            newest.append(result["runs"][0]["updated"])  # type: ignore[index]
        began = time.monotonic()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 0
        assert time.monotonic() - began < 2
    last = json.loads(watching.communicate()[0].splitlines()[-1])
    assert last["ok"] and {one["target"] for one in last["result"]["targets"]} >= {"lab", "far"}


def test_watching_one_in_a_file(site: RunSite) -> None:
    watching = site.process("status", "lab", "--watch")
    assert watching.stdout is not None
    tables = 0
    while tables < 3:
        tables += watching.stdout.readline().startswith(b"TARGET  RUN")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(10) == 0
    assert b"\033" not in watching.communicate()[0]
