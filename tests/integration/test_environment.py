"""`dfo env-snapshot` and `dfo env-diff` as a user types them, against a real interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from support.json_keys import check_keys

RECORDED = Path(__file__).parents[1] / "data" / "snapshots"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose target trains with an empty environment of its own."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    (folder / "inventory").mkdir()
    (folder / "inventory" / "dfo.yaml").write_text(
        "version: 1\ntargets:\n  lab: {transport: local, python: venv/bin/python}\n"
    )
    return folder


def dfo(project: Path, *words: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *words, "--json"],
        cwd=project,
        env={k: v for k, v in os.environ.items() if not k.startswith("DFO_")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    if code == 0:
        check_keys(words, answer)
    return answer


def install(project: Path, name: str, version: str) -> None:
    """What a wheel leaves behind, without a network."""
    site = next((project / "venv").glob("lib/python*/site-packages"))
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_snapshot_is_saved_where_it_can_be_found(project: Path) -> None:
    result = dfo(project, "env-snapshot")["result"]
    saved = Path(result["path"])
    assert saved.parent == project / "snapshots" and saved.name.startswith("lab-")
    assert json.loads(saved.read_text()) == result["snapshot"]


def test_what_appeared_since_is_a_difference_with_its_consequence(project: Path) -> None:
    dfo(project, "env-snapshot", "--to", "before.json")
    dfo(project, "env-snapshot", "--check", "before.json")
    install(project, "sglang", "0.5.23")
    error = dfo(project, "env-snapshot", "--check", "before.json", code=9)["error"]
    assert error["kind"] == "environment_differs"
    assert [finding["what"] for finding in error["findings"]] == ["sglang"], "that torch was missing before is no news"
    assert "serving package appeared" in error["findings"][0]["consequence"]
    again = dfo(project, "env-diff", "before.json", code=9)["error"]
    assert again["findings"] == error["findings"], "the same against the target as against a file of it"


def test_two_files_are_compared_without_a_target(project: Path) -> None:
    before, now = str(RECORDED / "one-h200.json"), str(RECORDED / "one-h200-other-cudnn.json")
    error = dfo(project, "env-diff", before, now, code=9)["error"]
    assert error["findings"][0]["severity"] == "broken"
    assert dfo(project, "env-diff", before, before)["result"]["findings"] == []


def test_a_lock_needs_pip_and_says_so(project: Path) -> None:
    good = str(RECORDED / "one-h200.json")
    error = dfo(project, "env-snapshot", "--lock", "back.txt", "--from", good, code=5)["error"]
    assert "has no pip" in error["what"] and "ensurepip" in error["fix"]
    assert not (project / "back.txt").exists()
