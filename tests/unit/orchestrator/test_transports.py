"""Which transport a target gets, what that costs, and the child processes of the local one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.errors import DeadlineError, UsageError
from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.resolve import load_inventory
from orchestrator.transport import open_transport
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.pct import PctTransport

ROOT = Path(__file__).parents[3]
INVENTORY = """\
version: 1
defaults: {ssh: {host: pve1, user: root, config: none}}
targets:
  here: {transport: local}
  lab: {transport: pct, pct: {container: 101}}
  user: {transport: pct, ssh: {user: dfo, sudo: true}, pct: {container: 102}}
  box: {transport: ssh}
  root: {transport: ssh, ssh: {user: ada, sudo: true}}
  program: {transport: ssh, ssh: {client: openssh}}
"""


@pytest.fixture
def targets(tmp_path: Path) -> dict[str, ResolvedTarget]:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "dfo.yaml").write_text(INVENTORY)
    loaded = load_inventory(find_inventory(environ={}, cwd=tmp_path))
    return {name: loaded.resolve(name, environ={}).target for name in loaded.file.targets}


def test_a_target_gets_its_transport_and_contacts_nobody(targets: dict[str, ResolvedTarget]) -> None:
    labels = {name: open_transport(target).label for name, target in targets.items()}
    assert labels == {
        "here": "this machine",
        "lab": "root@pve1, container 101",
        "user": "dfo@pve1, container 102",
        "box": "root@pve1",
        "root": "ada@pve1 with sudo",
        "program": "root@pve1",
    }


def test_pct_runs_by_its_full_path_and_with_sudo_where_asked(targets: dict[str, ResolvedTarget]) -> None:
    commands = {}
    for name in ("lab", "user"):
        transport = open_transport(targets[name])
        assert isinstance(transport, PctTransport)
        commands[name] = transport.node.pct_command
    assert commands == {"lab": ("/usr/sbin/pct",), "user": ("sudo", "-n", "--", "/usr/sbin/pct")}


def test_hops_are_traced(targets: dict[str, ResolvedTarget]) -> None:
    shown: list[str] = []
    open_transport(targets["lab"], trace=shown.append)
    assert shown == ["  ~ hop root@pve1 (pve1:22)"]


def test_the_ssh_program_must_be_there_to_be_used(
    targets: dict[str, ResolvedTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError) as caught:
        open_transport(targets["program"])
    assert "openssh-client" in caught.value.fix


def test_a_local_target_loads_no_ssh() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom orchestrator.inventory.locate import find_inventory\n"
        "from orchestrator.inventory.resolve import load_inventory\nfrom orchestrator.transport import open_transport\n"
        "target = load_inventory(find_inventory(environ={}, cwd=Path('/'))).resolve('local', environ={}).target\n"
        "open_transport(target)\nprint(*sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert not {"paramiko", "fabric", "invoke", "cryptography"} & {name.split(".")[0] for name in done.stdout.split()}


# Child processes, which the ssh program is too


def test_a_daemon_that_keeps_our_pipes_does_not_keep_us() -> None:
    """Nor does ssh's master, which has them handed over."""
    with LocalTransport().stream(("sh", "-c", "setsid sh -c 'echo $$; exec sleep 60' & exec sleep 60")) as stream:
        daemon = int(next(chunk for chunk in stream if chunk))
        started = time.monotonic()
    assert time.monotonic() - started < 5
    os.kill(daemon, signal.SIGKILL)  # it is there: else this raises


def test_input_that_nobody_reads_does_not_keep_us() -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        LocalTransport().run(("sleep", "30"), stdin=[bytes(10_000_000)], deadline=0.5)
    assert time.monotonic() - started < 8


def test_no_descriptor_is_left_behind() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    LocalTransport().run(("true",), deadline=10)
    before = count()
    for _ in range(20):
        LocalTransport().run(("sh", "-c", "cat; echo e >&2"), stdin=[b"x"], deadline=10)
    assert count() <= before + 2
