"""`make demo-lxc`: the whole job with the real core, inside a real container, through sshd and pct."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deploy_warm_up_train_follow_pull(bench_machine: None, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(CLONE / "tests")}
    command = [sys.executable, "-m", "bench.demo", str(tmp_path)]
    done = subprocess.run(command, env=environ, cwd=CLONE, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout.splitlines()[-1])
    assert "[1 warmup] warm: " in done.stdout and "[1 train] step 8/8 " in done.stdout
    assert "runs as   systemd unit dfo-1-" in done.stdout
    pulled = {path.name for path in (tmp_path / "pulled").rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "README.md"} <= pulled
