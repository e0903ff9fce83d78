"""`dfo logs -f` over real connections that break: every byte, once."""

from __future__ import annotations

import hashlib
import json
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.node import Node
from bench.relay import Relay

from orchestrator.runs.follow import Back, Chunk, Ended, Event, Lost
from orchestrator.runs.run import EndReason

from .run_site import SHARED, RunSite, run_site_on

DROPS, MEGABYTES = 20, 50


@pytest.fixture(scope="module")
def home(bench_machine: None) -> Iterator[Node]:
    with Node(shared=SHARED) as node:
        node.create(200)
        yield node


@pytest.fixture
def site(home: Node, tmp_path: Path) -> Iterator[RunSite]:
    with run_site_on(home, tmp_path) as fresh:
        yield fresh


class Reader:
    """What `dfo logs -f` hands on of stage `train`; a gap or a repetition fails at once."""

    def __init__(self) -> None:
        self.offset = 0
        self.digest = hashlib.sha256()
        self.lost: list[Lost] = []
        self.back = 0
        self.end: Ended | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Chunk) and event.stage == "train":
            assert event.offset == self.offset
            self.offset += len(event.data)
            self.digest.update(event.data)
        elif isinstance(event, Lost):
            self.lost.append(event)
        elif isinstance(event, Back):
            self.back += 1
        elif isinstance(event, Ended):
            self.end = event


def matches(reader: Reader, site: RunSite, run: int) -> bool:
    whole = site.log(run)
    return reader.offset == len(whole) and reader.digest.digest() == hashlib.sha256(whole).digest()


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_every_byte_of_50_mb_over_20_drops(site: RunSite, relay: Callable[..., Relay], client: str) -> None:
    way = relay(site.node.ssh)
    site.configure(way.endpoint, {"ssh": {"client": client}}, train=[f"stream {MEGABYTES}"])
    run = site.launch()
    reader, began = Reader(), time.monotonic()
    with site.follower(run=run) as follow:
        for event in follow.events():
            reader.take(event)
            wanted = (len(reader.lost) + 1) * MEGABYTES * 1024 * 1024 // (DROPS + 2)
            if isinstance(event, Chunk) and len(reader.lost) < DROPS and reader.offset > wanted:
                way.cut()
    print(f"{reader.offset:,} bytes, {len(reader.lost)} drops, {time.monotonic() - began:.1f} s ({client})")
    assert len(reader.lost) >= DROPS and reader.back == DROPS
    assert reader.offset >= MEGABYTES * 1000 * 1000 and matches(reader, site, run)
    assert reader.end is not None and reader.end.status.reason is EndReason.FINISHED


def test_a_line_is_here_in_a_blink(site: RunSite) -> None:
    site.configure(train=["lines 60"])
    run = site.launch()
    delays = []
    with site.follower(run=run) as follow:
        for event in follow.events():
            if isinstance(event, Chunk) and event.stage == "train":
                now = time.time()
                delays += [now - float(line) for line in event.data.split(b"\n") if line[:1].isdigit()]
    median = statistics.median(delays)
    print(f"{len(delays)} lines, median {median * 1000:.0f} ms, slowest {max(delays) * 1000:.0f} ms")
    assert len(delays) == 60 and median < 0.3


def test_through_a_restart_of_sshd(site: RunSite) -> None:
    site.configure(train=["lines 50"])
    run = site.launch()
    reader = Reader()
    with site.follower(run=run) as follow:
        for event in follow.events():
            reader.take(event)
            if isinstance(event, Chunk) and reader.offset > 100 and not reader.lost:
                site.node.sshd.stop()
                site.node.sshd.drop()
                threading.Timer(1.0, site.node.sshd.start).start()
    assert reader.lost and reader.back >= 1 and matches(reader, site, run)


def test_through_a_restart_of_the_container(site: RunSite) -> None:
    site.configure(train=["lines 10", "sleep 60"])
    run = site.launch()
    reader = Reader()

    def restart() -> None:
        site.container.stop()
        time.sleep(0.5)
        site.container.start()

    restarting = threading.Timer(1.0, restart)
    restarting.start()
    with site.follower(run=run) as follow:
        for event in follow.events():
            reader.take(event)
    restarting.join()
    assert "container_stopped" in {lost.error.kind for lost in reader.lost}
    assert reader.end is not None and reader.end.status.reason is EndReason.CONTAINER_RESTARTED
    assert matches(reader, site, run)


def test_what_a_person_sees(site: RunSite, relay: Callable[..., Relay]) -> None:
    way = relay(site.node.ssh)
    site.configure(way.endpoint, train=["print before", "sleep 2", "print after"])
    run = site.launch()
    cutting = threading.Timer(1.0, way.cut)
    site.await_log(run, b"before")
    cutting.start()
    done = site.dfo("logs", str(run), "lab", "-f")
    assert done.code == 0
    assert "-- connection lost " in done.err and ", trying again (1, 2, 4 s …) --" in done.err
    assert "resuming at byte " in done.err and "of train: nothing lost --" in done.err
    assert done.out.count("[1 train] before") == done.out.count("[1 train] after") == 1


def test_what_a_person_sees_of_a_stopped_container(site: RunSite) -> None:
    site.configure(train=["print before", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"before")

    def restart() -> None:
        site.container.stop()
        time.sleep(3)
        site.container.start()

    restarting = threading.Timer(1.0, restart)
    restarting.start()
    done = site.dfo("logs", str(run), "lab", "-f", "--exit-like-run")
    restarting.join()
    assert done.code == 8 and done.out.count("before") == 1
    assert "-- container 200 is stopped, trying again (1, 2, 4 s …) --\n" in done.err
    assert f"error: run {run} ended: `lab` was restarted\n" in done.err


def test_several_stages_at_once_and_one_alone(site: RunSite) -> None:
    site.configure(preflight=["print checked"], train=["print trained"], export=["print written"])
    run = site.launch()
    out = site.dfo("logs", str(run), "lab", "-f").out
    places = [out.index(f"[{run} {said}") for said in ("preflight] checked", "train] trained", "export] written")]
    assert places == sorted(places)
    alone = site.dfo("logs", str(run), "lab", "--stage", "export").out
    assert f"[{run} export] written" in alone and "trained" not in alone


@pytest.mark.parametrize("hole", [False, True], ids=["connected", "black hole"])
def test_ctrl_c_leaves_within_a_second(site: RunSite, relay: Callable[..., Relay], hole: bool) -> None:
    way = relay(site.node.ssh)
    site.configure(way.endpoint, train=["print ready", "sleep 20"])
    run = site.launch()
    watching = site.process("logs", str(run), "lab", "-f")
    assert watching.stdout is not None
    while b"ready" not in watching.stdout.readline():
        pass

    def interrupted() -> float:
        began = time.monotonic()
        watching.send_signal(signal.SIGINT)
        watching.wait(20)
        return time.monotonic() - began

    if hole:
        with way.black_hole():
            time.sleep(0.5)
            took = interrupted()
    else:
        took = interrupted()
    said = watching.communicate()[1].decode()
    print(f"left after {took:.2f} s")
    assert watching.returncode == 130 and took < 1.0
    assert f"run {run} goes on" in said and f"dfo logs {run} -i" in said
    assert site.status(run)["state"] == "running"
    site.result("stop", str(run), "lab", "--now")


def test_json_tells_of_the_drop(site: RunSite, relay: Callable[..., Relay]) -> None:
    way = relay(site.node.ssh)
    site.configure(way.endpoint, train=["print before", "sleep 2"])
    run = site.launch()
    site.await_log(run, b"before")
    threading.Timer(1.0, way.cut).start()
    lines = [json.loads(line) for line in site.dfo("logs", str(run), "lab", "-f", "--json").out.splitlines()]
    events = [line.get("event") for line in lines]
    assert "lost" in events and "back" in events and lines[-1]["result"]["reason"] == "finished"
