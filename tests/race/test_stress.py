"""The stress of `stress.py`, each test 20 cold runs, two at a time; RACE_RUNS changes the number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "stress.py"
RUNS = int(os.environ.get("RACE_RUNS", "20"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 60 * RUNS)]


def stress(*options: str) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), "--runs", str(RUNS), "--jobs", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_cold_runs_with_the_gate_never_fail() -> None:
    result = stress("--mode", "gate")
    assert (result["runs"], result["failed"]) == (RUNS, 0), result
    assert result["refused"] == [0], "with one shape per key nothing compiles late"
    assert len(result["compiles"]) == 1, "what is compiled does not depend on the order of the threads"


def test_late_shapes_on_a_busy_machine_never_fail() -> None:
    result = stress("--mode", "gate", "--reshape", "--busy", "2")
    assert (result["runs"], result["failed"]) == (RUNS, 0), result
    assert min(result["refused"]) > 0, "the shapes changed behind the gate's back"
    assert len(result["compiles"]) == len(result["refused"]) == 1, result


def test_the_unprotected_rate_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Depends on torch and on load, down to none at all, so it is shown and not judged."""
    result = stress("--mode", "none")
    with capsys.disabled():
        print(f"\nunprotected: {result['failed']} of {result['runs']} cold runs failed {result['errors']}")
    assert result["runs"] == RUNS
