"""When a warm-up still counts: versions, devices, settings, and only those sources that are traced or are kernels."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import dflash_core
from dflash_core.compile import warmup
from dflash_core.config import RunConfig, TargetConfig
from dflash_core.warm_up import compile_settings, needs_rehearsal


@pytest.fixture
def package(tmp_path: Path) -> Path:
    source = Path(dflash_core.__file__).parent
    return Path(shutil.copytree(source, tmp_path / "dflash_core", ignore=shutil.ignore_patterns("__pycache__")))


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("# edited\n")


@pytest.mark.parametrize("edited", ["cli.py", "data/packing.py", "target/model.py", "trainer.py", "evaluate.py"])
def test_edits_beside_the_traced_code_leave_a_cache_warm(package: Path, edited: str) -> None:
    before = warmup.source_hash(package)
    append(package / edited)
    (package / "README.md").write_text("new")
    assert warmup.source_hash(package) == before


@pytest.mark.parametrize(
    "edited", ["attention/interface.py", "drafter/model.py", "objective/loss.py", "compile/gate.py"]
)
def test_edits_of_traced_code_make_it_stale(package: Path, edited: str) -> None:
    before = warmup.source_hash(package)
    append(package / edited)
    assert warmup.source_hash(package) != before


def test_the_hash_does_not_depend_on_the_place(package: Path) -> None:
    assert warmup.source_hash(package) == warmup.source_hash()


def test_a_record_is_found_by_its_whole_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = warmup.fingerprint({"tokens": 8}, ["cpu"])
    assert {"python", "torch", "triton", "cuda", "driver", "devices", "settings", "sources"} <= found.keys()
    assert warmup.read_record(found) is None
    record = warmup.write_record(found, [{"worker": "drafter-0 (cpu)", "seconds": 1.5, "compiles": 2}])
    assert warmup.read_record(found) == record and record["seconds"] == 1.5
    for other in ({**found, "torch": "9"}, warmup.fingerprint({"tokens": 9}, ["cpu"])):
        assert warmup.read_record(other) is None
    [path] = tmp_path.glob("warmup-*.json")
    path.write_text(path.read_text()[:-20])
    assert warmup.read_record(found) is None


def test_settings_that_compiled_code_does_not_depend_on_are_left_out() -> None:
    def settings(**changes: object) -> str:
        config = RunConfig(version=1, target=TargetConfig(path="x"))
        return json.dumps(compile_settings(RunConfig(**{**vars(config), **changes})), sort_keys=True)

    base = RunConfig(version=1, target=TargetConfig(path="x"))
    assert settings(seed=7) == settings()
    assert settings(train=replace(base.train, lr=1.0, steps=3, log_every=5)) == settings()
    assert settings(train=replace(base.train, anchors_per_batch=3)) != settings()
    assert settings(topology=replace(base.topology, drafters=("cpu", "cpu"))) != settings()


def test_only_what_can_compile_is_rehearsed() -> None:
    base = RunConfig(version=1, target=TargetConfig(path="x"))
    assert not needs_rehearsal(base)
    assert needs_rehearsal(replace(base, topology=replace(base.topology, drafters=("cuda:0",))))
    assert needs_rehearsal(replace(base, train=replace(base.train, attention="flex")))
