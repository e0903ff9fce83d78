"""Which caches are meant, what they are worth, and what a manifest may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cache_target import FINGERPRINT, STORE, CacheTarget, record_of

from orchestrator.compile_cache import archive, removal
from orchestrator.compile_cache.status import CacheStatus, refuse_other_places, rows, sentence
from orchestrator.environment.caches import CacheRecord, Installed, gone
from orchestrator.errors import PreflightError, TransferError, UsageError

NOW = 1_000_000.0
OLD_STORE = "py3.12-torch2.10.0-triton3.5.0"


def record(age: float, **parts: Any) -> dict[str, Any]:
    """A record as a target tells it."""
    found = record_of(NOW - age, **parts)
    return {key: found[key] for key in ("digest", "created", "seconds", "fingerprint")} | {"entries": 1}


def store(name: str, *records: dict[str, Any]) -> dict[str, Any]:
    path = f"/opt/dfo/shared/cache/compile/{name}"
    return {"name": name, "path": path, "bytes": 1_500_000_000, "files": 900, "records": list(records)}


def status(*stores: dict[str, Any], **answer: Any) -> CacheStatus:
    """A target whose current release runs on FINGERPRINT."""
    valid = record(60.0)
    core = {
        "state": "valid", "changes": [], "compiles": True, "digest": valid["digest"], "fingerprint": FINGERPRINT,
        "folder": f"/opt/dfo/shared/cache/compile/{STORE}/inductor", "records": {valid["digest"]: []},
    } | answer  # fmt: skip
    facts = {"release": "20261130-1612-9f3c1a", "answer": core, "complaint": "", "stores": list(stores), "time": NOW}
    return CacheStatus.model_validate(facts)


INSTALLED = Installed(
    versions={name: FINGERPRINT[name] for name in ("python", "torch", "triton", "cuda")},
    gpus=frozenset({"NVIDIA H200"}),
)


# -- what a record is worth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, []),
        ({"settings": {"tokens_per_batch": 1}, "sources": {}}, []),
        ({"torch": "2.10.0"}, ["torch 2.10.0 -> 2.11.0"]),
        ({"driver": "570.1", "cuda": None}, ["cuda none -> 13.0"]),
        ({"devices": {"cuda:0": "NVIDIA B200", "cpu": "x86_64"}}, ["GPU NVIDIA B200 -> NVIDIA H200"]),
        ({"devices": {"cuda:0": "NVIDIA B200", "cuda:1": "NVIDIA H200"}}, []),
        ({"devices": "nonsense", "torch": ["x"]}, ["torch ['x'] -> 2.11.0"]),
    ],
)
def test_only_what_is_installed_makes_a_cache_useless(parts: dict[str, Any], words: list[str]) -> None:
    assert gone(CacheRecord(**record(0.0, **parts)), INSTALLED) == words


def test_a_run_on_cpus_says_nothing_about_gpus() -> None:
    on_cpus = {**FINGERPRINT, "devices": {"cpu": "x86_64"}}
    found = status(store(STORE, record(60.0, devices={"cuda:0": "NVIDIA B200"})), fingerprint=on_cpus)
    assert rows(found)[0][-1] == "unknown" and removal.choose(found, stale=True) == []


def test_each_record_is_valid_stale_or_useless_with_the_reason() -> None:
    valid, narrow, old = record(60.0), record(90000.0, settings={"tokens_per_batch": 1}), record(9e5, torch="2.10.0")
    found = status(
        store(OLD_STORE, old), store(STORE, narrow, valid),
        records={valid["digest"]: [], narrow["digest"]: ["tokens_per_batch 1 -> 8192"]},
    )  # fmt: skip
    assert [line[-1] for line in rows(found)] == [
        "useless: torch 2.10.0 -> 2.11.0",
        "valid",
        "stale: tokens_per_batch 1 -> 8192",
    ]
    assert [line[0] for line in rows(found)] == [OLD_STORE, STORE, ""] and rows(found)[1][1] == "1.5 GB"
    told = found.as_dict()
    assert told["live"] == STORE
    assert [r["state"] for s in told["stores"] for r in s["records"]] == ["useless", "stale", "valid"]  # type: ignore[attr-defined]


def test_a_valid_record_whose_files_are_gone_is_stale() -> None:
    lost = "triton cache: 0 of 9 files are left"
    found = status(store(STORE, record(60.0)), state="stale", changes=[lost])
    assert rows(found)[0][-1] == f"stale: {lost}" and lost in sentence(found)


def test_the_sentence_says_what_the_next_launch_finds() -> None:
    assert sentence(status()) == "the next launch is warm"
    assert sentence(status(state="missing")) == "the next launch is cold"
    assert sentence(status(compiles=False)) == "the run configuration compiles nothing"
    broken = status().model_copy(update={"answer": None, "complaint": "Traceback\nNameError: x"})
    assert sentence(broken).endswith("NameError: x")
    assert sentence(broken.model_copy(update={"release": None})).startswith("nothing is deployed")


def test_a_moved_cache_is_its_owners(tmp_path: Path) -> None:
    lab = CacheTarget(tmp_path / "t", tmp_path / "p").target
    refuse_other_places(lab)
    moved = type(lab)(**{**vars(lab), "env": {"TRITON_CACHE_DIR": "/fast"}})
    with pytest.raises(PreflightError) as elsewhere:
        refuse_other_places(moved)
    assert elsewhere.value.kind == "cache_elsewhere" and "TRITON_CACHE_DIR" in elsewhere.value.why


# -- which caches a prune means --------------------------------------------------------------------------------------


def names(doomed: list[removal.Doomed]) -> list[str]:
    return [one.store.name for one in doomed]


def test_nothing_is_removed_without_being_named() -> None:
    with pytest.raises(UsageError) as refused:
        removal.choose(status(store(STORE, record(60.0))))
    assert refused.value.kind == "usage" and "--stale" in refused.value.fix


def test_stale_means_of_no_use_with_what_is_installed() -> None:
    old, mixed = store(OLD_STORE, record(9e5, torch="2.10.0")), store("mixed", record(9e5, torch="2.10.0"), record(1.0))
    found = status(old, mixed, store(STORE, record(5.0, settings={})), store("bare"))
    assert names(removal.choose(found, stale=True)) == [OLD_STORE]
    with pytest.raises(UsageError):
        removal.choose(found.model_copy(update={"answer": None}), stale=True)


def test_keep_counts_from_the_last_filled() -> None:
    found = status(store("b", record(50.0)), store("a", record(500.0), record(5.0, settings={})), store("bare"))
    assert names(removal.choose(found, keep=1)) == ["bare", "b"]
    assert names(removal.choose(found, keep=9)) == []
    assert names(removal.choose(found, keep=0)) == ["bare", "b", "a"]


def test_a_digest_names_the_cache_that_holds_it() -> None:
    old, new = record(9e5, torch="2.10.0"), record(5.0)
    found = status(store(OLD_STORE, old), store(STORE, new))
    assert names(removal.choose(found, digests=[old["digest"][:6].upper(), old["digest"]])) == [OLD_STORE]
    for digits in ("", "zz", "-"):
        with pytest.raises(UsageError) as unknown:
            removal.choose(found, digests=[digits])
        assert unknown.value.kind == "unknown_cache"


# -- manifests -------------------------------------------------------------------------------------------------------


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "schema": "dfo-cache/1", "archive": "x.tar.gz", "sha256": "a" * 64, "bytes": 3, "unpacked": 5, "files": 1,
        "store": STORE, "path": "/opt", "target": "lab", "saved": "2026-11-30T12:00:00+00:00", "records": [record(1.0)],
    } | changes  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    body = manifest(**changes)
    path = folder / f"{Path(str(body['archive'])).name.removesuffix('.tar.gz')}.json"
    path.write_text(json.dumps(body))
    path.with_name(path.stem + ".tar.gz").write_bytes(b"abc")
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "dfo-cache/9"},
        {"archive": "../x.tar.gz"},
        {"archive": "/x.tar.gz"},
        {"archive": "x.zip"},
        {"store": "../../etc"},
        {"store": "a/b"},
        {"store": ""},
        {"sha256": "A" * 64},
        {"bytes": -1},
        {"files": 10**9},
        {"unpacked": 10**15},
        {"unpacked": "5"},
        {"records": [{"digest": "x"}]},
        {"extra": 1},
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(manifest(**changes)))
    with pytest.raises(UsageError) as refused:
        archive.read_manifest(path)
    assert refused.value.kind == "archive_invalid"
    assert list(archive.saved_in(tmp_path)) == []


@pytest.mark.parametrize("text", ["", "[", "[]", "null", '{"schema": "dfo-cache/1"}', "[" * 100_000])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError):
        archive.read_manifest(tmp_path / "x.json")


def test_a_saved_cache_is_found_by_path_or_digits(tmp_path: Path) -> None:
    older = write(tmp_path, archive="a.tar.gz", saved="2026-01-01")
    newer = write(tmp_path, archive="b.tar.gz", saved="2026-02-01")
    digits = record(1.0)["digest"][:8]
    assert archive.choose(digits, tmp_path)[0].name == "b.tar.gz", "the one saved last"
    for word in (older, older.with_name("a.tar.gz")):
        path, found = archive.choose(str(word), tmp_path / "nowhere")
        assert (path.name, found.archive) == ("a.tar.gz", "a.tar.gz")
    newer.with_name("b.tar.gz").unlink()
    assert [path.name for path, _ in archive.saved_in(tmp_path)] == ["a.tar.gz"], "without its archive it is none"
    for word in ("ffffffff", "/nowhere/x.tar.gz"):
        with pytest.raises(UsageError):
            archive.choose(word, tmp_path)


def test_size_and_hash_decide_whether_an_archive_is_what_was_saved(tmp_path: Path) -> None:
    path = write(tmp_path, sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")  # of "abc"
    whole = tmp_path / "x.tar.gz"
    archive.verify(whole, archive.read_manifest(path))
    for body in (b"abd", b"ab", b"abcd"):
        whole.write_bytes(body)
        with pytest.raises(TransferError):
            archive.verify(whole, archive.read_manifest(path))
