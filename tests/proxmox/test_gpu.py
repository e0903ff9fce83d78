"""`dfo gpu plan` against a node of the bench that has device files of GPUs, and its lines in pct."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.node import Node
from support.json_keys import check_keys

from .site import Site, site_on

DEVICES = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255), "nvidia-uvm": (508, 0)}


@pytest.fixture
def site(node: Node, tmp_path: Path) -> Iterator[Site]:
    node.create(200)
    for name, (major, minor) in DEVICES.items():
        node.run(["mknod", f"/dev/{name}", "c", str(major), str(minor)])
    with site_on(node, tmp_path) as fresh:
        yield fresh


def test_the_lines_can_be_run_and_then_nothing_is_left(site: Site) -> None:
    site.node.run(["mknod", "/dev/nvidia-uvm-tools", "c", "508", "1"])
    before = site.node.run(["pct", "config", "200"]).stdout
    answer = json.loads(site.dfo("gpu", "plan", "lab", "--json").out)
    check_keys(("gpu", "plan"), answer)
    first = answer["result"]
    assert site.node.run(["pct", "config", "200"]).stdout == before, "a plan changes nothing"
    assert (first["state"], first["gpus"], first["done"]) == ("running", [0, 1], False)
    assert first["commands"][1] == "pct set 200 --dev0 /dev/nvidia0,mode=0666"
    for line in first["commands"]:
        site.node.run(["sh", "-c", line])
    second = site.dfo("gpu", "plan", "lab")
    assert second.code == 0 and "Nothing to do" in second.out
    assert "keep      dev1: /dev/nvidia1,mode=0666" in second.out


def test_what_is_missing_is_made_first(site: Site) -> None:
    done = site.dfo("gpu", "plan", "lab", "--gpu", "1", "--gid", "44")
    assert done.code == 0
    assert "\n    nvidia-modprobe -c 0 -u\n    pct set 200 --dev0 /dev/nvidia1,gid=44,mode=0660\n" in done.out


def test_old_lines_are_shown_as_the_file_has_them(site: Site) -> None:
    old = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"
    path = site.node.root / "etc/pve/lxc/200.conf"
    path = site.node.root / "etc/pve/nodes/pve1/lxc/200.conf" if not path.exists() else path
    path.write_text(path.read_text() + old + "\n")
    result = json.loads(site.dfo("gpu", "plan", "lab", "--json").out)["result"]
    assert result["obsolete"] == [old] and any("belongs to nobody" in note for note in result["notes"])


def test_the_environment_has_the_node_in_it(site: Site, tmp_path: Path) -> None:
    def taken(name: str) -> dict[str, Any]:
        done = site.dfo("env-snapshot", "lab", "--to", str(tmp_path / name), "--json")
        assert done.code == 0, done.out + done.err
        node: dict[str, Any] = json.loads(done.out)["result"]["snapshot"]["node"]
        return node

    first = taken("before.json")
    assert (first["name"], first["container"], first["passed"]) == (site.node.ssh.host, 200, {})
    assert first["devices"]["/dev/nvidia-uvm"] == "508:0"
    site.node.run(["pct", "snapshot", "200", "passing"])
    assert taken("snapshot.json")["config_sha256"] == first["config_sha256"]
    site.node.run(["pct", "set", "200", "--memory", "1024"])
    second = taken("after.json")
    assert second["config"]["memory"] == "1024" and second["config_sha256"] != first["config_sha256"]
    done = site.dfo("env-diff", str(tmp_path / "before.json"), str(tmp_path / "after.json"))
    assert done.code == 9 and "container memory" in done.out


def test_a_node_without_a_driver_and_a_target_without_a_node(node: Node, tmp_path: Path) -> None:
    node.create(200)
    with site_on(node, tmp_path) as site:
        refused = json.loads(site.dfo("gpu", "plan", "lab", "--json").out)
        assert (refused["exit_code"], refused["error"]["kind"]) == (5, "device_missing")
        site.targets["lab"] = {"transport": "local"}
        refused = json.loads(site.dfo("gpu", "plan", "lab", "--json").out)
        assert (refused["exit_code"], refused["error"]["kind"]) == (2, "usage")
