"""Secrets are fetched late, never shown, and a wrong source says what is wrong with it."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.resolve import load_inventory
from orchestrator.inventory.secrets import Secret
from orchestrator.inventory.show import rows

VALUE = "hunter2-hunter2"


def private(path: Path, text: str = VALUE + "\n", mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def resolve(folder: Path) -> tuple[ResolvedTarget, str]:
    private(folder / "token")
    (folder / "dfo.yaml").write_text(
        "version: 1\ntargets:\n  lab:\n    transport: local\n    env:\n"
        "      A: {env: MY_TOKEN}\n      B: {file: token}\n      D: plain\n"
        f"      C: {{command: [{sys.executable}, -c, 'print(\"{VALUE}\")']}}\n"
    )
    loaded = load_inventory(find_inventory(folder / "dfo.yaml", environ={}))
    resolution = loaded.resolve("lab", environ={})
    return resolution.target, json.dumps([row.value for row in rows(resolution)])


def test_each_source_gives_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = resolve(tmp_path)
    monkeypatch.setenv("MY_TOKEN", VALUE)
    assert target.environment() == {"A": VALUE, "B": VALUE, "C": VALUE, "D": "plain"}


def test_no_way_of_printing_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", VALUE)
    target, shown = resolve(tmp_path)
    secret = target.env["A"]
    # Not even after it was fetched: the object never holds the value.
    target.environment()
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s %r", (secret, target), None)
    for text in (str(secret), repr(secret), f"{secret}", f"{target}", record.getMessage(), str(pickle.dumps(secret))):
        assert VALUE not in text
    assert (str(secret), repr(secret)) == ("***", "***")
    assert "*** (environment variable MY_TOKEN)" in shown
    assert "*** (file token)" in shown


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_file_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    private(tmp_path / "token", mode=mode)
    with pytest.raises(UsageError) as caught:
        Secret(file="token").reveal("T", project=tmp_path)
    assert caught.value.kind == "secret_missing"
    assert f"{mode:04o}" in caught.value.why
    assert caught.value.fix == f"`chmod 600 {tmp_path / 'token'}`"


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        (Secret(env="NOT_SET"), "it is not set here"),
        (Secret(env="EMPTY"), "it is not set here"),
        (Secret(file="missing"), "No such file or directory"),
        (Secret(file="empty"), "it gave no usable text"),
        (Secret(file="binary"), "it is not UTF-8 text"),
        (Secret(file="folder"), "Is a directory"),
        (Secret(command=("/missing-program",)), "No such file or directory"),
        (Secret(command=(sys.executable, "-c", f"print('{VALUE}'); raise SystemExit(3)")), "it ended with code 3"),
        (Secret(command=(sys.executable, "-c", "pass")), "it gave no usable text"),
    ],
)
def test_a_source_without_a_value(tmp_path: Path, secret: Secret, why: str) -> None:
    private(tmp_path / "empty", "\n")
    (tmp_path / "binary").touch(0o600)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir(0o700)
    with pytest.raises(UsageError) as caught:
        secret.reveal("T", project=tmp_path, environ={"EMPTY": ""})
    assert caught.value.kind == "secret_missing"
    assert why in caught.value.why
    assert VALUE not in caught.value.why


def test_a_command_that_waits_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.inventory.secrets.COMMAND_DEADLINE", 0.2)
    with pytest.raises(UsageError, match="no value for `T`") as caught:
        Secret(command=(sys.executable, "-c", "import time; time.sleep(30)")).reveal("T", project=tmp_path)
    assert "did not end within" in caught.value.why
