"""`dfo deploy` and its relatives into real containers, through a node and straight."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.container import Container
from bench.node import Node

from .site import ODD_NAME, Site, counted, site_on


@pytest.fixture
def site(lab: Node, tmp_path: Path) -> Iterator[Site]:
    with site_on(lab, tmp_path) as fresh:
        yield fresh


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
@pytest.mark.parametrize("method", ["pct-push", "stream"])
def test_a_first_deploy_and_a_second(site: Site, method: str, client: str) -> None:
    site.targets["lab"]["ssh"]["client"] = client
    first = site.deploy("--method", method)
    assert first["plan"]["method"] == method
    site.is_deployed()
    site.change()
    second = site.deploy("--method", method)
    assert second["previous"] == first["release"] and second["release"] == site.current
    site.is_deployed()


def test_calls_of_pct_are_few(site: Site) -> None:
    with counted(site.node) as calls:
        site.deploy()
    assert calls == ["exec 200", "exec 200", "push 200"]
    with counted(site.node) as calls:
        assert site.deploy()["changed"] is False
    assert calls == ["exec 200"]
    site.change()
    with counted(site.node) as calls:
        site.deploy("--method", "stream")
    assert calls == ["exec 200", "exec 200"]


def test_the_plan_says_how_and_changes_nothing(site: Site) -> None:
    done = site.dfo("deploy", "lab", "--dry-run")
    assert (done.code, site.inside().exists()) == (0, False)
    assert "\n  method    pct-push\n" in done.out
    asked = site.dfo("deploy", "lab", "--dry-run", "--method", "stream")
    assert "\n  method    stream: asked for\n" in asked.out
    site.targets["lab"]["deploy"]["method"] = "stream"
    assert "\n  method    stream: asked for\n" in site.dfo("deploy", "lab", "-n").out
    site.is_clean()


def test_the_runs_user_can_read_a_release_and_nobody_the_archive(site: Site) -> None:
    site.deploy()
    site.container.run(["runuser", "-u", "nobody", "--", "cat", f"{site.root}/current/{ODD_NAME}"])
    mode = site.container.run(["stat", "-c", "%U:%G %a", f"{site.root}/current/pkg/model.py"]).stdout
    assert mode == b"root:root 644\n"


def test_a_user_with_a_sudo_rule_is_enough(site: Site) -> None:
    site.targets["lab"] = site.target(site.node.endpoint("dfo"), ssh={"sudo": True})
    assert site.deploy()["plan"]["method"] == "pct-push"
    site.is_deployed()


def test_straight_into_a_container_with_an_sshd(site: Site) -> None:
    with site.container.sshd() as endpoint:
        site.targets["lab"] = site.target(endpoint, vmid=None)
        assert site.deploy()["plan"]["method"] is None
        site.is_deployed()
        assert site.deploy()["changed"] is False


def test_a_privileged_container(node: Node, tmp_path: Path) -> None:
    node.create(200, unprivileged=False)
    with site_on(node, tmp_path) as site:
        site.deploy()
        site.is_deployed()


def test_a_stopped_container_is_started_if_asked(ct: Container, tmp_path: Path) -> None:
    ct.stop()
    with site_on(ct.node, tmp_path) as site:
        error = site.refused()
        assert (error.kind, error.code) == ("container_stopped", 5)
        assert error.what == "container 200 is stopped"
        assert error.fix == "`dfo deploy lab --start`, or `pct start 200` on `127.0.0.1`"
        assert site.refused("--start", "--dry-run").kind == "container_stopped" and not ct.running
        done = site.dfo("deploy", "lab", "--start")
        assert done.code == 0, done.err
        assert "\n  start     root@127.0.0.1, container 200" in done.err
        site.is_deployed()


def test_a_container_that_cannot_be_started(ct: Container, tmp_path: Path) -> None:
    ct.stop()
    with site_on(ct.node, tmp_path) as site, ct.node.no_quorum():
        error = site.refused("--start")
    assert (error.kind, error.code) == ("cluster_not_ready", 5)


def test_the_other_commands(site: Site) -> None:
    first = site.deploy()["release"]
    site.change()
    second = site.deploy()["release"]
    assert [r["id"] for r in result(site, "releases", "lab")["releases"]] == [first, second]
    assert result(site, "rollback", "lab")["release"] == first == site.current
    assert result(site, "lock", "take", "lab", "-m", "hands off")["lock"]["manual"] is True
    assert "hands off" in site.dfo("lock", "show", "lab").out
    error = site.refused()
    assert (error.kind, error.code) == ("lock_held", 6)
    result(site, "lock", "break", "lab")
    assert [line["event"] for line in result(site, "audit", "lab")["entries"]][:3]
    assert result(site, "releases", "lab", "--prune", "1")["removed"] == []
    assert site.deploy()["changed"] is True
    site.is_deployed()


def result(site: Site, *arguments: str) -> dict:  # type: ignore[type-arg]
    done = site.dfo(*arguments, "--json")
    assert done.code == 0, done.out
    return json.loads(done.out)["result"]  # type: ignore[no-any-return]


# Several targets


@pytest.fixture
def several(site: Site) -> Iterator[Site]:
    """Beside `lab` a container that does not exist, one reached by ssh, and one through a node."""
    group = {"groups": ["good"]}
    with site.container.sshd() as inside:
        site.targets = {
            "gone": site.target(site.node.ssh, vmid=333),
            "lab": site.target(site.node.ssh, **group),
            "inner": site.target(inside, vmid=None, deploy={"root": f"{site.root}-inner"}, **group),
        }
        yield site
    site.container.run(["rm", "-rf", f"{site.root}-inner"])


def test_one_failure_hides_nobody(several: Site) -> None:
    done = several.dfo("deploy", "--all")
    assert done.code == 5
    blocks = re.split(r"^`([a-z]+)`\n", done.err, flags=re.MULTILINE)
    block = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    assert block["gone"].startswith("error: container 333 does not exist on `127.0.0.1`\n  why: ")
    assert "Deployed to `lab`" in block["lab"] and "Deployed to `inner`" in block["inner"]
    assert "error: 1 of 3 targets failed: `gone`\n  why: `gone`: container 333 does not exist" in done.err
    several.is_deployed()
    answer = json.loads(several.dfo("deploy", "--all", "--json").out)
    assert (answer["ok"], answer["exit_code"], answer["error"]["kind"]) == (False, 5, "container_missing")
    listed = answer["error"]["targets"]
    assert [(one["target"], one["ok"], one["exit_code"]) for one in listed] == [
        ("gone", False, 5), ("lab", True, 0), ("inner", True, 0),
    ]  # fmt: skip
    assert listed[0]["error"]["kind"] == "container_missing" and listed[1]["result"]["changed"] is False


def test_a_group(several: Site) -> None:
    done = several.dfo("deploy", "--group", "good", "--json")
    answer = json.loads(done.out)
    assert done.code == 0 and [one["result"]["changed"] for one in answer["result"]["targets"]] == [True, True]
    for wrong in (["--group", "goof"], ["--all", "--group", "good"], ["lab", "--all"]):
        assert several.dfo("deploy", *wrong).code == 2


def test_they_run_side_by_side(several: Site) -> None:
    """One after the other, three deploys with three calls of `pct` each would take 9 s for the calls alone."""
    places = {f"t{n}": f"{several.root}/t{n}" for n in range(3)}
    several.targets = {name: several.target(several.node.ssh, deploy={"root": root}) for name, root in places.items()}
    with several.node.delay(1.0):
        started = time.monotonic()
        assert several.dfo("deploy", "--all").code == 0
        assert time.monotonic() - started < 9


def test_ctrl_c_ends_all_of_them(several: Site) -> None:
    with several.node.delay(1.0):
        interrupted = several.process("deploy", "--all")
        limit = time.monotonic() + 20
        while not list(several.inside("tmp").glob("pushed-*")) and time.monotonic() < limit:
            time.sleep(0.01)
        interrupted.send_signal(signal.SIGINT)
        said = interrupted.communicate(timeout=30)[1].decode()
    assert interrupted.returncode == 130 and "Interrupted." in said and "Traceback" not in said
    several.is_clean()
    assert several.current is None
