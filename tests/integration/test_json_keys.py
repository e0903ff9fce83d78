"""The JSON keys of the commands that need no run; those that do are frozen in test_whole_job.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.json_keys import check_keys


def test_the_keys_of_every_command_without_a_run(tmp_path: Path) -> None:
    def dfo(*words: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DFO_")}
        argv = [sys.executable, "-m", "orchestrator", *words, "--json"]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        check_keys(words, json.loads(done.stdout))

    dfo("init")
    inventory = tmp_path / "inventory" / "dfo.yaml"
    inventory.write_text(
        "version: 1\ntargets:\n  here: {transport: local, deploy: {include: [sources]}, launch: {config: run.yaml}}\n"
    )
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "a.py").write_text("A = 1\n")
    dfo("config", "show")
    dfo("config", "docs")
    dfo("config", "schema")
    dfo("doctor")
    dfo("deploy", "--dry-run")
    dfo("deploy")
    (tmp_path / "sources" / "a.py").write_text("A = 2\n")
    dfo("deploy")
    dfo("launch", "--dry-run")
    dfo("rollback")
    dfo("releases")
    dfo("audit")
    dfo("lock", "show")
    dfo("lock", "take", "-m", "hands off")
    dfo("lock", "release")
    dfo("lock", "take", "-m", "hands off")
    dfo("lock", "break")
    dfo("status")
    dfo("status", "--all")
