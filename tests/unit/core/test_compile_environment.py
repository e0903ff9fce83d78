"""The environment of a run, checked in processes of their own because torch reads it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from dflash_core.compile.environment import clone_code, prepare_process, variables

ROOT = Path(__file__).parents[3]
# What a worker thread sees after torch was imported in a prepared process.
REPORT = """
import json, sys, threading
from pathlib import Path
from dflash_core.compile import environment
environment.prepare_process(Path(sys.argv[1]))
before = environment.describe(Path(sys.argv[1]))
import torch
environment.configure_main()
from torch._inductor.runtime.runtime_utils import cache_dir
import torch._functorch.config as functorch, torch._inductor.config as inductor
seen = {}
def worker():
    seen["fresh"] = environment.describe(Path(sys.argv[1]))["dynamo"]
    environment.configure_thread(recompile_limit=3)
    seen["configured"] = environment.describe(Path(sys.argv[1]))["dynamo"]
    seen["caches"] = [inductor.fx_graph_cache, functorch.enable_autograd_cache, cache_dir()]
thread = threading.Thread(target=worker)
thread.start(); thread.join()
print(json.dumps({"before": before, "after": environment.describe(Path(sys.argv[1])), **seen}))
"""
# Five shapes of one function under a limit of three, then as clones.
LIMIT = """
import json, torch
from dflash_core.compile import environment
environment.configure_main(recompile_limit=3)
def f(x):
    return x * 2
def compiles(make):
    count = []
    def backend(graph, example_inputs):
        count.append(1)
        return graph
    for size in range(2, 7):
        torch.compile(make(), backend=backend, dynamic=False)(torch.ones(size))
    return len(count)
clones = compiles(lambda: environment.clone_code(f))
try:
    compiles(lambda: f)
    error = None
except Exception as caught:
    error = type(caught).__name__
print(json.dumps({"clones": clones, "error": error}))
"""


def python(code: str, *args: str, **environ: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_every_thread_gets_the_same_configuration(tmp_path: Path) -> None:
    seen = python(REPORT, str(tmp_path), TORCHDYNAMO_SUPPRESS_ERRORS="0", TORCH_COMPILE_DISABLE="1")

    wanted = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "recompile_limit": 3,
        "fail_on_recompile_limit_hit": True,
        "suppress_errors": False,
    }
    assert seen["configured"] == wanted
    assert seen["after"]["dynamo"]["fail_on_recompile_limit_hit"] is True
    assert seen["fresh"]["automatic_dynamic_shapes"] is False, "the variable reaches threads nobody configured"
    assert seen["fresh"]["suppress_errors"] is False, "'0' counts as on unless the variable is removed"
    if Version(seen["after"]["torch"]) >= Version("2.12"):
        assert seen["fresh"]["fail_on_recompile_limit_hit"] is False, "per thread: each worker must configure itself"
    assert seen["caches"] == [True, True, str(tmp_path / "inductor")]
    assert seen["before"]["torch"] is None and seen["before"]["dynamo"] is None
    assert seen["after"]["variables"] == variables(tmp_path) | {"TORCH_COMPILE_DISABLE": "1"}
    assert seen["after"]["disabled"] == ["TORCH_COMPILE_DISABLE"]


def test_a_clone_has_its_own_graphs_and_the_limit_is_loud() -> None:
    assert python(LIMIT) == {"clones": 5, "error": "FailOnRecompileLimitHit"}


def test_what_is_set_already_is_kept_and_folders_are_made(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": str(tmp_path / "mine"), "TORCHDYNAMO_SUPPRESS_ERRORS": "0"}
    in_force = prepare_process(tmp_path / "cache", environ)

    assert in_force == environ
    assert in_force["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    assert "TORCHDYNAMO_SUPPRESS_ERRORS" not in environ
    assert (tmp_path / "mine").is_dir() and (tmp_path / "cache" / "inductor").is_dir()


def test_cache_folders_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert variables(Path("cache"))["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")


def test_a_clone_behaves_like_the_original() -> None:
    offset = 3

    def original(x: int, *, scale: int = 2) -> int:
        """Doc."""
        return x * scale + offset

    clone = clone_code(original)
    assert clone is not original and clone.__code__ is not original.__code__
    assert (clone(4), clone(4, scale=5), clone.__doc__, clone.__name__) == (11, 23, "Doc.", "original")
    with pytest.raises(TypeError, match="plain Python function"):
        clone_code(len)
