"""A warm cache on a real GPU: another release, and the same cache saved and restored, compile nothing again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.package_copy import copy_package

from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Compiled flex attention with its backward, and one kernel of ours.
STEP = """
import json, sys, time
from dflash_core.compile.environment import compile_home, configure_main, prepare_process
prepare_process(compile_home())
import torch
from dflash_core.attention.flex import FlexAttention
from dflash_core.attention.layout import BlockLayout
from dflash_core.compile.counting import cache_misses, count_kernels
from dflash_core.kernels.rms_norm import add_rms_norm
configure_main()
count_kernels()
device, begin = sys.argv[1], time.perf_counter()
on_gpu = device != "cpu"
def rows(count, heads):
    return torch.randn(count, heads, 64, device=device, dtype=torch.bfloat16, requires_grad=on_gpu)
anchors = torch.arange(64, device=device) * 8
layout = BlockLayout(torch.zeros_like(anchors), anchors, 8, torch.ones(64, dtype=torch.bool, device=device))
out = FlexAttention()(
    rows(512, 4), rows(512, 2), rows(512, 2), rows(512, 2), rows(512, 2), layout,
    scale=0.125, sliding_window=None, causal=False,
)
if on_gpu:
    out.float().sum().backward()
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    add_rms_norm(x, x, torch.ones(256, device=device, dtype=torch.bfloat16), 1e-6)
    torch.cuda.synchronize()
seconds = round(time.perf_counter() - begin, 2)
print(json.dumps({"misses": cache_misses(), "seconds": seconds, "at": str(compile_home())}))
"""


def step(package: Path, caches: Path, device: str = "cuda:0") -> dict[str, Any]:
    """What a fresh process of a release finds in the cache."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON", "DFLASH"))}
    paths = {"PYTHONPATH": str(package.parent), "DFLASH_CACHE_DIR": str(caches)}
    argv = [sys.executable, "-c", STEP, device]
    done = subprocess.run(argv, cwd=package.parent, env=clean | paths, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def save_and_restore(root: Path, store: str) -> None:
    """Through the programs that run in a target, with the target emptied in between."""
    session = Session("lab", LocalTransport(), str(root), sys.executable)
    blocks: list[bytes] = []
    about = session.call("cache_save", {"store": store}, on_record=lambda record: blocks.append(record.data))
    shutil.rmtree(root / "shared")
    owner = {"user": "a", "host": "b", "pid": 1, "command": "dfo cache restore", "target": "lab"}
    sizes = {name: about[name] for name in ("bytes", "unpacked", "files", "sha256")}
    request = {**sizes, "store": store, "owner": owner, "wait_s": 0.0, "digests": [], "replace": False}
    session.call("cache_restore", request | {"environment": {}}, payload=blocks)


def test_a_new_release_and_a_restored_cache_compile_nothing(tmp_path: Path) -> None:
    caches = tmp_path / "shared" / "cache"
    first = copy_package(tmp_path / "releases" / "20261130-1200-aaaaaa")
    second = Path(shutil.copytree(first, tmp_path / "releases" / "20261201-0800-bbbbbb" / "dflash_core"))
    (second / "README.md").write_text("another release\n")
    cold = step(first, caches)
    assert cold["misses"] >= 2
    other_release = step(second, caches)
    save_and_restore(tmp_path, Path(cold["at"]).name)
    restored = step(second, caches)
    print(f"cold {cold}, other release {other_release}, restored {restored}")
    assert other_release["misses"] == restored["misses"] == 0
    assert restored["seconds"] < cold["seconds"] / 2
