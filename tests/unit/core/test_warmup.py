"""When a warm-up still counts: versions, devices, options, shapes, and sources that are traced or are kernels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.package_copy import copy_package

import dflash_core
from dflash_core.compile import fingerprint as fingerprints
from dflash_core.compile import warmup
from dflash_core.compile.environment import compile_home, compile_options
from dflash_core.compile.fingerprint import differences, digest, fingerprint, source_hashes
from dflash_core.config import RunConfig, TargetConfig
from dflash_core.errors import WarmupError
from dflash_core.pipeline.rehearsal import RehearsalEntry
from dflash_core.warmth import compile_settings, filling, needs_rehearsal, refuse_cold

ROOT = Path(__file__).parents[3]
BASE = RunConfig(version=1, target=TargetConfig(path="x"))
FLEX = replace(BASE, train=replace(BASE.train, attention="flex"))
ENTRY = {"worker": "drafter-0 (cpu)", "seconds": 1.5, "compiles": 2, "misses": 2}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return copy_package(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that the process uses; returns its folder."""
    for name, variable in (("inductor", "TORCHINDUCTOR_CACHE_DIR"), ("triton", "TRITON_CACHE_DIR")):
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True)
        monkeypatch.setenv(variable, str(folder))
    return tmp_path / "cache"


def edit(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("# edited\n")


# -- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edited", ["README.md", "cli.py", "data/packing.py", "target/model.py", "trainer.py", "compile/gate.py"]
)
def test_edits_beside_the_traced_code_leave_a_cache_warm(package: Path, edited: str) -> None:
    before = source_hashes(package)
    edit(package / edited)
    assert source_hashes(package) == before


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        ("attention/interface.py", "attention/interface.py changed"),
        ("drafter/model.py", "drafter/model.py changed"),
        ("objective/loss.py", "objective/loss.py changed"),
        ("kernels/brand_new.py", "kernels/brand_new.py is new"),
    ],
)
def test_edits_of_traced_code_are_named(package: Path, edited: str, words: str) -> None:
    before = {"sources": source_hashes(package)}
    edit(package / edited)
    assert differences(before, {**before, "sources": source_hashes(package)} | NOTHING) == [f"sources: {words}"]


NOTHING: dict[str, Any] = dict.fromkeys(("python", "torch", "triton", "cuda", "driver")) | {
    part: {} for part in ("devices", "options", "settings")
}


def test_a_removed_kernel_is_named_and_a_crowd_is_counted(package: Path) -> None:
    before = {**NOTHING, "sources": source_hashes(package)}
    (package / "kernels" / "__init__.py").unlink()
    assert differences(before, {**NOTHING, "sources": source_hashes(package)}) == [
        "sources: kernels/__init__.py is gone"
    ]
    [words] = differences(before, {**NOTHING, "sources": {}})
    assert words.count(" is gone") == fingerprints.SHOWN
    assert words.endswith(f" and {len(before['sources']) - fingerprints.SHOWN} more")


def test_the_hashes_do_not_depend_on_the_place(package: Path) -> None:
    assert source_hashes(package) == source_hashes() == source_hashes(Path(dflash_core.__file__).parent)


# -- the other parts -------------------------------------------------------------------------------------------------


def test_what_changed_is_said_in_words() -> None:
    found = fingerprint(compile_settings(BASE), ["cpu"])
    assert differences(found, found) == []
    other = json.loads(json.dumps(found))
    other |= {"torch": "9.9.0", "cuda": "13.0", "devices": {"cuda:0": "NVIDIA H200"}}
    other["settings"]["train"]["anchors_per_batch"] = 256
    other["options"]["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"
    assert differences(found, other) == [
        f"torch {found['torch']} -> 9.9.0",
        "cuda none -> 13.0",
        f"cpu {found['devices']['cpu']} -> none",
        "cuda:0 none -> NVIDIA H200",
        "TORCHINDUCTOR_MAX_AUTOTUNE none -> 1",
        "train.anchors_per_batch 512 -> 256",
    ]


def test_a_fingerprint_is_plain_json() -> None:
    found = fingerprint(compile_settings(BASE), ["cpu", "cpu"])
    assert json.loads(json.dumps(found)) == found
    assert len(digest(found)) == 64


def test_settings_that_compiled_code_does_not_depend_on_are_left_out() -> None:
    def settings(**changes: object) -> str:
        return json.dumps(compile_settings(RunConfig(**{**vars(BASE), **changes})), sort_keys=True)

    assert settings(seed=7) == settings()
    assert settings(train=replace(BASE.train, lr=1.0, steps=3, log_every=5)) == settings()
    assert settings(target=replace(BASE.target, chat_template="t.jinja")) == settings()
    assert settings(drafter=replace(BASE.drafter, init_from="d")) == settings()
    assert settings(evaluate=replace(BASE.evaluate, anchors_per_sample=3)) == settings()
    assert settings(data=replace(BASE.data, heldout=("h.jsonl",))) != settings()
    assert settings(train=replace(BASE.train, anchors_per_batch=3)) != settings()
    assert settings(topology=replace(BASE.topology, drafters=("cpu", "cpu"))) != settings()


def test_only_variables_that_change_the_code_are_options() -> None:
    environ = {
        "TORCHINDUCTOR_CACHE_DIR": "/a",
        "TRITON_CACHE_DIR": "/b",
        "TRITON_HOME": "/c",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "HOME": "/d",
    }
    assert compile_options(environ) == {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TRITON_DEFAULT_FP_FUSION": "0"}


def test_a_cache_has_a_folder_per_set_of_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path))
    name = compile_home().relative_to(tmp_path / "compile").name
    assert name.startswith(f"py{sys.version_info[0]}.{sys.version_info[1]}-torch2.")


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_cache_is_missing_then_valid_then_stale(cache: Path) -> None:
    found = fingerprint({"tokens": 8}, ["cpu"])
    assert warmup.check(found).state == "missing" and str(cache) in str(warmup.check(found))
    record = warmup.write_record(found, [ENTRY])
    assert record["seconds"] == 1.5 and warmup.check(found).record == record
    assert str(warmup.check(found)) == "valid"
    wider = fingerprint({"tokens": 9}, ["cpu"])
    assert str(warmup.check(wider)) == "stale: tokens 8 -> 9"
    warmup.write_record(wider, [ENTRY])
    assert warmup.check(found).state == warmup.check(wider).state == "valid"


def test_stale_is_told_by_the_nearest_record(cache: Path) -> None:
    found = fingerprint({"tokens": 8}, ["cpu"])
    warmup.write_record({**found, "torch": "2.11.0", "python": "3.9"}, [ENTRY])
    warmup.write_record({**found, "torch": "2.12.0"}, [ENTRY])
    assert warmup.check(found).changes == (f"torch 2.12.0 -> {found['torch']}",)


def test_a_cache_that_lost_files_is_stale(cache: Path) -> None:
    (cache / "triton" / "kernel.cubin").write_text("x")
    (cache / "inductor" / "locks").mkdir()
    (cache / "inductor" / "locks" / "a.lock").touch()
    found = fingerprint({"tokens": 8}, ["cpu"])
    assert warmup.write_record(found, [ENTRY])["files"] == {"inductor": 0, "triton": 1}
    assert warmup.check(found).state == "valid"
    (cache / "triton" / "kernel.cubin").unlink()
    assert str(warmup.check(found)) == "stale: triton cache: 0 of 1 files are left"


@pytest.mark.parametrize("damage", ["truncate", "version", "digest", "type", "created"])
def test_a_damaged_record_does_not_count(cache: Path, damage: str) -> None:
    found = fingerprint({"tokens": 8}, ["cpu"])
    record = warmup.write_record(found, [ENTRY])
    [path] = (cache / "inductor").glob("warmup-*.json")
    damaged: dict[str, Any] = {
        "truncate": None,
        "version": {**record, "v": 1},
        "digest": {**record, "digest": "0" * 64},
        "type": [record],
        "created": {**record, "created": "today"},
    }
    path.write_text(path.read_text()[:-20] if damage == "truncate" else json.dumps(damaged[damage]))
    assert warmup.check(found).state == "missing"


# -- filling a cache -------------------------------------------------------------------------------------------------


def test_a_filled_cache_is_warm_for_the_next_process(cache: Path) -> None:
    said: list[str] = []
    with filling(FLEX, say=said.append) as first:
        assert not first.is_warm
        first.note(RehearsalEntry(worker="drafter-0 (cpu)", seconds=2.0, compiles=3))
    assert said == [f"compile cache missing: no warm-up is recorded in {cache / 'inductor'}"]
    assert first.record is not None and first.record["entries"][0]["worker"] == "drafter-0 (cpu)"
    with filling(FLEX, say=said.append) as second:
        assert second.is_warm and second.record == first.record
    refuse_cold(FLEX)
    assert len(said) == 1


def test_a_failed_filling_leaves_no_record(cache: Path) -> None:
    with pytest.raises(RuntimeError), filling(FLEX, say=lambda text: None):
        raise RuntimeError("a worker failed")
    with pytest.raises(WarmupError) as refused:
        refuse_cold(FLEX)
    assert refused.value.exit_code == 10 and refused.value.why.startswith("missing: ")


def test_a_cold_cache_is_refused_in_words(cache: Path) -> None:
    with filling(FLEX, say=lambda text: None):
        pass
    with pytest.raises(WarmupError) as refused:
        refuse_cold(replace(FLEX, data=replace(FLEX.data, tokens_per_batch=4096)))
    assert refused.value.why == "stale: tokens_per_batch 8192 -> 4096"
    refuse_cold(BASE)  # compiles nothing, so it is never cold


def test_only_what_can_compile_is_rehearsed() -> None:
    assert not needs_rehearsal(BASE)
    assert needs_rehearsal(replace(BASE, topology=replace(BASE.topology, drafters=("cuda:0",))))
    assert needs_rehearsal(FLEX)


HOLDER = """
import sys, time
from dflash_core.compile.warmup import alone
with alone():
    print("inside", flush=True)
    time.sleep(60)
"""


def test_processes_fill_a_cache_one_after_the_other_and_a_killed_one_frees_it(cache: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=environ, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "inside\n"
        waited_for: list[str] = []
        entered = threading.Event()

        def wait() -> None:
            with warmup.alone(on_wait=waited_for.append):
                entered.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(3 * warmup.LOCK_POLL_S)
        assert not entered.is_set() and waited_for == [str(holder.pid)]
        holder.send_signal(signal.SIGKILL)
        assert entered.wait(10)
        waiter.join()


def test_who_waits_can_be_called_off(cache: Path) -> None:
    class CalledOff(Exception):
        pass

    def poll() -> None:
        raise CalledOff

    with warmup.alone(), pytest.raises(CalledOff), warmup.alone(poll=poll):
        raise AssertionError("two are inside")
