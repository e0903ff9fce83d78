"""`dfo trust` and the errors that lead to it, as a user meets them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.node import Node
from support.json_keys import check_keys

from .test_connections import fingerprint


class Project:
    """A folder with an inventory whose target `lab` is container 200 of a node."""

    def __init__(self, folder: Path, node: Node, **ssh: object) -> None:
        self.folder = folder
        self.known_hosts = folder / "known_hosts"
        here = node.ssh
        values = {"host": here.host, "port": here.port, "user": "root", "keys": [str(here.key)], "agent": False}
        values |= {"config": "none", "known_hosts": "known_hosts", "host_key_policy": "strict", **ssh}
        target = {"transport": "pct", "ssh": values, "pct": {"container": 200}}
        (folder / "inventory").mkdir()
        (folder / "inventory" / "dfo.yaml").write_text(json.dumps({"version": 1, "targets": {"lab": target}}))

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *words]

    def dfo(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(*words), cwd=self.folder, capture_output=True, text=True, timeout=60)

    def json(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = self.dfo(*words, "--json")
        assert done.stderr == ""
        answer: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, answer

    def answer(self, words: str, reply: bytes) -> tuple[int, str]:
        """Run it on a terminal and type `reply`."""
        master, slave = pty.openpty()
        child = subprocess.Popen(
            self.argv(*words.split()), cwd=self.folder, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        os.write(master, reply)
        shown, _ = child.communicate(timeout=60)
        os.close(slave)
        os.close(master)
        return child.returncode, shown.decode()


@pytest.fixture
def project(node: Node, tmp_path: Path) -> Project:
    node.create(200)
    return Project(tmp_path, node)


def test_a_new_host(project: Project, node: Node) -> None:
    key = fingerprint(node.ssh.host_key)
    code, answer = project.json("releases")
    assert (code, answer["error"]["kind"]) == (4, "host_key_unknown")
    assert "`dfo trust lab`" in answer["error"]["fix"]

    code, answer = project.json("trust")
    assert (code, answer["error"]["kind"], answer["error"]["fix"].split("`")[1]) == (2, "usage", f"--fingerprint {key}")

    code, shown = project.answer("trust", b"n\n")
    assert (code, project.known_hosts.exists()) == (4, False)
    assert key in shown and "was not accepted" in shown

    code, shown = project.answer("trust", b"y\n")
    assert (code, f"written to {project.known_hosts}" in shown) == (0, True)
    assert project.known_hosts.read_text() == f"[127.0.0.1]:{node.ssh.port} {node.ssh.host_key}\n"
    assert project.dfo("releases").returncode == 0


def test_a_changed_host(project: Project, node: Node) -> None:
    before = fingerprint(node.ssh.host_key)
    code, answer = project.json("trust", "--fingerprint", before)
    check_keys(["trust"], answer)
    (hop,) = answer["result"]["hops"]
    assert (code, hop["state"], hop["accepted"], hop["fingerprint"]) == (0, "new", True, before)

    node.sshd.new_host_key()
    node.sshd.restart()
    after = fingerprint(node.ssh.host_key)
    shown = project.dfo("releases").stderr
    assert before in shown and after in shown and "`dfo trust lab`" in shown

    code, answer = project.json("trust", "--fingerprint", before)
    assert (code, answer["error"]["kind"]) == (4, "host_key_mismatch")
    code, answer = project.json("trust", "--fingerprint", after)
    (hop,) = answer["result"]["hops"]
    assert (code, hop["state"], hop["accepted"], hop["expected"]) == (0, "changed", True, [f"ED25519 {before}"])
    assert project.json("trust")[1]["result"]["hops"][0]["state"] == "known"
    assert project.dfo("releases").returncode == 0


def test_every_hop_is_shown(node: Node, lab: Node, tmp_path: Path) -> None:
    jump = f"root@127.0.0.1:{lab.ssh.port}"
    project = Project(tmp_path, node, jump=[jump], keys=[str(node.ssh.key), str(lab.ssh.key)])
    first, second = fingerprint(lab.ssh.host_key), fingerprint(node.ssh.host_key)
    code, answer = project.json("trust", "--fingerprint", first)
    assert (code, answer["error"]["kind"], answer["error"]["got"]) == (4, "host_key_unknown", second)
    code, answer = project.json("trust", "--fingerprint", first, "--fingerprint", second)
    assert code == 0
    assert [(hop["fingerprint"], hop["state"], hop["accepted"]) for hop in answer["result"]["hops"]] == [
        (first, "known", False),
        (second, "new", True),
    ]


def test_a_pin_is_changed_in_the_inventory(node: Node, tmp_path: Path) -> None:
    wrong = f"SHA256:{'A' * 43}"
    project = Project(tmp_path, node, host_key=[wrong])
    right = fingerprint(node.ssh.host_key)
    code, answer = project.json("trust", "--fingerprint", right)
    assert (code, answer["error"]["kind"]) == (4, "host_key_mismatch")
    assert wrong in answer["error"]["why"] and f"`ssh.host_key` to [{right}]" in answer["error"]["fix"]
    assert not project.known_hosts.exists()


def test_a_file_that_cannot_be_written(node: Node, tmp_path: Path) -> None:
    project = Project(tmp_path, node, known_hosts="inventory/dfo.yaml/known_hosts")
    code, answer = project.json("trust", "--fingerprint", fingerprint(node.ssh.host_key))
    assert (code, answer["error"]["kind"]) == (5, "not_permitted")


def test_a_local_target_has_no_host(tmp_path: Path) -> None:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "dfo.yaml").write_text("version: 1\ntargets: {here: {transport: local}}\n")
    argv = [sys.executable, "-m", "orchestrator", "trust"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "`here` is not reached by ssh" in done.stderr
