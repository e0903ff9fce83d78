"""`make demo-lxc`: the whole job in a real container, through sshd and `pct` of a bench node.

    PYTHONPATH=tests python -m bench.demo [FOLDER]

A laptop's project is made in FOLDER (a temporary one, removed afterwards), and every command is one that you would type
for a container of your own. The container shows this machine's Python environment, read-only: torch is not deployed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import requirements
from bench.node import Node
from bench.sshd import Endpoint

CLONE = Path(__file__).parents[2]
#: demo/run.yaml, cut down to a few steps: no answers of the target's own, short rows, one thread of each kind.
SMALL = (
    "data.train=[demo/data/chats.jsonl]",
    "data.max_length=96",
    "data.tokens_per_batch=192",
    "topology.targets=[cpu]",
    "topology.drafters=[cpu]",
    "train.max_seconds=null",
    "train.steps=8",
    "train.batches_per_step=1",
    "train.anchors_per_batch=12",
    "train.log_every=1",
    "train.checkpoint_every=4",
)


def main() -> int:
    missing = requirements.missing()
    if missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="dfo-demo-") as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        with Node(shared=sorted({sys.prefix, sys.base_prefix} - {"/usr"})) as node:
            node.create(200, memory=4096)
            return job(project(folder, node.ssh))


def project(folder: Path, endpoint: Endpoint) -> Path:
    """The sources, and an inventory that says how the container is reached."""
    for part in ("dflash_core", "templates", "demo"):
        shutil.copytree(CLONE / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    ssh = {"host": endpoint.host, "port": endpoint.port, "user": endpoint.user, "keys": [str(endpoint.key)]}
    ssh |= {"agent": False, "config": "none", "known_hosts": str(endpoint.known_hosts), "host_key_policy": "strict"}
    target = {
        "transport": "pct",
        "ssh": ssh,
        "pct": {"container": 200},
        "python": sys.executable,
        "deploy": {"root": "/opt/dfo", "include": ["dflash_core", "templates", "demo"]},
        "env": {"OMP_NUM_THREADS": "1"},
        "launch": {"config": "demo/run.yaml", "stages": ["preflight", "train", "export"]},
    }
    (folder / "inventory").mkdir()
    (folder / "inventory" / "dfo.yaml").write_text(json.dumps({"version": 1, "targets": {"ct200": target}}, indent=1))
    return folder


def job(folder: Path) -> int:
    """Deploy, warm up, train, follow, pull. 0 when every command ended with 0."""
    sets = [word for value in SMALL for word in ("--set", value)]
    started = time.monotonic()
    for words in (
        ["deploy"],
        ["launch", "--warmup-first", *sets],
        ["logs", "-f", "--exit-like-run"],
        ["status", "1"],
        ["pull", "1", "--what", "export", "--to", "pulled"],
    ):
        shown = [word for word in words if word not in sets]
        print(f"\n$ dfo {' '.join(shown)}", flush=True)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DFO_")}
        environ["PYTHONPATH"] = str(CLONE)
        done = subprocess.run([sys.executable, "-m", "orchestrator", *words], cwd=folder, env=environ)
        if done.returncode != 0:
            return done.returncode
    print(f"\nThe whole job in container 200, in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
