"""What is told about the node of a container: its faults, and what changed between two dates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.environment import drift, snapshot
from orchestrator.environment.findings import Finding, Severity
from orchestrator.environment.node import NodeRecord
from orchestrator.environment.snapshot import Snapshot

RECORDED = Path(__file__).parents[2] / "data" / "snapshots"
GPU = "/dev/nvidia0,mode=0666"
NODE = NodeRecord(
    name="pve1",
    kernel="6.14.8-2-pve",
    driver="580.95.05",
    majors={"nvidia": 195, "nvidia-uvm": 508},
    devices={"/dev/nvidia0": "195:0", "/dev/nvidiactl": "195:255", "/dev/nvidia-uvm": "508:0"},
    container=101,
    passed={"dev0": GPU},
    old_lines=[],
    trouble=[],
    config={"memory": "65536", "unprivileged": "1"},
    config_sha256="a" * 64,
    proxmox="9.1.2",
)


def environment(**changes: object) -> Snapshot:
    recorded = snapshot.load(sorted(RECORDED.glob("*.json"))[0])
    return recorded.model_copy(update={"node": NODE.model_copy(update=changes)})


def changed(**changes: object) -> list[Finding]:
    return drift.differences(environment(), environment(**changes))


def test_the_same_node_has_not_changed() -> None:
    assert changed() == []


def test_older_snapshots_have_no_node_and_that_is_no_difference(tmp_path: Path) -> None:
    old = environment().model_copy(update={"node": None})
    assert drift.differences(old, environment()) == drift.differences(environment(), old) == []
    body = old.as_dict()
    del body["node"]
    (tmp_path / "old.json").write_text(json.dumps(body))
    assert snapshot.load(tmp_path / "old.json") == old


def test_a_node_survives_its_file(tmp_path: Path) -> None:
    snapshot.save(environment(), tmp_path / "new.json")
    assert snapshot.load(tmp_path / "new.json").node == NODE
    assert "node pve1, Proxmox VE 9.1.2, kernel 6.14.8-2-pve, driver 580.95.05" in snapshot.summary(environment())[-1]


def test_each_change_has_its_words() -> None:
    rows = {
        "node": ({"name": "pve2"}, Severity.RISK, "another machine"),
        "node driver": ({"driver": "590.1"}, Severity.RISK, "libraries must be of the same version"),
        "Proxmox VE": ({"proxmox": "9.2.11"}, Severity.NOTE, "`pct` may behave otherwise"),
        "node kernel": ({"kernel": "6.17.1-1-pve"}, Severity.NOTE, "numbers of devices"),
        "major of nvidia-uvm": ({"majors": {"nvidia": 195, "nvidia-uvm": 511}}, Severity.NOTE, "old way do not"),
        "passed device dev0": ({"passed": {}}, Severity.RISK, "may use changed"),
        "container memory": ({"config": {"memory": "1024", "unprivileged": "1"}}, Severity.RISK, "what fits"),
        "container configuration": ({"config_sha256": "b" * 64}, Severity.NOTE, "none of its limits"),
        "container number": ({"container": 102}, Severity.RISK, "another container"),
    }
    for what, (change, severity, words) in rows.items():
        [found] = changed(**change)
        assert (found.what, found.severity) == (what, severity)
        assert words in found.consequence, what


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("580.95.05", "the container's libcuda is still 580.95.05: install the libraries of 590.1 there"),
        ("590.1", "the container's libcuda is 590.1 as well"),
    ],
)
def test_a_new_driver_of_the_node_is_told_against_the_libraries_of_the_container(library: str, words: str) -> None:
    inside = snapshot.Driver(kernel_module="590.1", library=library)
    now = environment(driver="590.1").model_copy(update={"driver": inside})
    before = environment().model_copy(
        update={"driver": snapshot.Driver(kernel_module="580.95.05", library="580.95.05")}
    )
    found = {f.what: f for f in drift.differences(before, now)}
    assert (found["node driver"].change, found["node driver"].consequence) == ("580.95.05 -> 590.1", words)
    assert "driver module" not in found, "it is said once"
    assert ("driver" in found) == (library != "590.1"), "a mismatch is a fault as well"


def test_the_hash_says_nothing_where_words_did() -> None:
    found = changed(config_sha256="b" * 64, config={"memory": "65536", "unprivileged": "1", "swap": "0"})
    assert [(f.what, f.before, f.after) for f in found] == [("container swap", None, "0")]


def test_a_passed_device_that_is_not_there_is_a_fault_of_today() -> None:
    gone = environment(passed={"dev0": GPU, "dev1": "path=/dev/nvidia7"})
    [fault] = [f for f in drift.faults(gone) if f.what.startswith("dev1")]
    assert fault.severity is Severity.BROKEN and fault.after == "/dev/nvidia7 is not on the node"
    assert "does not start again" in fault.consequence
    assert not [f for f in drift.faults(environment()) if f.what.startswith("dev")]


def test_trouble_of_the_old_way_is_a_fault_once() -> None:
    stale = "major 509 is allowed, and no module has it: it went stale with a boot or another kernel"
    broken = environment(trouble=[stale])
    assert [f.after for f in drift.differences(environment(), broken)] == [stale]
    assert drift.differences(broken, broken) == []
