"""Copying the files of a run: what is taken, where it goes, and what a hostile or unlucky target cannot do."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.breaking import Breaking

from orchestrator.errors import DfoError, PreflightError, TransferError, UsageError
from orchestrator.inventory.models import DEFAULT_ARTEFACTS, Artefact
from orchestrator.runs.part import Entry, Part, entry_from
from orchestrator.runs.pull import Pulled, Puller
from orchestrator.runs.reconnect import Backoff
from orchestrator.runs.selection import WHAT, Layout, Selection
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Run 7 on the target, with what a run leaves."""
    folder = tmp_path / "target" / "runs" / "7"
    for path, text in {
        "run.json": "{}",
        "state.json": '{"state": "succeeded", "reason": "finished"}',
        "events.jsonl": '{"event": "run_start"}\n',
        "logs/train.log": "step 1\n",
        "logs/index.jsonl": "",
        "checkpoints/latest": "step-000120\n",
        "export/model.safetensors": "weights" * 100_000,
        "launch.sh": "#!/bin/bash\n",
        **{f"checkpoints/step-{n:06}/drafter/model.safetensors": f"weights {n}" for n in (90, 100, 110, 120)},
        "checkpoints/.step-000130.partial/model.safetensors": "half",
        "checkpoints/step-000120/.train_state.json.partial": "half",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def puller(
    run: Path, to: Path, what: str = "all", *, transport: LocalTransport | None = None, keep: int | None = None
) -> Puller:
    artefacts = [Artefact(remote="runs/{run}/checkpoints", local="x", keep=keep)]
    session = Session("lab", transport or LocalTransport(), str(run.parent.parent), sys.executable)
    return Puller(
        session=session,
        selection=Selection.of(None, what, artefacts),
        layout=Layout(target="lab", project=to, to=to),
        backoff=Backoff((0.0, 0.01)),
    )


def pull(run: Path, to: Path, what: str = "all", **options: object) -> Pulled:
    return puller(run, to, what, **options).pull()  # type: ignore[arg-type]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- what and where ---------------------------------------------------------------------------------------------


def test_everything_a_run_left_arrives_and_nothing_unfinished(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "here"
    pulled = pull(run, to)
    expected = {path: data for path, data in tree(run).items() if ".partial" not in path and path != "launch.sh"}
    assert tree(to) == expected
    assert pulled.as_dict()["groups"] == {
        "checkpoints": {"files": 5, "copied": 5, "bytes": 55, "seconds": pytest.approx(0, abs=5)},
        "report": {"files": 3, "copied": 3, "bytes": 69, "seconds": pytest.approx(0, abs=5)},
        "export": {"files": 1, "copied": 1, "bytes": 700_000, "seconds": pytest.approx(0, abs=5)},
        "logs": {"files": 2, "copied": 2, "bytes": 7, "seconds": pytest.approx(0, abs=5)},
    }


@pytest.mark.parametrize("what", list(WHAT))
def test_what_chooses(run: Path, tmp_path: Path, what: str) -> None:
    pull(run, tmp_path / "here", what)
    assert {path.partition("/")[0] for path in tree(tmp_path / "here")} <= set(WHAT[what])


def test_only_the_newest_checkpoints(run: Path, tmp_path: Path) -> None:
    pulled = pull(run, tmp_path / "here", "checkpoints", keep=2)
    assert sorted(p.name for p in (tmp_path / "here/checkpoints").iterdir()) == ["latest", "step-000110", "step-000120"]
    assert pulled.older == 2


def test_a_second_pull_copies_only_what_changed(run: Path, tmp_path: Path) -> None:
    pull(run, tmp_path / "here")
    (run / "events.jsonl").write_text('{"event": "run_start"}\n{"event": "step"}\n')
    pulled = pull(run, tmp_path / "here")
    assert {name: row.copied for name, row in pulled.rows.items()} == {
        "checkpoints": 0,
        "report": 1,
        "export": 0,
        "logs": 0,
    }
    assert "10 were here" in pulled.summary
    assert (tmp_path / "here/events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()


def test_each_artefact_has_its_own_place(tmp_path: Path) -> None:
    layout = Layout(
        target="lab",
        project=tmp_path,
        artefacts=(
            Artefact(remote="runs/{run}/export", local="models/{target}-{run}"),
            Artefact(remote="runs/{run}/events.jsonl", local="events/{run}.jsonl"),
        ),
    )
    assert layout.place(7, "export/model.safetensors") == tmp_path / "models/lab-7/model.safetensors"
    assert layout.place(7, "events.jsonl") == tmp_path / "events/7.jsonl"
    assert layout.place(7, "exported") == tmp_path / "artefacts/lab/7/exported"
    assert layout.folder(7) == tmp_path / "artefacts/lab/7"


def test_selection_errors_are_the_users() -> None:
    with pytest.raises(UsageError, match="--what weights"):
        Selection.of(None, "weights", DEFAULT_ARTEFACTS)
    with pytest.raises(UsageError, match="shared/features"):
        Selection.of(None, "all", [Artefact(remote="shared/features", local="x")])


# --- drops, damage, change --------------------------------------------------------------------------------------


def test_any_number_of_drops_loses_nothing_and_sends_nothing_twice(run: Path, tmp_path: Path) -> None:
    big = random.Random(1).randbytes(20_000_000)
    (run / "export" / "model.safetensors").write_bytes(big)
    rng = random.Random(2)
    transport = Breaking(after=[10, 100, 10**9, *(rng.randrange(1, 2_500_000) for _ in range(20))])
    pulled = pull(run, tmp_path / "here", transport=transport)
    assert transport.drops >= 15
    assert pulled.drops == transport.drops
    assert (tmp_path / "here/export/model.safetensors").read_bytes() == big
    assert not list((tmp_path / "here").rglob("*.part"))


def test_a_killed_pull_goes_on_where_it_stopped(run: Path, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(5_000_000)
    (run / "export" / "model.safetensors").write_bytes(data)
    to = tmp_path / "here"
    part = to / "export" / f".model.safetensors.{hashlib.sha256(data).hexdigest()[:16]}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(data[:3_000_000])
    seen: list[int] = []
    again = puller(run, to, "export")
    again.on_progress = lambda text: seen.append(again._done)
    pulled = again.pull()
    assert (to / "export/model.safetensors").read_bytes() == data
    assert seen and seen[0] > 3_000_000
    assert pulled.drops == 0 and not part.exists()


def test_a_part_damaged_on_our_disk_is_noticed(run: Path, tmp_path: Path) -> None:
    data = (run / "export" / "model.safetensors").read_bytes()
    part = tmp_path / "here" / "export" / f".model.safetensors.{hashlib.sha256(data).hexdigest()[:16]}.part"
    part.parent.mkdir(parents=True)
    for damaged in (b"x" * 1000, b"y" * len(data), b"z" * (len(data) + 5)):
        part.write_bytes(damaged)
        pull(run, tmp_path / "here", "export")
        assert (part.parent / "model.safetensors").read_bytes() == data
        (part.parent / "model.safetensors").unlink()


def test_a_file_that_keeps_changing_is_an_error_after_three_rounds(run: Path, tmp_path: Path) -> None:
    one = puller(run, tmp_path / "here", "report")
    target, copy, rounds = run / "events.jsonl", one._copy, []

    def change_then_copy(parts: Sequence[Part]) -> set[str]:
        rounds.append(len(parts))
        target.write_text("x" * len(target.read_text()) if len(rounds) % 2 else "y" * len(target.read_text()))
        return copy(parts)

    one._copy = change_then_copy  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="1 file of run 7 did not arrive") as caught:
        one.pull()
    assert caught.value.kind == "damaged" and len(rounds) == 3
    assert not (tmp_path / "here/events.jsonl").exists()


def test_a_log_that_grows_is_taken_as_it_was(run: Path, tmp_path: Path) -> None:
    one = puller(run, tmp_path / "here", "logs")
    copy = one._copy

    def grow_then_copy(parts: Sequence[Part]) -> set[str]:
        with (run / "logs/train.log").open("a") as file:
            file.write("step 2\n")
        return copy(parts)

    one._copy = grow_then_copy  # type: ignore[method-assign]
    one.pull()
    assert (tmp_path / "here/logs/train.log").read_text() == "step 1\n"


def test_a_checkpoint_pruned_meanwhile_is_no_error(run: Path, tmp_path: Path) -> None:
    one = puller(run, tmp_path / "here", "checkpoints")
    copy = one._copy

    def prune_then_copy(parts: Sequence[Part]) -> set[str]:
        gone = run / "checkpoints/step-000090/drafter/model.safetensors"
        gone.unlink(missing_ok=True)
        return copy(parts)

    one._copy = prune_then_copy  # type: ignore[method-assign]
    assert one.pull().rows["checkpoints"].files == 4


# --- what the target may not do ---------------------------------------------------------------------------------


def test_links_out_of_the_run_are_not_followed(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (run / "export" / "link").symlink_to(secret / "key")
    (run / "export" / "folder").symlink_to(secret)
    (run / "export" / "pipe").parent.mkdir(exist_ok=True)
    os.mkfifo(run / "export" / "pipe")
    (run / "logs" / "train.log").unlink()
    (run / "logs" / "index.jsonl").unlink()
    (run / "logs").rmdir()
    (run / "logs").symlink_to(secret)
    pulled = pull(run, tmp_path / "here")
    assert b"secret" not in tree(tmp_path / "here").values()
    assert dict(pulled.skipped) == {
        "export/link": "it is a link",
        "export/folder": "it is a link",
        "export/pipe": "it is a device or pipe",
        "logs": "it is a link",
    }


GOOD = {"path": "export/model.safetensors", "size": 3, "sha256": "a" * 64}


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/etc/passwd"},
        {"path": "export/../../.ssh/authorized_keys"},
        {"path": "export/./x"},
        {"path": "export//x"},
        {"path": "export/"},
        {"path": ""},
        {"path": None},
        {"path": "checkpoints/x"},
        {"path": "exportx"},
        {"path": "export/a\x00b"},
        {"path": "export\\..\\x"},
        {"path": "export/" + "n" * 240},
        {"size": -1},
        {"size": "3"},
        {"size": None},
        {"sha256": "../../x"},
        {"sha256": "A" * 64},
        {"sha256": None},
    ],
)
def test_a_hostile_list_of_files_is_refused(change: dict[str, object]) -> None:
    assert entry_from(GOOD, ["export"]) == Entry("export/model.safetensors", 3, "a" * 64)
    with pytest.raises(TransferError) as caught:
        entry_from({**GOOD, **change}, ["export"])
    assert caught.value.kind == "pull_failed"


@given(st.text(max_size=40))
def test_no_path_leads_out(path: str) -> None:
    try:
        entry = entry_from({**GOOD, "path": f"export/{path}"}, ["export"])
    except TransferError:
        return
    base = Path("/base")
    assert Path(os.path.normpath(base / entry.path)).is_relative_to(base / "export")


def test_bytes_that_were_not_asked_for_are_refused(tmp_path: Path) -> None:
    part = Part(Entry("a", 3, "a" * 64), tmp_path / "a")
    for offset, data in ((1, b"x"), (0, b"toolong")):
        with pytest.raises(TransferError, match="not asked for"):
            part.write(offset, data)


def test_a_link_in_the_place_of_a_part_is_not_written_through(tmp_path: Path) -> None:
    part = Part(Entry("a", 3, "a" * 64), tmp_path / "a")
    part.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferError):
        part.write(0, b"abc")
    assert not (tmp_path / "elsewhere").exists()


# --- this machine -----------------------------------------------------------------------------------------------


def test_two_pulls_do_not_write_the_same_file(tmp_path: Path) -> None:
    first, second = (Part(Entry("a", 3, "a" * 64), tmp_path / "a") for _ in range(2))
    first.write(0, b"x")
    with pytest.raises(TransferError, match="another `dfo pull`"):
        second.write(1, b"y")


def test_too_little_space_is_said_before_anything_is_copied(run: Path, tmp_path: Path) -> None:
    with (run / "export/huge.bin").open("wb") as file:
        file.truncate(1)
    one = puller(run, tmp_path / "here")
    manifest = one._manifest()
    with pytest.raises(PreflightError, match="not enough space") as caught:
        one._check_space(manifest, [Entry("export/huge.bin", 1 << 60, "a" * 64)])
    assert caught.value.kind == "disk_full"
    assert not (tmp_path / "here").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_disk_that_fills_up_half_way_is_named(run: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        (run / "export/model.safetensors").write_bytes(random.Random(1).randbytes(3_000_000))
        one = puller(run, small, "export")
        one._check_space = lambda manifest, todo: None  # type: ignore[method-assign]
        with pytest.raises(PreflightError, match="disk is full") as caught:
            one.pull()
        assert caught.value.kind == "disk_full"
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_place_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a file")
    with pytest.raises(TransferError, match="cannot be written on this machine"):
        pull(run, tmp_path / "here")


def test_unknown_run(run: Path, tmp_path: Path) -> None:
    one = puller(run, tmp_path / "here")
    one.selection = Selection(run=99, include=("export",))
    with pytest.raises(DfoError, match="no run 99"):
        one.pull()
    assert stat.S_ISDIR(run.stat().st_mode) and json.loads((run / "run.json").read_text()) == {}
