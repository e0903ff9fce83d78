"""`make demo`, and what its report must show on two idle CPU cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_trains_a_drafter_that_accepts_and_stays_lossless(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns(".git", ".venv", ".dfo", "demo-report", ".*_cache", "__pycache__")
    shutil.copytree(CLONE, clone, ignore=ignored)
    # `python -m orchestrator` here is the copy: the deployed sources, inventory and demo are its own.
    dfo = tmp_path / "bin" / "dfo"
    dfo.parent.mkdir()
    dfo.write_text(f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{sys.executable}" -m orchestrator "$@"\n')
    dfo.chmod(0o755)
    environment = {**os.environ, "PATH": f"{dfo.parent}:{os.environ['PATH']}"}
    done = subprocess.run([clone / "demo" / "run.sh"], env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((clone / "demo-report" / "report.json").read_text())
    shown = {name: value for name, value in report.items() if not isinstance(value, list | dict)}
    print(json.dumps(shown, indent=1))
    assert report["lossless"] is True
    assert len(report["prompts"]) >= 12 and all(prompt["tokens"] >= 48 for prompt in report["prompts"])
    assert report["accept_length_trained"] - report["accept_length_untrained"] >= 0.3
    assert report["tau"] >= 1.25
    assert report["seconds"] <= 8 * 60
    train, heldout = report["data"]["train"], report["data"]["heldout"]
    assert train["samples"] > 350 and heldout["samples"] >= 12 and train["sha256"] != heldout["sha256"]
    assert (clone / "demo-report" / "report.html").exists()
