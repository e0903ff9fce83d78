"""Snapshots of a real interpreter, and drift on recorded ones."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.cache_target import CacheTarget, record_of

from orchestrator.environment import drift, requirements_lock, snapshot
from orchestrator.environment.caches import CacheRecord
from orchestrator.environment.drift import Severity
from orchestrator.environment.snapshot import Snapshot
from orchestrator.errors import PreflightError, UsageError
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

RECORDED = Path(__file__).parents[2] / "data" / "snapshots"


def recorded(name: str) -> Snapshot:
    return snapshot.load(RECORDED / f"{name}.json")


def session(python: str, root: Path) -> Session:
    return Session("lab", LocalTransport(), str(root), python)


def find(findings: list[drift.Finding], what: str) -> drift.Finding:
    return next(f for f in findings if f.what == what)


def without(snap: Snapshot, package: str) -> Snapshot:
    return snap.model_copy(update={"packages": [p for p in snap.packages if p.name != package]})


def with_version(snap: Snapshot, package: str, version: str) -> Snapshot:
    packages = [p.model_copy(update={"version": version}) if p.name == package else p for p in snap.packages]
    return snap.model_copy(update={"packages": packages})


def torch_with(snap: Snapshot, **facts: object) -> Snapshot:
    assert snap.torch is not None
    return snap.model_copy(update={"torch": snap.torch.model_copy(update=facts)})


def test_a_snapshot_of_this_interpreter_is_true(tmp_path: Path) -> None:
    taken = snapshot.take(session(sys.executable, tmp_path))
    assert taken.python.version == ".".join(map(str, sys.version_info[:3]))
    assert taken.torch is not None
    assert (
        taken.torch.version
        == subprocess.check_output([sys.executable, "-c", "import torch; print(torch.__version__)"], text=True).strip()
    )
    assert taken.version_of("pytest") == pytest.__version__
    assert taken.memory.total > 2**30
    assert taken.disk.free > 0
    assert not taken.caches.inductor.exists


def test_the_library_is_what_the_loader_finds_and_not_what_the_kernel_module_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade of the node nvidia-smi says nothing, and the file is all there is."""
    (tmp_path / "libcuda.so.570.86.15").touch()
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.570.86.15")
    ldconfig = tmp_path / "ldconfig"
    ldconfig.write_text(f"#!/bin/sh\nprintf '\\tlibcuda.so.1 (libc6,x86-64) => {tmp_path}/libcuda.so.1\\n'\n")
    ldconfig.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert snapshot.take(session(sys.executable, tmp_path)).driver.library == "570.86.15"


def test_caches_are_measured_and_their_records_kept(tmp_path: Path) -> None:
    lab = CacheTarget(tmp_path, tmp_path / "project")
    old, new = lab.fill("py3.12-torch2.10.0", age=900.0, torch="2.10.0"), lab.fill()
    (lab.store() / "inductor" / "warmup-0123456789abcdef.json").write_text('{"digest": "damaged"}')
    caches = snapshot.take(session(sys.executable, tmp_path)).caches
    assert [record.digest for record in caches.records] == [old["digest"], new["digest"]]
    assert caches.records[1].fingerprint == new["fingerprint"] and caches.records[1].entries == 1
    assert caches.warmup_fingerprint == new["digest"]
    assert caches.inductor.path == str(lab.store() / "inductor") and caches.inductor.files == 4
    assert caches.triton.bytes == 504


def test_an_environment_without_torch_is_said_not_hidden(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    taken = snapshot.take(session(str(tmp_path / "bare/bin/python"), tmp_path))
    assert taken.torch is None
    assert [f.what for f in drift.faults(taken)] == ["torch"]


def test_a_torch_that_does_not_import_is_captured_with_its_reason(tmp_path: Path) -> None:
    venv.create(tmp_path / "broken", with_pip=False)
    site = next((tmp_path / "broken").glob("lib/python*/site-packages"))
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("import ctypes\nctypes.CDLL('libcudnn.so.9')\n")
    taken = snapshot.take(session(str(tmp_path / "broken/bin/python"), tmp_path))
    fault = find(list(drift.faults(taken)), "torch import")
    assert "libcudnn.so.9: cannot open shared object file" in str(fault.after)
    assert fault.severity is Severity.BROKEN
    assert fault.consequence.startswith("libcudnn.so.9 is missing: install nvidia-cudnn-cu")


def test_save_and_load_are_inverse_and_the_schema_has_a_version(tmp_path: Path) -> None:
    before = recorded("clean")
    digest = snapshot.save(before, tmp_path / "deep" / "s.json")
    assert snapshot.load(tmp_path / "deep" / "s.json") == before
    assert json.loads((tmp_path / "deep" / "s.json").read_text())["schema"] == "dfo-environment/1"
    assert len(digest) == 64


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "not a JSON object"),
        ('{"schema": "dfo-environment/9"}', "dfo-environment/9"),
        ('{"schema": "dfo-environment/1", "target": 3}', "target"),
    ],
)
def test_a_damaged_snapshot_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        snapshot.load(path)
    assert caught.value.kind == "snapshot_invalid"
    assert str(path) in caught.value.what
    assert why in caught.value.why


def test_the_same_environment_has_no_difference() -> None:
    assert drift.differences(recorded("clean"), recorded("clean")) == []


def test_a_serving_stack_beside_the_trainer_is_recognised() -> None:
    found = drift.differences(recorded("clean"), recorded("serving-beside-trainer"))
    assert found[0].what == "mixed CUDA wheels"
    assert found[0].severity is Severity.BROKEN
    for name in ("sglang", "flashinfer-python"):
        assert find(found, name).severity is Severity.RISK
        assert "serving package appeared beside the trainer" in find(found, name).consequence
    assert find(found, "tqdm").severity is Severity.NOTE
    assert [f.severity for f in found] == sorted((f.severity for f in found), reverse=True)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_changed_compiler_makes_the_cache_useless(package: str) -> None:
    found = drift.differences(recorded("clean"), with_version(recorded("clean"), package, "2.99.0"))
    assert found[0].what == package
    assert found[0].severity is Severity.COLD
    assert "compile cache will not be reused" in found[0].consequence


def test_a_removed_dependency_of_the_trainer_is_broken_not_a_note() -> None:
    found = drift.differences(recorded("clean"), without(recorded("clean"), "safetensors"))
    assert find(found, "safetensors").severity is Severity.BROKEN
    assert find(found, "safetensors").change.endswith("-> gone")


def test_a_host_upgrade_shows_as_two_driver_versions() -> None:
    now = recorded("clean").model_copy(update={"driver": snapshot.Driver(kernel_module="580.95", library="570.86")})
    fault = find(drift.differences(recorded("clean"), now), "driver")
    assert fault.severity is Severity.BROKEN
    assert fault.after == "kernel module 580.95, library 570.86"


def test_a_cpu_build_beside_a_gpu_is_broken() -> None:
    now = recorded("clean").model_copy(update={"gpus": [{"name": "NVIDIA H200", "index": "0"}]})
    fault = find(drift.differences(recorded("clean"), now), "GPUs")
    assert fault.severity is Severity.BROKEN
    assert "CPU build" in str(fault.after)


def test_a_real_gpu_machine_has_no_fault() -> None:
    """Recorded on an H200 with torch 2.11.0+cu130."""
    assert list(drift.faults(recorded("one-h200"))) == []
    assert "1 x NVIDIA H200, driver 580" in snapshot.summary(recorded("one-h200"))[1]


def test_a_foreign_cudnn_that_stops_torch_is_named() -> None:
    """The same machine with torch's own cuDNN wheel moved away: the system's older one is found instead."""
    found = drift.differences(recorded("one-h200"), recorded("one-h200-other-cudnn"))
    assert [(f.what, f.severity) for f in found] == [("torch import", Severity.BROKEN)]
    assert "reinstall nvidia-cudnn-cu13" in found[0].consequence


def test_moving_from_cpu_to_gpu_build_is_a_cold_cache() -> None:
    found = drift.differences(recorded("clean"), recorded("one-h200"))
    assert {"GPUs", "torch", "torch CUDA", "python"} <= {f.what for f in found if f.severity is Severity.COLD}


def test_another_build_of_the_same_version_is_seen() -> None:
    found = drift.differences(recorded("clean"), torch_with(recorded("clean"), git_version="other"))
    assert [f.what for f in found] == ["torch build"]


def test_a_cache_on_a_network_file_system_is_a_risk() -> None:
    caches = recorded("clean").caches.model_copy(update={"file_system": "nfs4"})
    found = list(drift.faults(recorded("clean").model_copy(update={"caches": caches})))
    assert [f.what for f in found] == ["cache file system"]


def made_with(snap: Snapshot, age: float = 0.0, **parts: object) -> CacheRecord:
    """A warm-up in the environment of `snap`."""
    devices = {f"cuda:{gpu['index']}": gpu["name"] for gpu in snap.gpus}
    found = record_of(1000.0 - age, **{**snap.installed.versions, "devices": devices, **parts})
    kept = {key: found[key] for key in ("digest", "created", "seconds", "fingerprint")}
    return CacheRecord(**kept, entries=1)


def caching(snap: Snapshot, *records: CacheRecord) -> Snapshot:
    return snap.model_copy(update={"caches": snap.caches.model_copy(update={"records": list(records)})})


def test_a_cache_that_became_useless_is_named_with_the_reason() -> None:
    snap = recorded("one-h200")
    record = made_with(snap)
    before = caching(snap, record)
    after = with_version(torch_with(before, cuda="12.8"), "torch", "2.99.0")
    finding = find(drift.differences(before, after), f"cache {record.name}")
    assert finding.severity is Severity.COLD
    torch = snap.version_of("torch")
    assert finding.after == f"useless: torch {torch} -> 2.99.0; cuda 13.0 -> 12.8"
    other = snap.model_copy(update={"gpus": [{**snap.gpus[0], "name": "NVIDIA B200"}]})
    finding = find(drift.differences(before, caching(other, record)), f"cache {record.name}")
    assert finding.after == "useless: GPU NVIDIA H200 -> NVIDIA B200"


def test_a_lost_cache_is_named_and_one_more_is_no_difference() -> None:
    snap = recorded("one-h200")
    record = made_with(snap)
    [lost] = drift.differences(caching(snap, record), snap)
    assert (lost.what, lost.change) == (
        f"cache {record.name}",
        "warm -> gone",
    ) and "dfo cache restore" in lost.consequence
    assert drift.differences(snap, caching(snap, record)) == []
    useless = made_with(snap, torch="1.0")
    assert drift.differences(caching(snap, useless), snap) == [], "it was of no use before"


def test_a_saved_cache_is_compared_with_what_is_installed() -> None:
    snap = recorded("one-h200")
    assert list(drift.useless_archives([made_with(snap)], snap)) == []
    [found] = drift.useless_archives([made_with(snap, triton="1.0")], snap)
    assert found.what.startswith("saved cache ") and "triton 1.0 -> " in str(found.after)


def answering(root: Path, answer: dict[str, object]) -> Session:
    """A session whose interpreter is a script: it reads its program and request, and answers with `answer`."""
    script = root / "python"
    record = json.dumps({"t": "done", "result": answer})
    script.write_text(f"#!/bin/sh\ncat >/dev/null\nprintf '\\036%s\\n' '{record}'\n")
    script.chmod(0o755)
    return session(str(script), root)


def test_hostile_facts_are_refused(tmp_path: Path) -> None:
    facts = recorded("clean").as_dict()
    for key in ("schema", "target", "taken"):
        facts.pop(key)
    with pytest.raises(PreflightError, match="not readable"):
        snapshot.take(answering(tmp_path, {**facts, "memory": {"total": "much", "limit": None}}))
    assert snapshot.take(answering(tmp_path, facts)).version_of("torch") == recorded("clean").version_of("torch")


def test_a_lock_has_a_hash_for_each_pin_and_a_plan_back(tmp_path: Path) -> None:
    good = recorded("clean")
    answer = {
        "found": [["tqdm", "4.70.1", ["a" * 64]], ["PyYAML", "6.0", ["b" * 64]], ["numpy", "2", ["not a hash"]]],
        "missing": [],
    }
    lock = requirements_lock.make_lock(
        answering(tmp_path, answer), good, recorded("serving-beside-trainer"), tmp_path / "back.txt"
    )
    assert f"tqdm=={good.version_of('tqdm')} \\\n    --hash=sha256:{'a' * 64}\n" in lock.text
    assert "pyyaml==" in lock.text
    assert not any(line.startswith("numpy==") for line in lock.text.splitlines())
    assert lock.num_locked == 2
    assert "uninstall --yes flashinfer-python" in lock.plan[0]
    assert "sglang" in lock.plan[0]
    assert lock.plan[1].endswith("--require-hashes -r back.txt")


def test_a_broken_environment_is_not_locked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not one to return to"):
        requirements_lock.make_lock(
            session(sys.executable, tmp_path), recorded("serving-beside-trainer"), recorded("clean"), tmp_path / "x"
        )
