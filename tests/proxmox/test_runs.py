"""Runs in real containers: as units of systemd, and each end with its reason."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.node import Node
from bench.relay import Relay

from orchestrator.runs.follow import Ended
from orchestrator.runs.run import EndReason, RunState

from .run_site import SHARED, RunSite, run_site_on, until


@pytest.fixture(scope="module")
def home(bench_machine: None) -> Iterator[Node]:
    """One node with container 200 of 384 MiB; a test that stops the container starts it again."""
    with Node(shared=SHARED) as node:
        node.create(200, memory=384)
        yield node


@pytest.fixture
def site(home: Node, tmp_path: Path) -> Iterator[RunSite]:
    with run_site_on(home, tmp_path) as fresh:
        yield fresh


# What a run is


def test_a_run_is_a_unit(site: RunSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "s3cr3t$HOME %h")
    site.configure(
        train=["environ HOME", "environ PATH", "environ TOKEN", "environ INVOCATION_ID", "print ready", "sleep 30"],
        more={"env": {"TOKEN": {"env": "PASSWORD"}}},
    )
    run = site.launch()
    site.await_log(run, b"ready")
    unit = site.unit(run)
    assert re.fullmatch(rf"dfo-{run}-[0-9a-f]{{16}}\.service", unit)
    assert site.status(run)["unit"] == unit
    assert f"systemd unit {unit}" in site.dfo("status", str(run), "lab").out
    names = ("ActiveState", "KillMode", "OOMPolicy", "TimeoutStopUSec", "MainPID", "ControlGroup", "LoadState")
    shown = site.shown(unit, *names)
    assert int(shown.pop("MainPID")) == site.state(run)["supervisor"]["pid"]
    assert shown == {
        "LoadState": "loaded", "ActiveState": "active", "KillMode": "mixed", "OOMPolicy": "continue",
        "TimeoutStopUSec": "35s", "ControlGroup": f"/system.slice/{unit}",
    }  # fmt: skip
    said = site.log(run).decode()
    assert "HOME=/root\n" in said and "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin" in said
    assert "TOKEN=s3cr3t$HOME %h\n" in said and "INVOCATION_ID=None\n" in said
    site.result("stop", str(run), "lab", "--now")


def test_a_secret_is_in_no_file_and_for_nobody_to_read(site: RunSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "correct-horse")
    site.configure(train=["print ready", "sleep 30"], more={"env": {"TOKEN": {"env": "PASSWORD"}}})
    run = site.launch()
    site.await_log(run, b"ready")
    unit = site.unit(run)
    for look in (
        ["systemctl", "show", unit],
        ["systemctl", "cat", unit],
        ["ps", "axww", "-o", "args"],
        ["journalctl", "--no-pager"],
        ["grep", "-rs", "-D", "skip", "correct-horse", "/run", "/tmp", "/etc", site.root],
    ):
        assert b"correct-horse" not in site.container.run(look, check=False).stdout, look
    assert not list(site.container.root.glob("run/dfo-*"))
    site.result("stop", str(run), "lab", "--now")


def test_a_unit_that_ended_well_is_forgotten_and_its_run_is_not(site: RunSite) -> None:
    run = site.launch()
    assert site.ended(run)["state"] == "succeeded"
    unit = site.unit(run)
    until(lambda: site.shown(unit, "LoadState")["LoadState"] == "not-found")
    assert site.status(run)["reason"] == "finished"


def test_through_an_sshd_of_the_container_too(site: RunSite) -> None:
    with site.container.sshd() as endpoint:
        site.targets["lab"] = site.target(endpoint, vmid=None)
        run = site.launch()
        assert site.ended(run)["state"] == "succeeded"
        assert site.unit(run).startswith(f"dfo-{run}-")


def test_an_environment_too_large_for_the_pipe(site: RunSite, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"PART{number}" for number in range(12)]
    for name in names:
        monkeypatch.setenv(name, name[-1] * 100_000)
    site.configure(train=["print ready"], more={"env": {name: {"env": name} for name in names}})
    run = site.launch()
    assert site.ended(run)["state"] == "succeeded" and site.unit(run) is None
    assert b"systemd-run says: [Errno 7] the environment is too large" in site.log(run, "launch")


def test_without_systemd_run_it_is_a_process(site: RunSite) -> None:
    with site.container.without("usr/bin/systemd-run"):
        run = site.launch()
    found = site.ended(run)
    assert (found["state"], found["unit"]) == ("succeeded", None)
    assert "a process of its own" in site.dfo("status", str(run), "lab").out


def test_a_systemd_that_refuses_is_no_obstacle(site: RunSite) -> None:
    program = site.container.root / "usr/local/bin/systemd-run"
    program.write_text("#!/bin/sh\necho 'no bus today' >&2\nexit 1\n")
    program.chmod(0o755)
    try:
        run = site.launch()
    finally:
        program.unlink()
    assert site.ended(run)["unit"] is None
    assert b"systemd-run says: no bus today; the run goes on without a unit" in site.log(run, "launch")


# Stopping


def test_stop_asks_and_leaves_nothing(site: RunSite) -> None:
    site.configure(train=["polite 143", "scrubbed 4711", "daemon 4712", "print ready", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"ready")
    unit = site.unit(run)
    assert site.processes("sleep 4711")
    done = site.result("stop", str(run), "lab")
    assert (done["state"], done["reason"], done["exit_code"]) == ("stopped", "stopped_by_user", 143)
    assert not site.processes("sleep 4711") and not site.processes("dflash_core")
    assert site.shown(unit, "LoadState")["LoadState"] == "not-found"


def test_systemctl_stop_is_as_good(site: RunSite) -> None:
    site.configure(train=["polite 143", "print ready", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"ready")
    site.container.run(["systemctl", "stop", site.unit(run)])
    found = site.status(run)
    assert (found["state"], found["reason"]) == ("stopped", "terminated")


def test_a_supervisor_that_is_killed_takes_everything_with_it(site: RunSite) -> None:
    site.configure(train=["stubborn", "scrubbed 4713", "print ready", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"ready")
    site.container.run(["kill", "-9", str(site.state(run)["supervisor"]["pid"])])
    found = site.ended(run)
    assert found["reason"] == "supervisor_died"
    assert "SIGKILL ended it, says systemd; it is gone and left no final state" in found["sentence"]
    until(lambda: not site.processes("sleep 4713") and not site.processes("dflash_core"))
    assert site.status(run)["leftovers"] == []


# Ends


def test_exit_3(site: RunSite) -> None:
    site.configure(train=["print no luck", "exit 3"])
    found = site.ended(site.launch())
    assert (found["state"], found["reason"], found["exit_code"]) == ("failed", "exit_code", 3)
    assert found["sentence"].endswith("train failed: exit code 3: no luck")
    assert site.dfo("logs", "lab", "-f", "--exit-like-run").code == 3


def test_sigkill_from_outside(site: RunSite) -> None:
    site.configure(train=["print ready", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"ready")
    site.kill("dflash_core train")
    found = site.ended(run)
    assert (found["state"], found["reason"], found["signal"]) == ("failed", "signal", signal.SIGKILL)


def test_the_memory_limit_of_the_container(site: RunSite) -> None:
    site.configure(train=["hog 2000"])
    found = site.ended(site.launch())
    assert (found["state"], found["reason"], found["signal"]) == ("failed", "out_of_memory", signal.SIGKILL)
    assert "was killed, out of memory" in found["sentence"]


def test_a_full_disk(site: RunSite) -> None:
    site.configure(train=["print ready", "sleep 2", "chatter 5"])
    run = site.launch()
    site.await_log(run, b"ready")
    with site.container.full("/", free=2 << 20):
        found = site.ended(run)
        assert (found["state"], found["reason"]) == ("failed", "disk_full")
        assert "with the disk full" in found["sentence"]


def test_a_container_that_is_restarted(site: RunSite) -> None:
    site.configure(train=["print ready", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"ready")
    site.container.stop()
    stopped = json.loads(site.dfo("status", str(run), "lab", "--json").out)["error"]
    assert stopped["kind"] == "container_stopped"
    site.container.start()
    found = site.status(run)
    assert (found["state"], found["reason"], found["stage"]) == ("failed", "container_restarted", "train")
    assert "`lab` was restarted" in found["sentence"]
    assert site.status(site.launch())["run"] == run + 1


def test_a_node_that_is_rebooted(site: RunSite) -> None:
    """The kernel under the tests cannot boot anew; a run that says it saw an earlier boot stands for it."""
    site.configure(train=["print ready", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"ready")
    site.container.stop()
    site.container.start()
    path = site.inside(f"runs/{run}/state.json")
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "booted": state["booted"] - 3600}))
    found = site.status(run)
    assert (found["state"], found["reason"]) == ("failed", "node_rebooted")
    assert "the machine of `lab` was rebooted" in found["sentence"]


def test_a_container_that_stays_down(site: RunSite) -> None:
    site.configure(train=["print ready", "sleep 60"])
    run = site.launch()
    site.await_log(run, b"ready")
    with site.follower(run=run, restart=1.0) as follow:
        killer = threading.Timer(1.0, site.container.stop)
        killer.start()
        last = list(follow.events())[-1]
    killer.join()
    site.container.start()
    assert isinstance(last, Ended)
    assert (last.status.state, last.status.reason) == (RunState.FAILED, EndReason.CONTAINER_STOPPED)
    assert "`lab` was stopped: its container does not run any more" in last.status.sentence("lab")


# Staying alive


def test_the_laptop_is_killed(site: RunSite) -> None:
    site.configure(train=["print ready", "sleep 3", "print done"])
    launching = site.process("launch", "lab")
    until(lambda: b"ready" in site.log(1))
    launching.kill()
    watching = site.process("logs", "1", "lab", "-f")
    assert watching.stdout is not None and b"train of" in watching.stdout.readline()
    watching.kill()
    for process in (launching, watching):
        process.communicate()
    assert site.ended(1)["state"] == "succeeded" and b"done" in site.log(1)


def test_sshd_is_restarted(site: RunSite) -> None:
    site.configure(train=["print ready", "sleep 3", "print done"])
    run = site.launch()
    site.await_log(run, b"ready")
    site.node.sshd.restart()
    site.node.sshd.drop()
    assert site.ended(run)["state"] == "succeeded"


@pytest.mark.parametrize("seconds", [4, pytest.param(120, marks=pytest.mark.slow)])
def test_the_connection_is_a_black_hole(site: RunSite, relay: Callable[..., Relay], seconds: int) -> None:
    way = relay(site.node.ssh)
    site.configure(way.endpoint, train=["print ready", f"sleep {seconds + 2}", "print done"])
    run = site.launch()
    watching = site.process("logs", str(run), "lab", "-f")
    assert watching.stdout is not None
    while b"[1 train] ready" not in watching.stdout.readline():
        pass
    began = time.monotonic()
    with way.black_hole():
        time.sleep(seconds)
        assert site.processes("dflash_core train")
    out, err = (text.decode() for text in watching.communicate(timeout=seconds + 60))
    print(f"black hole of {seconds} s; all was read {time.monotonic() - began:.1f} s after it began")
    assert out == "[1 train] done\n", err
    assert ("-- connection lost " in err) == (": nothing lost --" in err) == (seconds > 60)
    assert site.ended(run)["state"] == "succeeded"
