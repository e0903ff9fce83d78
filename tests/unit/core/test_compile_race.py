"""The race on the installed torch, made deterministic: fails without the gate, cannot happen with it.

Each mode runs in a process of its own with fresh compile caches, since a kept cache or state left over by an
earlier failure would hide or fake the race.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

PROGRAM = Path(__file__).parents[2] / "race" / "interleavings.py"
FX_MESSAGE = "Detected that you are using FX to symbolically trace a dynamo-optimized function"

# What happens to the victim without the gate, by the first torch version that behaves so.
UNPROTECTED: dict[str, dict[str, str]] = {
    "compiled call during a plain trace": {"2.11": FX_MESSAGE, "2.14": "ok"},
    "compiled call during a compile": {"2.11": FX_MESSAGE, "2.13": "ok"},
    "eager nn.Linear during a compile": {"2.11": "NameError: module is not installed as a submodule"},
    "eager create_block_mask during a compile": {"2.11": "ok", "2.13": "KeyError: 'custom'"},
    "a second trace during a plain trace": {"2.11": "AssertionError: CURRENT_PATCHER is None"},
}
# Whether a thread sees what another thread has set, by the first torch version that behaves so.
GLOBALS: dict[str, dict[str, bool]] = {
    "fx tracing flag": {"2.11": True, "2.14": False},
    "nn.Module.__call__ patched by a trace": {"2.11": True},
    "fx patcher": {"2.11": True},
    "is_compiling": {"2.11": False, "2.13": True},
    "fx annotation": {"2.11": True},
    "dynamo config": {"2.11": True, "2.12": False},
    "inductor config": {"2.11": True, "2.12": False},
    "functorch config": {"2.11": True, "2.12": False},
    "stance": {"2.11": True},
    "compile callback, before the trace": {"2.11": True},
    "compiled graphs of one code object": {"2.11": True},
}


def expected(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The newest entry of each row that is not newer than the installed torch."""
    installed = Version(Version(torch.__version__).base_version)
    rows: dict[str, Any] = {}
    for name, since in table.items():
        known = [version for version in since if Version(version) <= installed]
        rows[name] = since[max(known, key=Version)]
    return rows


def interleavings(mode: str, cache: Path) -> dict[str, Any]:
    environ = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode],
        env=environ,
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["result"]
    return result


@pytest.mark.parametrize("mode", ["none", "first"])
def test_a_warm_thread_fails_beside_a_trace(mode: str, tmp_path: Path) -> None:
    """Without protection, and also with a lock around each thread's first step."""
    result = interleavings(mode, tmp_path)

    assert all(outcome["met"] for outcome in result.values()), result
    for scenario, failure in expected(UNPROTECTED).items():
        assert failure in result[scenario]["victim"], (scenario, result[scenario])
    assert any(outcome["victim"] != "ok" for outcome in result.values())


def test_the_gate_keeps_every_step_out_of_a_trace(tmp_path: Path) -> None:
    result = interleavings("gate", tmp_path)

    assert result.pop("refused") == 0
    assert result.pop("compiles") > 0
    assert set(result) == set(UNPROTECTED)
    for scenario, outcome in result.items():
        assert outcome == {"met": False, "tracer": "ok", "victim": "ok"}, (scenario, outcome)


def test_no_global_of_torch_has_moved(tmp_path: Path) -> None:
    """On an upgrade of torch this names the state that became, or stopped being, per thread."""
    seen = interleavings("globals", tmp_path)

    known = expected(GLOBALS)
    moved = {name: value for name, value in seen.items() if known[name] != value}
    assert not moved, f"torch {torch.__version__} differs from the table above in {moved}; read them up, extend it"
    assert set(seen) == set(known)
