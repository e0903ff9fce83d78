"""Deploys that nobody disturbs: what is sent, what is kept, what is said."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.deploy import release
from orchestrator.deploy.plan import Action
from orchestrator.errors import PreflightError, TransferError, UsageError

from .bench import Bench, make_bench


def test_a_first_deploy_brings_every_byte_and_mode(bench: Bench) -> None:
    bench.write("pkg/tool.sh", "#!/bin/sh\n")
    (bench.project / "pkg/tool.sh").chmod(0o750)
    done = bench.deploy()
    assert done.previous is None and bench.current == done.release
    folder = bench.root / "current/pkg"
    assert bench.tree() == {
        str(path.relative_to(bench.project)): path.read_bytes() for path in (bench.project / "pkg").rglob("*")
    }
    assert folder.joinpath("tool.sh").stat().st_mode & 0o777 == 0o755
    assert folder.joinpath("model.py").stat().st_mode & 0o777 == 0o644
    assert bench.traces() == []


def test_the_same_code_again_changes_nothing(bench: Bench) -> None:
    bench.deploy()
    before = {path: path.lstat().st_mtime_ns for path in bench.root.rglob("*")}
    os.utime(bench.project / "pkg/model.py", (1, 1))
    plan = bench.plan()
    assert plan.action is Action.NOTHING and not plan.has_work
    assert {path: path.lstat().st_mtime_ns for path in bench.root.rglob("*")} == before


def test_two_edited_files_are_all_that_travels_and_older_releases_stay_as_they_were(bench: Bench) -> None:
    for number in range(50):
        bench.write(f"pkg/m{number}.py", f"x = {number}\n")
    first = bench.deploy().release
    inodes = {path: path.stat().st_ino for path in (bench.root / "releases" / first).rglob("*.py")}
    bench.write("pkg/m1.py", "x = 'new'\n")
    bench.write("pkg/m2.py", "x = 'new'\n")
    plan = bench.plan()
    assert plan.request["sends"] == ("pkg/m1.py", "pkg/m2.py")
    assert [(change.kind, change.path) for change in plan.changes] == [("M", "pkg/m1.py"), ("M", "pkg/m2.py")]
    done = release.apply(bench.session(), plan)
    assert bench.tree()["pkg/m1.py"] == b"x = 'new'\n" and bench.current_content() == bench.content
    assert (bench.root / "releases" / first / "pkg/m1.py").read_bytes() == b"x = 1\n"
    assert {path: path.stat().st_ino for path in inodes} == inodes
    # Not even the unchanged files share an inode: an edit in one release must not reach the other.
    new = {path.stat().st_ino for path in (bench.root / "releases" / done.release).rglob("*.py")}
    assert not new & set(inodes.values())


def test_removed_and_renamed_files_need_no_transfer(bench: Bench) -> None:
    bench.deploy()
    (bench.project / "pkg/old.py").rename(bench.project / "pkg/renamed.py")
    plan = bench.plan()
    assert [(change.kind, change.path) for change in plan.changes] == [("D", "pkg/old.py"), ("A", "pkg/renamed.py")]
    assert plan.request["sends"] == () and plan.archive == b""
    release.apply(bench.session(), plan)
    assert "pkg/old.py" not in bench.tree() and bench.tree()["pkg/renamed.py"] == b"import json\n"


def test_code_of_a_kept_release_is_verified_and_switched_to(bench: Bench) -> None:
    first = bench.deploy().release
    bench.write("pkg/model.py", "x = 2\n")
    second = bench.deploy().release
    bench.write("pkg/model.py", "from . import version\n")
    plan = bench.plan()
    assert (plan.action, plan.release, plan.current) == (Action.SWITCH, first, second)
    release.apply(bench.session(), plan)
    assert bench.current == first
    # Were that release no longer whole, it would be sent again.
    bench.write("pkg/model.py", "x = 2\n")
    (bench.root / "releases" / second / "pkg/old.py").write_text("damaged\n")
    plan = bench.plan()
    assert plan.action is Action.SEND and plan.release not in (first, second)


def test_an_edit_in_the_current_release_is_noticed_and_undone(bench: Bench) -> None:
    first = bench.deploy().release
    (bench.root / "current/pkg/model.py").write_text("print('debugging')\n")
    plan = bench.plan()
    assert plan.action is Action.SEND and plan.request["sends"] == ("pkg/model.py",)
    assert "changed on the target" in plan.warnings[0] and "`pkg/model.py`" in plan.warnings[0]
    done = release.apply(bench.session(), plan)
    assert done.release != first and bench.current_content() == bench.content


def test_pruning_keeps_the_newest_and_whatever_is_in_use(bench: Bench) -> None:
    (bench.root / "releases").mkdir(parents=True)
    (bench.root / "releases/notes").mkdir()
    releases = []
    for number in range(6):
        bench.write("pkg/model.py", f"x = {number}\n")
        releases.append(bench.deploy().release)
        if number == 0:
            # A process that works in the first release, as a run does.
            worker = subprocess.Popen(["sleep", "60"], cwd=bench.root / "releases" / releases[0])
        if number == 1:
            supervisor = subprocess.Popen(["sleep", "60"])
            fake_run(bench, 7, releases[1], supervisor.pid)
    try:
        left = sorted(path.name for path in (bench.root / "releases").iterdir())
        assert left == sorted(["notes", *releases[:2], *releases[3:]])
        listed = release.list_releases(bench.session())
        assert listed.in_use == {releases[0]: f"process {worker.pid}", releases[1]: "run 7"}
    finally:
        worker.kill()
        supervisor.kill()
        worker.wait()
        supervisor.wait()
    pruned = release.prune(bench.session(), keep=1)
    assert pruned.removed == [*releases[:2], *releases[3:5]] and pruned.current == releases[5]


def fake_run(bench: Bench, number: int, release_id: str, pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    folder = bench.root / "runs" / str(number)
    folder.mkdir(parents=True)
    supervisor = {"pid": pid, "start_ticks": int(stat[19]), "boot_id": boot}
    state = {"v": 1, "run": number, "state": "running", "stage": "train", "supervisor": supervisor}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "run.json").write_text(json.dumps({"release": release_id, "devices": ["cpu"]}))


def test_a_release_that_came_into_use_after_the_plan_is_kept_and_named(bench: Bench) -> None:
    releases = []
    for number in range(3):
        bench.write("pkg/model.py", f"x = {number}\n")
        releases.append(bench.deploy().release)
    bench.write("pkg/model.py", "x = 'last'\n")
    plan = bench.plan()
    assert plan.removes == (releases[0],)
    with subprocess.Popen(["sleep", "60"], cwd=bench.root / "releases" / releases[0]) as worker:
        done = release.apply(bench.session(), plan)
        worker.kill()
    assert (done.removed, done.kept) == ([], {releases[0]: f"process {worker.pid}"})
    assert (bench.root / "releases" / releases[0]).is_dir()


def test_equal_ids_within_a_minute_do_not_collide(bench: Bench) -> None:
    first = bench.deploy().release
    for path in (bench.root / "current/pkg").iterdir():
        path.write_text("damaged")
    second = bench.deploy().release
    assert second.partition("-")[0] == first.partition("-")[0] and second != first
    assert second.split("-")[2] == first.split("-")[2]


# --- rollback -----------------------------------------------------------------------------------------------------


def test_rollback_goes_to_what_was_current_before(bench: Bench) -> None:
    releases = []
    for number in range(3):
        bench.write("pkg/model.py", f"x = {number}\n")
        releases.append(bench.deploy().release)
    for expected in (releases[1], releases[0]):
        facts = release.facts_for_rollback(bench.session())
        assert release.choose_earlier(facts, None) == expected
        release.rollback(bench.session(), facts, expected)
        assert bench.current == expected
    with pytest.raises(UsageError) as caught:
        release.choose_earlier(release.facts_for_rollback(bench.session()), None)
    assert caught.value.kind == "unknown_release"
    facts = release.facts_for_rollback(bench.session())
    assert release.choose_earlier(facts, releases[2].rpartition("-")[2]) == releases[2]


def test_rollback_to_a_damaged_release_is_refused(bench: Bench) -> None:
    first = bench.deploy().release
    bench.write("pkg/model.py", "x = 2\n")
    second = bench.deploy().release
    (bench.root / "releases" / first / "pkg/model.py").write_text("x = 666\n")
    facts = release.facts_for_rollback(bench.session())
    with pytest.raises(PreflightError) as caught:
        release.rollback(bench.session(), facts, first)
    assert caught.value.kind == "release_broken" and "`pkg/model.py`" in caught.value.why
    assert bench.current == second and bench.traces() == []


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ("dA dB dC", ["A", "B"]),
        ("dA dB rA dC", ["A"]),
        ("dA dB dC rA", []),
        ("dA dB rA rB", ["A"]),
        ("dA dB dB", ["A"]),
        ("dX dA dC", ["A"]),
        ("", ["A", "B"]),
        ("dA dB", ["A", "B"]),
    ],
)
def test_history_is_a_stack(switches: str, expected: list[str]) -> None:
    moves = [({"d": "deploy", "r": "rollback"}[move[0]], move[1]) for move in switches.split()]
    current = moves[-1][1] if moves and switches != "dA dB" else "C"
    assert release.history(moves, ["A", "B", "C"], current) == expected


def test_a_plan_that_time_has_overtaken_is_not_carried_out(bench: Bench) -> None:
    bench.deploy()
    bench.write("pkg/model.py", "x = 2\n")
    plan = bench.plan()
    bench.write("pkg/model.py", "x = 3\n")
    newer = bench.deploy().release
    with pytest.raises(TransferError) as caught:
        release.apply(bench.session(), plan)
    assert caught.value.kind == "plan_stale" and newer in caught.value.why
    assert bench.current == newer and bench.traces() == []


# --- names --------------------------------------------------------------------------------------------------------

PARTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=30).map(
    lambda name: f"n{name}"
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.tuples(PARTS, PARTS).map("/".join), st.binary(max_size=100), min_size=1, max_size=12))
def test_any_file_name_makes_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]
) -> None:
    bench = make_bench(tmp_path_factory.mktemp("names"))
    for path, data in contents.items():
        bench.write(f"pkg/{path}.data", data)
    bench.deploy()
    tree = bench.tree()
    assert {path: tree[f"pkg/{path}.data"] for path in contents} == contents
    assert bench.plan().action is Action.NOTHING


# --- the command line ---------------------------------------------------------------------------------------------


def dfo(bench: Bench, *arguments: str, expect: int = 0) -> SimpleNamespace:
    done = subprocess.run(bench.dfo(*arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode == expect, done.stderr
    return SimpleNamespace(out=done.stdout, err=done.stderr)


def test_the_commands_tell_one_story(bench: Bench) -> None:
    plan = dfo(bench, "deploy", "lab", "--dry-run")
    assert "0 changed, 4 new, 0 removed of 4 files" in plan.out and "Run `dfo deploy lab` to apply." in plan.err
    assert "name é.txt" in plan.out and not bench.root.exists()
    first = json.loads(dfo(bench, "deploy", "--json").out)["result"]
    assert first["changed"] is True and first["release"] == bench.current
    assert "already runs this code" in dfo(bench, "deploy").err
    dfo(bench, "deploy", "--check")
    bench.write("pkg/model.py", "x = 2\n")
    pending = json.loads(dfo(bench, "deploy", "--check", "--json", expect=9).out)["error"]
    assert pending["kind"] == "deploy_pending" and pending["plan"]["changes"][0]["path"] == "pkg/model.py"
    text = dfo(bench, "deploy").err
    assert [line.split()[0] for line in text.splitlines()] == [
        "inventory", "check", "lock", "send", "verify", "activate", "Deployed",
    ]  # fmt: skip
    second = bench.current
    assert f"`lab`: {second} -> {first['release']} (still complete, 4 hashes equal)" in dfo(bench, "rollback").err
    listed = dfo(bench, "releases").out.splitlines()
    assert listed[0].split()[0] == "RELEASE" and first["release"] in listed[1] and "current" in listed[1]
    assert [line.split()[3] for line in dfo(bench, "audit").out.splitlines()[1:]] == ["deploy", "deploy", "rollback"]
    dfo(bench, "rollback", "lab", str(second))
    assert f"removed {first['release']}" in dfo(bench, "releases", "--prune", "1").err


def test_a_no_change_deploy_is_one_call_and_a_deploy_two(bench: Bench) -> None:
    session = bench.session()
    calls: list[str] = []
    transport = session.transport
    stream = transport.stream
    transport.stream = lambda argv, stdin=(): (calls.append("call"), stream(argv, stdin=stdin))[1]  # type: ignore
    bench.deploy(session)
    assert len(calls) == 2
    bench.plan(session)
    assert len(calls) == 3
