"""The stand-in for `pct`, held to what the real one answered: tests/data/pct_cases.yaml."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from bench.node import Node

CASES = yaml.safe_load((Path(__file__).parents[1] / "data/pct_cases.yaml").read_text())
PLACEHOLDERS = {"{pid}": r"\d+", "{line}": r"\d+", "{time}": r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"}
RUNNING, PRIVILEGED, STOPPED, ELSEWHERE = 101, 102, 103, 104
INPUTS = """
    rm -rf /srv/* && mkdir -p /srv/in/folder && cd /srv/in
    echo hello > hello.txt; printf '#!/bin/sh\\necho hi\\n' > tool.sh; chmod 755 tool.sh
    head -c 100000 /dev/urandom > blob; : > empty; ln -s hello.txt link; ln -s nowhere dangling
    echo two > 'two words.txt'; echo minus > ./-dash; echo high > höhe.txt
"""


@pytest.fixture(scope="module")
def house(bench_machine: None) -> Iterator[Node]:
    with Node() as node:
        node.create(RUNNING)
        node.create(PRIVILEGED, unprivileged=False)
        node.create(STOPPED, memory=512, start=False)
        for vmid in (PRIVILEGED, STOPPED):
            config = node.containers[vmid].config
            config.write_text(config.read_text().replace("features: nesting=1\n", ""))
        node.container_elsewhere(ELSEWHERE)
        yield node


@pytest.fixture
def tidy(house: Node) -> Iterator[Node]:
    """The house with its files as the cases expect them, and afterwards with its containers as they were."""
    house.run(["sh", "-c", INPUTS])
    before = {vmid: container.config.read_text() for vmid, container in house.containers.items()}
    yield house
    for vmid, container in house.containers.items():
        container.config.write_text(before[vmid])
        if container.running and vmid == STOPPED:
            container.stop()
        elif not container.running and vmid != STOPPED:
            container.start()
        if container.running:
            container.run(["sh", "-c", "rm -rf /root/* /srv/* /usr/local/bin/*"])
    house.run(["sh", "-c", "rm -rf $(sed -n 's/.*= //p' /etc/lxc/lxc.conf)/*/snapshots/*"])


@contextmanager
def raw_lines(node: Node) -> Iterator[None]:
    config = node.containers[STOPPED].config
    allow = "lxc.cgroup2.devices.allow: c 195:* rwm"
    mount = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"
    config.write_text(f"{config.read_text()}{allow}\n{mount}\n")
    yield


@contextmanager
def gpu_files(node: Node) -> Iterator[None]:
    lines = ["mknod /dev/nvidia0 c 195 0", "mknod /dev/nvidiactl c 195 255", "mknod /dev/nvidia-uvm c 508 0"]
    node.run(["sh", "-c", "; ".join(lines)])
    yield
    node.run(["sh", "-c", "rm -f /dev/nvidia*"])


@contextmanager
def running_program(node: Node) -> Iterator[None]:
    container = node.containers[RUNNING]
    container.run(["sh", "-c", "cp /bin/sleep /root/busy; setsid -f /root/busy 60 >/dev/null 2>&1 </dev/null"])
    yield
    container.run(["pkill", "busy"])


@contextmanager
def impatient(node: Node, vmid: int) -> Iterator[None]:
    with node.locked(vmid), node.lock_patience(0.3):
        yield


@contextmanager
def locked_for_a_moment(node: Node) -> Iterator[None]:
    hold = f"flock /run/lock/lxc/pve-config-{RUNNING}.lock -c 'echo held; sleep 0.5' > /srv/held 2>&1 &"
    node.run(["sh", "-c", f"{hold} while ! grep -q held /srv/held; do :; done"])
    yield


SITUATIONS: dict[str, Callable[[Node], AbstractContextManager[None]]] = {
    "1 MiB file system in 101": lambda node: node.containers[RUNNING].small("/mnt/small", "1m"),
    "101 locked for a moment": locked_for_a_moment,
    "101 locked, little patience": lambda node: impatient(node, RUNNING),
    "103 locked, little patience": lambda node: impatient(node, STOPPED),
    "GPU device files": gpu_files,
    "backup of 101": lambda node: node.config_lock(RUNNING, "backup"),
    "backup of 103": lambda node: node.config_lock(STOPPED, "backup"),
    "cluster down": Node.cluster_down,
    "no quorum": Node.no_quorum,
    "old lxc": Node.old_lxc,
    "program running in 101": running_program,
    "push truncated to 1000": lambda node: node.push_truncated(1000),
    "raw lines in 103": raw_lines,
    "read-only folder in 101": lambda node: node.containers[RUNNING].read_only("/mnt/ro"),
}


def matches(expected: str, got: bytes) -> bool:
    """Whether the text is the expected one, which has placeholders and may lack its last line end."""
    if expected and not expected.endswith("\n"):
        expected += "\n"
    pattern = re.escape(expected)
    for placeholder, regex in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(placeholder), regex)
    return re.fullmatch(pattern, got.decode()) is not None


def check(what: str, expected: str, got: bytes) -> None:
    assert matches(expected, got), f"{what}\nexpected: {expected!r}\ngot:      {got.decode()!r}"


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_pct_answers_as_the_real_one(case: dict[str, object], tidy: Node) -> None:
    running = tidy.containers[RUNNING]
    with ExitStack() as situations:
        for name in case.get("given", ()):  # type: ignore[attr-defined]
            situations.enter_context(SITUATIONS[name](tidy))
        if "before" in case:
            running.run(["sh", "-c", str(case["before"])])
        if "as" in case:
            done = tidy.over_ssh(str(case["run"]), user=str(case["as"]))
        else:
            environment = ["env", "LC_ALL=", "LANG=C.UTF-8", "HOME=/root"]
            done = tidy.run([*environment, "sh", "-c", str(case["run"])], check=False)
        check("stdout", str(case.get("out", "")), done.stdout)
        check("stderr", str(case.get("err", "")), done.stderr)
        assert done.returncode == case.get("exit", 0)
        for line, expected in case.get("inside", {}).items():  # type: ignore[attr-defined]
            check(f"inside: {line}", expected, running.run(["sh", "-c", line], check=False).stdout)
        for line, expected in case.get("after", {}).items():  # type: ignore[attr-defined]
            check(f"after: {line}", expected, tidy.run(["sh", "-c", line], check=False).stdout)


def test_the_lock_is_waited_for_ten_seconds(tidy: Node) -> None:
    with tidy.locked(RUNNING):
        start = time.monotonic()
        assert tidy.run(["pct", "push", str(RUNNING), "/srv/in/hello.txt", "/root/x"], check=False).returncode == 4
        assert 10 <= time.monotonic() - start < 13
