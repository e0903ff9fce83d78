"""The bench itself: what it takes, that it cleans up, and that its faults are the faults they claim to be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from bench import requirements
from bench.container import Container
from bench.faulty_ssh import FaultySsh
from bench.node import Node
from bench.relay import Relay
from bench.sshd import Endpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), min_size=1, max_size=4)


def ssh(endpoint: Endpoint, line: str, input: bytes = b"", timeout: float = 30) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*endpoint.command(), line], input=input, capture_output=True, timeout=timeout)


def test_a_container_is_there_in_a_moment(bench_machine: None) -> None:
    took: dict[str, float] = {}

    def step(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        took[name] = round(time.perf_counter() - start, 3)

    made: list[Node] = []
    step("node", lambda: made.append(Node()))
    with made[0] as node:
        step("create", lambda: node.create(start=False))
        container = node.containers[200]
        step("start", lambda: container.start(wait=False))
        step("systemd up", container.wait_until_up)
        step("attach", lambda: container.run(["true"]))
        step("pct exec", lambda: node.run(["pct", "exec", "200", "--", "true"]))
        step("pct exec over ssh", lambda: node.over_ssh("pct exec 200 -- true", check=True))
        step("sshd restart", node.sshd.restart)
        step("stop", container.stop)
    print(took)
    # Idle: 0.05 + 0.09 + 0.3 s to a container that is up, 0.02 attach, 0.1 stop. Here for a busy machine.
    assert took["start"] < 1 and took["attach"] < 1 and took["stop"] < 2 and took["sshd restart"] < 2


def test_a_node_knows_what_was_left_on_it(node: Node) -> None:
    assert node.leftovers() == []
    node.over_ssh(
        "mkdir /tmp/a && echo x > /tmp/a/b && touch /root/c /etc/motd /dev/shm/d && rm /etc/issue", check=True
    )
    assert node.leftovers() == ["/dev/shm/d", "/etc/issue", "/etc/motd", "/root/c", "/tmp/a", "/tmp/a/b"]
    assert Path("/etc/issue").exists() and not Path("/tmp/a/b").exists(), "the machine itself is not touched"


def test_a_killed_run_leaves_nothing_that_runs(bench_machine: None) -> None:
    code = "from bench.node import Node; node = Node(); node.create(200); print(node.pid, flush=True); input()"
    path = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert run.stdout
    try:
        init = psutil.Process(int(run.stdout.readline()))
        processes = [init, *init.children(recursive=True)]
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert len(processes) > 5
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_where_the_bench_cannot_run_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "SEARCH", "/nowhere")
    assert "apt install lxc mmdebstrap openssh-client openssh-server sudo uidmap util-linux" in requirements.missing()


def test_the_stand_in_starts_in_a_moment_and_slower_when_told(node: Node) -> None:
    def fastest() -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            node.run(["pct", "list"])
            times.append(time.perf_counter() - start)
        return min(times)

    assert fastest() < 0.1  # 0.03 when idle
    with node.delay(0.5):
        assert 0.5 < fastest() < 0.7


def test_folders_of_the_machine_can_be_shown_inside(bench_machine: None) -> None:
    environment, python = sys.prefix, sys.base_prefix
    with Node(shared=(environment, python)) as node:
        container = node.create(200)
        interpreter = f"{environment}/bin/python"
        container.run([interpreter, "-c", "import pytest"])
        assert container.run(["touch", f"{environment}/x"], check=False).returncode != 0


def test_pushes_at_the_same_time_wait_for_each_other(node: Node, ct: Container) -> None:
    line = "for i in 1 2 3 4 5 6 7 8; do (pct push 200 /etc/hostname /root/$i || echo failed) & done; wait"
    done = node.over_ssh(line)
    assert done.stdout == b""
    assert set(done.stderr.splitlines()) <= {b"trying to acquire lock...", b" OK"}
    assert len(list((ct.root / "root").glob("?"))) == 8


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WORDS)
def test_any_argument_goes_through_the_stand_in_as_it_is(lab: Node, words: list[str]) -> None:
    printed = lab.run(["env", "LC_ALL=C.UTF-8", "pct", "exec", "200", "--", "printf", r"%s\0", *words]).stdout
    assert printed == b"".join(word.encode() + b"\0" for word in words)


class TestSituations:
    def test_full_disk_of_the_node(self, node: Node) -> None:
        with node.full_disk(free=100_000):
            done = node.over_ssh("head -c 1000000 /dev/zero > /tmp/x; stat -c %s /tmp/x")
            assert b"No space left on device" in done.stderr
            assert 0 < int(done.stdout) < 1_000_000
        assert node.over_ssh("head -c 1000000 /dev/zero > /tmp/x").returncode == 0

    def test_full_disk_of_the_container(self, ct: Container) -> None:
        with ct.full(free=100_000):
            assert ct.run(["sh", "-c", "head -c 1000000 /dev/zero > /root/x"], check=False).returncode != 0
        ct.run(["sh", "-c", "head -c 1000000 /dev/zero > /root/x"])
        with ct.small("/opt/small", "64k"), ct.full("/opt/small"):
            assert ct.run(["sh", "-c", "echo > /opt/small/x"], check=False).returncode != 0

    def test_no_python(self, ct: Container) -> None:
        with ct.without("usr/bin/python3*"):
            assert ct.run(["python3", "-V"], check=False).returncode == 127
        ct.run(["python3", "-V"])

    def test_clock_skew(self, ct: Container) -> None:
        with ct.clock(3600):
            ahead = float(ct.run(["python3", "-c", "import time; print(time.time())"]).stdout) - time.time()
        assert 3590 < ahead < 3610
        assert abs(int(ct.run(["date", "+%s"]).stdout) - time.time()) < 5

    def test_read_only(self, ct: Container) -> None:
        with ct.read_only("/opt"):
            assert ct.run(["touch", "/opt/x"], check=False).returncode == 1
        ct.run(["touch", "/opt/x"])

    def test_hanging_attach(self, node: Node, ct: Container) -> None:
        with node.hanging_attach(), pytest.raises(subprocess.TimeoutExpired):
            node.over_ssh("pct exec 200 -- true", timeout=1)
        node.over_ssh("pct exec 200 -- true", check=True)

    def test_memory_limit(self, node: Node) -> None:
        container = node.create(200, memory=256)
        hog = "x = bytearray(400 << 20); x[::4096] = b'x' * len(x[::4096])"
        assert container.run(["python3", "-c", hog], check=False).returncode == 137

    def test_a_dropped_connection_leaves_the_process_until_it_writes(self, node: Node, ct: Container) -> None:
        line = "pct exec 200 -- sh -c 'sleep 1; echo x; echo y; touch /root/survived'"
        client = subprocess.Popen([*node.ssh.command(), line])
        while b"sleep 1" not in ct.run(["ps", "-eo", "args"]).stdout:
            time.sleep(0.05)
        client.kill()
        client.wait()
        node.sshd.drop()
        time.sleep(0.3)
        assert b"sleep 1" in ct.run(["ps", "-eo", "args"]).stdout, "no hang-up without a terminal"
        time.sleep(1.2)
        assert not (ct.root / "root/survived").exists(), "SIGPIPE at its next write"

    def test_sshd(self, node: Node) -> None:
        node.sshd.stop()
        assert b"Connection refused" in node.over_ssh("true").stderr
        node.sshd.start()
        node.over_ssh("true", check=True)
        node.sshd.new_host_key()
        node.sshd.restart()
        assert b"Host key verification failed" in node.over_ssh("true").stderr

    def test_the_plain_way_in(self, ct: Container) -> None:
        with ct.sshd() as endpoint:
            assert ssh(endpoint, "hostname").stdout == b"ct200\n"
            assert ssh(endpoint, "cat", input=b"x" * 300_000).stdout == b"x" * 300_000


class TestConnectionFaults:
    def test_no_fault(self, faulty_ssh: Callable[..., FaultySsh]) -> None:
        server = faulty_ssh()
        done = ssh(server.endpoint, "cat; echo e >&2; exit 5", input=b"x" * 300_000)
        assert (done.returncode, done.stdout, done.stderr) == (5, b"x" * 300_000, b"e\n")
        assert server.commands == ["cat; echo e >&2; exit 5"]

    def test_answers(self, faulty_ssh: Callable[..., FaultySsh]) -> None:
        server = faulty_ssh(answers={"pct list": (3, b"out", b"err")})
        done = ssh(server.endpoint, "pct list")
        assert (done.returncode, done.stdout, done.stderr) == (3, b"out", b"err")

    def test_key_refused_and_host_key_changed(self, faulty_ssh: Callable[..., FaultySsh]) -> None:
        assert b"Permission denied (publickey)" in ssh(faulty_ssh(refuse_auth=True).endpoint, "true").stderr
        assert b"Host key verification failed" in ssh(faulty_ssh(other_host_key=True).endpoint, "true").stderr

    def test_banner_delay(self, faulty_ssh: Callable[..., FaultySsh]) -> None:
        start = time.monotonic()
        assert ssh(faulty_ssh(banner_delay=0.5).endpoint, "true").returncode == 0
        assert time.monotonic() - start > 0.5

    def test_cut_and_stall(self, faulty_ssh: Callable[..., FaultySsh]) -> None:
        cut = ssh(faulty_ssh(cut_after=1000).endpoint, "head -c 5000 /dev/zero")
        assert (cut.returncode, len(cut.stdout)) == (255, 1000)
        with pytest.raises(subprocess.TimeoutExpired) as stalled:
            ssh(faulty_ssh(stall_after=1000).endpoint, "head -c 5000 /dev/zero", timeout=1)
        assert stalled.value.stdout == b"\0" * 1000

    def test_relay_passes_cuts_and_swallows(
        self, faulty_ssh: Callable[..., FaultySsh], relay: Callable[..., Relay]
    ) -> None:
        server = faulty_ssh()
        slow = relay(server.endpoint, delay=0.05)
        start = time.monotonic()
        assert ssh(slow.endpoint, "cat", input=b"x" * 1_000_000).stdout == b"x" * 1_000_000
        assert time.monotonic() - start > 0.5, "a login takes several round trips of 0.1 s"
        for way in ("cut_up", "cut_down"):
            cutting = relay(server.endpoint, **{way: 20_000})
            assert ssh(cutting.endpoint, "cat", input=b"x" * 1_000_000).returncode == 255
            assert cutting.passed[way.removeprefix("cut_")] == 20_000
            assert ssh(cutting.endpoint, "echo again").stdout == b"again\n"
        with slow.black_hole(), pytest.raises(subprocess.TimeoutExpired):
            ssh(slow.endpoint, "true", timeout=1)
        assert ssh(slow.endpoint, "echo back").stdout == b"back\n"
