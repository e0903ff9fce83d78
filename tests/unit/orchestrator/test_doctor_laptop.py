"""What doctor sees of this machine: key files, a real agent, secrets. Nothing is contacted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.doctor.checks import laptop as checks
from orchestrator.doctor.examine import wanted_of
from orchestrator.doctor.facts import Laptop
from orchestrator.doctor.look import laptop
from orchestrator.doctor.verdict import Status
from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.resolve import load_inventory

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no OpenSSH client")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`, `locked` (with a passphrase) and `damaged`."""
    folder = tmp_path_factory.mktemp("keys")
    for name, phrase in (("plain", ""), ("locked", "secret")):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-f", str(folder / name)]
        subprocess.run(argv, check=True, timeout=30)
    (folder / "damaged").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nnot base64\n")
    (folder / "damaged").chmod(0o600)
    return folder


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An agent of the test's own, empty; ends with the test."""
    place = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
    yield place
    process.terminate()
    process.communicate(timeout=10)


def look(folder: Path, ssh: str, more: str = "") -> Laptop:
    (folder / "inventory").mkdir(exist_ok=True)
    text = f"version: 1\ntargets:\n  lab: {{transport: ssh, ssh: {{host: h, config: none, {ssh}}}{more}}}\n"
    (folder / "inventory" / "dfo.yaml").write_text(text)
    found = find_inventory(environ={}, cwd=folder)
    target = load_inventory(found).resolve("lab", environ={}, flags={}).target
    return laptop.look(target, wanted_of(target), found)


def test_key_files_as_they_are(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    names = ("plain", "locked", "damaged", "missing")
    seen = look(tmp_path, f"keys: [{', '.join(str(keys / name) for name in names)}]")
    plain, locked, damaged, missing = seen.keys
    assert (plain.mode, plain.locked, plain.problem) == (0o600, False, None)
    assert locked.locked and damaged.problem and missing.mode is None
    assert seen.ssh is not None and seen.ssh.startswith("OpenSSH")
    assert checks.agent(seen).saw == "no agent answers; the key files do without"


def test_a_locked_key_wants_an_agent_and_has_one(keys: Path, tmp_path: Path, agent: Path) -> None:
    seen = look(tmp_path, f"keys: [{keys / 'locked'}]")
    assert seen.agent is not None and seen.agent.keys == 0
    assert checks.agent(seen).saw == f"the agent holds no key, and {keys / 'locked'} has a passphrase"
    subprocess.run(["ssh-add", "-q", str(keys / "plain")], check=True, timeout=30)
    assert checks.agent(look(tmp_path, f"keys: [{keys / 'locked'}]")).saw == "the agent holds 1 key"
    assert look(tmp_path, "agent: false, keys: []").agent == laptop.Agent(False, str(agent), None)


def test_an_agent_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "gone"))
    monkeypatch.setenv("HOME", str(tmp_path))
    verdict = checks.agent(look(tmp_path, "keys: []"))
    assert (verdict.status, verdict.saw) == (Status.FAILED, "no agent answers, and there is no key file")


def test_secrets_are_looked_at_and_commands_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFO_TEST_SET", "s3cr3t")
    monkeypatch.delenv("DFO_TEST_UNSET", raising=False)
    (tmp_path / "open").write_text("s3cr3t")
    (tmp_path / "open").chmod(0o644)
    env = "A: {env: DFO_TEST_SET}, B: {env: DFO_TEST_UNSET}, C: {file: open}, D: {command: [touch, ran]}, E: plain"
    seen = look(tmp_path, "keys: []", f", env: {{{env}}}")
    assert seen.secrets == ("A", "B", "C")
    assert [trouble.what.split("`")[1] for trouble in seen.lost_secrets] == ["B", "C"]
    assert "s3cr3t" not in repr(seen) and not (tmp_path / "ran").exists()
