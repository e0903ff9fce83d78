"""Compile caches between a target and this machine: equal archives, honest hashes, and nothing lost or left behind."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cache_target import STORE, CacheTarget
from support.json_keys import check_keys
from support.package_copy import copy_package

from orchestrator.compile_cache import removal, status
from orchestrator.compile_cache.archive import Manifest
from orchestrator.compile_cache.transfer import Restored, Saved, restore, save
from orchestrator.errors import DfoError, LockError, PreflightError, TransferError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lab(tmp_path: Path) -> CacheTarget:
    made = CacheTarget(tmp_path / "target", tmp_path / "project")
    (made.root / "releases").mkdir(parents=True)
    return made


def saved(lab: CacheTarget) -> Saved:
    return save(lab.session, STORE, lab.project / "saved")


def put_back(lab: CacheTarget, what: Saved, **options: Any) -> Restored:
    return restore(lab.session, lab.target, what.archive, what.manifest, **options)


def audited(lab: CacheTarget) -> list[dict[str, Any]]:
    path = lab.root / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- save ------------------------------------------------------------------------------------------------------------


def test_a_saved_cache_comes_back_as_it_was(lab: CacheTarget) -> None:
    record = lab.fill()
    before = lab.tree()
    done = saved(lab)
    assert done.fresh and done.archive.name.startswith(f"{STORE}-{record['digest'][:12]}-")
    assert hashlib.sha256(done.archive.read_bytes()).hexdigest() == done.manifest.sha256
    assert done.manifest.unpacked == sum(len(body) for body, _ in before.values())
    assert [found.digest for found in done.manifest.records] == [record["digest"]]
    shutil.rmtree(lab.root / "shared")
    back = put_back(lab, done)
    assert (back.path, back.there, back.aside, back.moved) == (str(lab.store()), False, None, False)
    assert lab.tree() == before
    assert [line["event"] for line in audited(lab)] == ["cache_restore"]
    assert put_back(lab, done).there, "the second time there is nothing to do"


def test_equal_caches_give_equal_archives(lab: CacheTarget, tmp_path: Path) -> None:
    lab.fill()
    first = saved(lab)
    other = CacheTarget(tmp_path / "elsewhere", lab.project)
    shutil.copytree(lab.store(), other.store())  # other times, another order of creation
    for path in other.store().rglob("*"):
        os.utime(path, (1, 1))
    second = save(other.session, STORE, tmp_path / "other")
    assert second.archive.read_bytes() == first.archive.read_bytes()
    again = saved(lab)
    assert not again.fresh and again.archive == first.archive


def test_locks_links_and_unfinished_files_stay_where_they_are(lab: CacheTarget) -> None:
    lab.fill()
    expected = lab.tree()
    store = lab.store()
    (store / "inductor" / "locks").mkdir()
    for name in ("locks/a.lock", "warmup.lock", ".half.partial", "x.tmp", "y.tmp.123"):
        (store / "inductor" / name).touch()
    (store / "triton" / "link").symlink_to("/etc/passwd")
    os.mkfifo(store / "triton" / "pipe")
    done = saved(lab)
    assert done.left_out == ("link", "pipe")
    shutil.rmtree(lab.root / "shared")
    put_back(lab, done)
    assert lab.tree() == expected


def test_a_cache_that_is_being_filled_is_not_saved(lab: CacheTarget) -> None:
    lab.fill()
    with (lab.store() / "inductor" / "warmup.lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PreflightError) as busy:
            saved(lab)
    assert busy.value.kind == "cache_busy" and "4711" in busy.value.why
    assert not list((lab.project / "saved").iterdir())


def test_what_is_not_there_cannot_be_saved(lab: CacheTarget) -> None:
    with pytest.raises(UsageError) as unknown:
        saved(lab)
    assert unknown.value.kind == "unknown_cache"


# -- restore: an archive is input from outside -----------------------------------------------------------------------


def forged(lab: CacheTarget, *members: tuple[tarfile.TarInfo, bytes], **lies: Any) -> Saved:
    """An archive of these members with a manifest that fits it, but for `lies`."""
    folder = lab.project / "forged"
    folder.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member, body in members:
            tar.addfile(member, io.BytesIO(body))
    path = folder / f"{STORE}-x.tar.gz"
    path.write_bytes(packed.getvalue())
    facts: dict[str, Any] = {
        "archive": path.name,
        "sha256": hashlib.sha256(packed.getvalue()).hexdigest(),
        "bytes": len(packed.getvalue()),
        "unpacked": sum(len(body) for _, body in members),
        "files": len(members),
        "store": STORE,
        "path": str(lab.store()),
        "target": "lab",
        "saved": "2026-11-30T12:00:00+00:00",
        "records": [],
    }
    manifest = Manifest(**{**facts, **lies})
    return Saved(archive=path, manifest=manifest, fresh=True, left_out=())


def member(
    name: str, body: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = (len(body) if kind == tarfile.REGTYPE else 0), kind, link
    return info, body if kind == tarfile.REGTYPE else b""


HOSTILE = {
    "outside": [member("../../escaped")],
    "absolute": [member("/tmp/escaped")],
    "inner dots": [member("inductor/../../escaped")],
    "other part": [member("releases/escaped")],
    "symlink": [member("inductor/link", kind=tarfile.SYMTYPE, link="/etc")],
    "through a link": [member("inductor/l", kind=tarfile.SYMTYPE, link="/tmp"), member("inductor/l/escaped")],
    "hard link": [member("triton/hard", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "device": [member("triton/null", kind=tarfile.CHRTYPE)],
    "pipe": [member("triton/pipe", kind=tarfile.FIFOTYPE)],
    "folder": [member("inductor", kind=tarfile.DIRTYPE)],
    "twice": [member("inductor/a"), member("inductor/a")],
    "a file as a folder": [member("inductor/a"), member("inductor/a/b")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_changes_nothing(lab: CacheTarget, case: str) -> None:
    what = forged(lab, *HOSTILE[case])
    with pytest.raises(DfoError) as refused:
        put_back(lab, what)
    assert refused.value.kind == "damaged"
    assert not lab.store().exists() and not list(lab.store().parent.iterdir())
    assert not list(lab.root.rglob("*escaped*")) and not Path("/tmp/escaped").exists()


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"files": 1}, "more than the announced"),
        ({"unpacked": 1}, "more than the announced"),
        ({"files": 3}, "3 with"),
        ({"unpacked": 10**6}, "1000000 announced"),
        ({"records": "one"}, "not those that were announced"),
    ],
)
def test_an_archive_must_be_what_its_manifest_says(lab: CacheTarget, lie: dict[str, Any], words: str) -> None:
    if "records" in lie:
        record = {"digest": "a" * 64, "created": 1.0, "seconds": 1.0, "entries": 1, "fingerprint": {}}
        lie = {"records": [record]}
    what = forged(lab, member("inductor/a", b"aa"), member("triton/b", b"bb"), **lie)
    with pytest.raises(TransferError) as damaged:
        put_back(lab, what)
    assert damaged.value.kind == "damaged" and words in damaged.value.why
    assert not lab.store().exists()


def test_no_member_can_ask_for_memory(lab: CacheTarget) -> None:
    """A header that claims a name of 64 MB would be read at once."""
    info = tarfile.TarInfo("inductor/" + "n" * (64 << 20))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.GNU_FORMAT, compresslevel=1) as tar:
        tar.addfile(info)
    what = forged(lab)
    what.archive.write_bytes(packed.getvalue())
    facts = {"sha256": hashlib.sha256(packed.getvalue()).hexdigest(), "bytes": len(packed.getvalue()), "files": 1}
    with pytest.raises(TransferError) as damaged:
        put_back(
            lab, Saved(archive=what.archive, manifest=what.manifest.model_copy(update=facts), fresh=True, left_out=())
        )
    assert "at once" in damaged.value.why


def test_a_damaged_archive_is_found_before_it_is_sent(lab: CacheTarget) -> None:
    lab.fill()
    done = saved(lab)
    body = bytearray(done.archive.read_bytes())
    body[len(body) // 2] ^= 1
    done.archive.write_bytes(body)
    with pytest.raises(TransferError) as damaged:
        put_back(lab, done)
    assert damaged.value.kind == "damaged" and "nothing was sent" in damaged.value.fix
    done.archive.write_bytes(body[:-10])
    with pytest.raises(TransferError):
        put_back(lab, done)


@pytest.mark.parametrize(
    ("change", "kind"), [(lambda body: body[:-7], "truncated"), (lambda body: body[:-1] + b"?", "damaged")]
)
def test_what_breaks_on_the_way_is_found_there(lab: CacheTarget, change: Callable[[bytes], bytes], kind: str) -> None:
    lab.fill()
    done = saved(lab)
    shutil.rmtree(lab.root / "shared")
    about = done.manifest
    request = {
        "owner": {"user": "a", "host": "b", "pid": 1, "command": "dfo cache restore", "target": "lab"},
        "wait_s": 0.0, "store": STORE, "sha256": about.sha256, "bytes": about.bytes, "unpacked": about.unpacked,
        "files": about.files, "digests": [], "replace": False, "environment": {},
    }  # fmt: skip
    with pytest.raises(TransferError) as broken:
        lab.session.call("cache_restore", request, payload=[change(done.archive.read_bytes())])
    assert broken.value.kind == kind
    assert not list(lab.store().parent.iterdir()), "nothing is left behind"


def test_a_garbled_gzip_with_the_right_hash_is_damaged(lab: CacheTarget) -> None:
    what = forged(lab, member("inductor/a"))
    body = gzip.compress(b"no tar at all" * 100)
    for broken in (body, body[:-20], b"\x1f\x8b" + os.urandom(200), b""):
        what.archive.write_bytes(broken)
        facts = {"sha256": hashlib.sha256(broken).hexdigest(), "bytes": len(broken)}
        wrong = what.manifest.model_copy(update=facts)
        with pytest.raises(TransferError) as damaged:
            restore(lab.session, lab.target, what.archive, wrong)
        assert damaged.value.kind == "damaged"


# -- restore: what is there already ----------------------------------------------------------------------------------


def test_another_cache_is_only_replaced_when_told_and_kept_aside(lab: CacheTarget) -> None:
    lab.fill(age=3 * 86400, settings={"tokens_per_batch": 4096})
    done = saved(lab)
    shutil.rmtree(lab.store())
    lab.fill()  # newer, and for other shapes
    newer = lab.tree()
    with pytest.raises(PreflightError) as exists:
        put_back(lab, done)
    assert exists.value.kind == "cache_exists" and "--replace" in exists.value.fix and lab.tree() == newer
    back = put_back(lab, done, replace=True)
    assert back.aside is not None and back.aside.startswith(f"{STORE}-replaced-")
    assert lab.tree(back.aside) == newer
    [record] = [name for name in lab.tree() if "warmup-" in name]
    assert record.endswith(f"{done.manifest.records[0].digest[:16]}.json")


def test_a_place_where_nothing_was_compiled_yet_is_free(lab: CacheTarget) -> None:
    lab.fill()
    done, before = saved(lab), lab.tree()
    shutil.rmtree(lab.store())
    (lab.store() / "inductor" / "locks").mkdir(parents=True)
    (lab.store() / "inductor" / "warmup.lock").touch()
    assert status.fetch(lab.session, lab.target).stores == []
    assert put_back(lab, done).aside is None and lab.tree() == before


def test_a_held_lock_keeps_a_restore_out(lab: CacheTarget) -> None:
    from orchestrator.deploy import lock

    lab.fill()
    done = saved(lab)
    lock.take(lab.session, message="hands off", seconds=None)
    with pytest.raises(LockError):
        put_back(lab, done)


def test_a_restore_that_is_killed_leaves_the_old_state_and_is_swept(lab: CacheTarget) -> None:
    lab.fill()
    done = saved(lab)
    shutil.rmtree(lab.root / "shared")
    whole = done.archive.read_bytes()
    gate = lab.project / "gate"

    def slowly() -> Any:
        yield whole[: len(whole) // 2]
        gate.touch()
        time.sleep(30)

    child = os.fork()
    if child == 0:
        with lab.session.open("cache_restore", _request(done), payload=slowly()) as records:
            list(records)
        os._exit(0)
    while not gate.exists() or not list(lab.store().parent.glob(".restore-*")):
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    limit = time.monotonic() + 10
    while (lab.root / "lock").exists() and time.monotonic() < limit:
        time.sleep(0.05)  # the program sees the end of its input
    assert not lab.store().exists()
    assert put_back(lab, done).there is False
    assert sorted(path.name for path in lab.store().parent.iterdir()) == [STORE]


def _request(done: Saved) -> dict[str, Any]:
    about = done.manifest
    owner = {"user": "a", "host": "b", "pid": 1, "command": "dfo cache restore", "target": "lab"}
    sizes = {"bytes": about.bytes, "unpacked": about.unpacked, "files": about.files, "sha256": about.sha256}
    return {**sizes, "owner": owner, "wait_s": 0.0, "store": STORE, "digests": [], "replace": False, "environment": {}}


# -- prune -----------------------------------------------------------------------------------------------------------


def test_prune_removes_what_was_seen_and_nothing_else(lab: CacheTarget) -> None:
    old = lab.fill("py3.12-torch2.10.0-triton3.5.0", torch="2.10.0")
    lab.fill()
    beside = lab.root / "shared" / "cache" / "features"
    beside.mkdir()
    found = status.fetch(lab.session, lab.target)
    doomed = removal.choose(found, digests=[old["digest"][:8]])
    assert removal.remove(lab.session, lab.target, doomed) == ["py3.12-torch2.10.0-triton3.5.0"]
    assert [path.name for path in lab.store().parent.iterdir()] == [STORE] and beside.is_dir()
    assert [line["event"] for line in audited(lab)] == ["cache_prune"]
    assert removal.remove(lab.session, lab.target, doomed) == []


def test_prune_stops_when_a_warm_up_has_come_since(lab: CacheTarget) -> None:
    record = lab.fill()
    doomed = removal.choose(status.fetch(lab.session, lab.target), digests=[record["digest"]])
    lab.fill(settings={"tokens_per_batch": 1})
    with pytest.raises(TransferError) as stale:
        removal.remove(lab.session, lab.target, doomed)
    assert stale.value.kind == "plan_stale" and lab.store().is_dir()


def test_a_link_among_the_caches_is_nobodys_cache(lab: CacheTarget, tmp_path: Path) -> None:
    lab.fill()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (lab.store().parent / "py3-link").symlink_to(elsewhere)
    assert [store.name for store in status.fetch(lab.session, lab.target).stores] == [STORE]


# -- the commands ----------------------------------------------------------------------------------------------------


def dfo(lab: CacheTarget, *words: str) -> dict[str, Any]:
    """A `dfo cache` command of its own process; its JSON answer."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(lab.project / "data")}
    argv = [sys.executable, "-m", "orchestrator", "cache", *words, "-i", str(lab.inventory), "--json"]
    done = subprocess.run(argv, cwd=lab.project, env=environ, stdout=subprocess.PIPE, text=True, timeout=240)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["exit_code"] == done.returncode
    if answer["ok"]:
        check_keys(words, answer)
    return answer


def test_the_commands_from_a_full_target_to_an_empty_one_and_back(lab: CacheTarget) -> None:
    record = lab.fill()
    before, digits = lab.tree(), record["digest"][:8]
    listed = dfo(lab, "status")["result"]
    assert [found["name"] for found in listed["stores"]] == [STORE] and listed["saved"] == []
    assert listed["state"] is None, "nothing is deployed that could judge it"
    kept = dfo(lab, "save", "--digest", digits)["result"]
    assert kept["fresh"] and Path(kept["archive"]).is_relative_to(lab.project / "data" / "dfo" / "caches" / "lab")
    assert dfo(lab, "prune", "--digest", digits, "--dry-run")["result"] == {
        "target": "lab",
        "removed": [],
        "chosen": [STORE],
    }
    assert dfo(lab, "prune", "--digest", digits)["error"]["kind"] == "usage", "nobody is there to say yes"
    assert lab.tree() == before
    assert dfo(lab, "prune", "--keep", "0", "--yes")["result"]["removed"] == [STORE]
    assert [saved["archive"] for saved in dfo(lab, "status")["result"]["saved"]] == [kept["archive"]]
    assert dfo(lab, "restore", digits)["result"]["path"] == str(lab.store())
    assert lab.tree() == before
    assert dfo(lab, "prune")["error"]["kind"] == "usage"
    assert dfo(lab, "restore", "0" * 12)["error"]["kind"] == "unknown_cache"


def test_status_tells_a_person_what_there_is(lab: CacheTarget) -> None:
    lab.fill(age=7200.0)
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "cache", "status", "-i", str(lab.inventory)],
        cwd=lab.project,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(lab.project / "data")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    header, row, last = done.stdout.splitlines()
    assert header.split() == ["CACHE", "SIZE", "WARM-UP", "MADE", "TOOK", "STATE"]
    assert row.startswith(STORE) and "2 h ago" in row and row.endswith("unknown")
    assert last == "`lab`: nothing is deployed, so nothing can be said about the next launch"


# -- the whole way, with real compiled code --------------------------------------------------------------------------

PROBE = """
import torch


def smooth(x):
    return (torch.nn.functional.silu(x) * x.relu()).sum(-1)
"""
FILL = """
import json, sys, time
from dflash_core.compile.environment import compile_home, configure_main, prepare_process
prepare_process(compile_home())
import torch
from dflash_core.compile.counting import cache_misses
from dflash_core.config import load_run_config
from dflash_core.kernels.probe import smooth
from dflash_core.warmth import filling
configure_main()
begin = time.perf_counter()
with filling(load_run_config(sys.argv[1]), say=lambda text: print(text, file=sys.stderr)) as cache:
    torch.compile(smooth, dynamic=False)(torch.ones(8, 16, requires_grad=True)).sum().backward()
print(json.dumps({"state": cache.validity.state, "misses": cache_misses(), "seconds": time.perf_counter() - begin}))
"""


def deploy(lab: CacheTarget, release: str, *, like: Path | None = None) -> Path:
    """A release of the real core with one more traced file, or of the same code as `like`; it is current then."""
    folder = lab.root / "releases" / release
    if like is None:
        package = copy_package(folder)
        (package / "kernels" / "probe.py").write_text(PROBE)
    else:
        package = Path(shutil.copytree(like, folder / "dflash_core"))
    fresh = lab.root / "current.new"
    fresh.symlink_to(f"releases/{release}")
    fresh.replace(lab.root / "current")
    return package


def run_step(lab: CacheTarget, package: Path) -> dict[str, Any]:
    """What the current release's process finds in the cache."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON", "DFLASH"))}
    paths = {"PYTHONPATH": str(package.parent), "DFLASH_CACHE_DIR": str(lab.root / "shared" / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(lab.project / "run.yaml")],
        cwd=package.parent, env=clean | paths | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_new_releases_and_restored_caches_are_warm_and_a_kernel_edit_is_named(lab: CacheTarget) -> None:
    assert lab.inventory.exists()
    first = deploy(lab, "20261130-1200-aaaaaa")
    cold = run_step(lab, first)
    assert cold["state"] == "missing" and cold["misses"] > 0
    # Another release, another folder, with edits beside the traced code.
    second = deploy(lab, "20261201-0800-bbbbbb", like=first)
    for name in ("README.md", "cli.py", "data/packing.py"):
        with (second / name).open("a") as file:
            file.write("# edited\n")
    assert run_step(lab, second) | {"seconds": 0} == {"state": "valid", "misses": 0, "seconds": 0}
    assert dfo(lab, "status")["result"]["state"] == "valid"

    kept = dfo(lab, "save")["result"]
    shutil.rmtree(lab.root / "shared")
    assert dfo(lab, "status")["result"]["state"] == "missing"
    back = dfo(lab, "restore", kept["records"][0]["digest"][:8])["result"]
    assert (back["state"], back["there"], back["moved"]) == ("valid", False, False)
    warm = run_step(lab, second)
    assert (warm["state"], warm["misses"]) == ("valid", 0) and warm["seconds"] < cold["seconds"] / 2

    with (deploy(lab, "20261202-0800-cccccc", like=first) / "kernels" / "probe.py").open("a") as file:
        file.write("# edited\n")
    stale = dfo(lab, "status")["result"]
    assert (stale["state"], stale["changes"]) == ("stale", ["sources: kernels/probe.py changed"])
    assert [record["state"] for record in stale["stores"][0]["records"]] == ["stale"]
    assert dfo(lab, "prune", "--stale", "--yes")["result"]["removed"] == [], "the same torch can still use it"
