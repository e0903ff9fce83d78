"""What a deploy decides to do, from facts written down here; no target is needed."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from orchestrator.deploy.checks import examine, judge
from orchestrator.deploy.facts import Facts
from orchestrator.deploy.imports import OURS
from orchestrator.deploy.plan import Action, DeployPlan
from orchestrator.deploy.planning import make_plan, new_id
from orchestrator.deploy.sources import Entry, SourceFile, Sources
from orchestrator.errors import PreflightError, SourceError
from orchestrator.inventory.models import DeployConfig
from orchestrator.words import ago, count, size

OLD, OLDER = "20261128-0940-77b0e2", "20261101-1000-a1b2c3"
NOON = 1796040000.0


def sources(**contents: str) -> Sources:
    files = {}
    for name, text in sorted(contents.items()):
        data, path = text.encode(), f"pkg/{name}.py"
        files[path] = SourceFile(path, data, Entry(hashlib.sha256(data).hexdigest(), len(data), 0o644))
    return Sources(files)


def a_release(id: str, content: str, created: float) -> dict[str, Any]:
    return {"id": id, "content": content, "files": 2, "bytes": 2_100_000, "created": created, "by": "anna@mbp",
            "python": "3.11"}  # fmt: skip


def facts(current: Sources | None = None, **changes: Any) -> Facts:
    """A healthy target with two releases, `current` the newer one."""
    releases = [a_release(OLDER, "0" * 64, 1.0)]
    if current is not None:
        releases.append(a_release(OLD, current.content, 2.0))
    root = {"exists": True, "place": "/opt/dfo", "is_folder": True, "current_is_link": True, "writable": True,
            "read_only": False, "free_bytes": 10**9, "free_inodes": 10**6}  # fmt: skip
    return Facts.model_validate({
        "v": 1, "time": NOON, "os": "Debian 12", "init": "systemd", "lock": None, "lock_error": None,
        "python": {"version": (*OURS, 2), "implementation": "cpython", "executable": "/opt/venv/bin/python"},
        "root": root | changes.pop("root", {}), "leftovers": [], "runs": [], "switches": [],
        "modules": {"missing": {}, "versions": {}}, "parsed": {}, "gpus": None, "releases": releases,
        "current": OLD if current is not None else None,
        "current_files": {} if current is None else current.manifest,
        "damaged": {OLD: []}, "fingerprint": "f", **changes,
    })  # fmt: skip


def plan(new: Sources, known: Facts, **config: Any) -> DeployPlan:
    deploy = DeployConfig(include=["pkg"], **config)
    judged = judge(examine(new, ["pkg"]), known, target="lab")
    return make_plan(new, judged, known, deploy, target="lab", place="this machine, /opt/dfo", owner={"user": "anna"})


def test_the_plan_as_people_read_it() -> None:
    before = sources(a="x = 1\n", b="y = 1\n", c="z = 1\n")
    after = sources(a="x = 2\n", b="y = 1\n", d="import torch\n")
    known = facts(before, modules={"missing": {}, "versions": {"torch": "2.13.0"}}, leftovers=["releases/x.partial"])
    made = plan(after, known, keep=2)
    assert made.lines() == [
        "Plan for `lab` (this machine, /opt/dfo)                    facts 0 s old",
        f"  release   20261130-1200-{after.content[:6]}  (current: {OLD})",
        "  check     3 Python files parse, 0 errors, 0 warnings",
        "  uses      torch 2.13.0",
        f"  send      1 changed, 1 new, 1 removed of 3 files, {size(len(made.archive))} compressed",
        "            M pkg/a.py                                 6 B (+0 B)",
        "            D pkg/c.py                                 was 6 B",
        "            A pkg/d.py                                 13 B",
        f"  keep      2 releases, remove 1 ({OLDER})",
        "  clean     releases/x.partial, left by a command that died",
    ]
    assert made.steps == {
        "lock": "taken",
        "send": f"2 files, {size(len(made.archive))}",
        "verify": "3 hashes equal",
        "activate": made.release,
        "prune": "1 old release",
    }


def test_the_plan_is_what_the_target_is_told() -> None:
    before, after = sources(a="x = 1\n", b="y = 1\n"), sources(a="x = 2\n", c="y = 1\n")
    request = plan(after, facts(before)).request
    assert request["copies"] == {"pkg/c.py": "pkg/b.py"} and request["sends"] == ("pkg/a.py",)
    assert request["base"] == OLD and request["fingerprint"] == "f" and request["owner"] == {"user": "anna"}
    assert request["files"] == after.manifest_json() and request["content"] == after.content


def test_nothing_to_do() -> None:
    same = sources(a="x = 1\n")
    made = plan(same, facts(same))
    assert (made.action, made.release, made.removes, made.steps) == (Action.NOTHING, OLD, (), {})
    assert "nothing to send: this code is current" in made.lines()[3]


def test_releases_with_a_run_and_the_newest_stay() -> None:
    new = sources(a="x = 2\n")
    run = {"run": 57, "state": "running", "release": OLDER, "devices": ["cuda:0"]}
    assert plan(new, facts(sources(a=""), runs=[run]), keep=1).removes == (OLD,)
    assert plan(new, facts(sources(a="")), keep=1).removes == (OLDER, OLD)
    assert plan(new, facts(sources(a="")), keep=3).removes == ()


def test_ids_are_in_the_targets_time_and_never_taken_twice() -> None:
    known = facts(releases=[a_release(f"20261130-1200-abcdef{end}", "", 1.0) for end in ("", "-2")])
    assert new_id(known, "abcdef" + "0" * 58) == "20261130-1200-abcdef-3"
    assert new_id(known, "123456" + "0" * 58) == "20261130-1200-123456"


@pytest.mark.parametrize(
    ("root", "kind", "why"),
    [
        ({"free_bytes": 1000}, "disk_full", "need 143 KB, have 1 KB; 1 release there use 2.1 MB"),
        ({"free_inodes": 5}, "disk_full", "need 18 inodes, have 5; 1 release there use 2.1 MB"),
        ({"read_only": True}, "read_only", "`/opt/dfo` is on a read-only file system"),
        ({"writable": False}, "not_permitted", "`/opt/dfo` is not writable for the login user"),
        ({"is_folder": False}, "root_unusable", "`/opt/dfo` is not a folder"),
        ({"current_is_link": False}, "root_unusable", "`/opt/dfo` has a `current` that is no link of ours"),
    ],
)
def test_a_target_that_cannot_take_it(root: dict[str, Any], kind: str, why: str) -> None:
    with pytest.raises(PreflightError) as caught:
        plan(sources(a="x = 1\n"), facts(root=root))
    assert (caught.value.kind, caught.value.why) == (kind, why)


def test_a_file_system_without_inode_counts_is_fine() -> None:
    assert plan(sources(a="x = 1\n"), facts(root={"free_inodes": None})).has_work


# --- the checks' last word ----------------------------------------------------------------------------------------


def verdict(text: str, **changes: Any) -> Any:
    examined = examine(sources(a=text), ["pkg"])
    return judge(examined, facts(**changes), target="lab")


def python(minor: int) -> dict[str, Any]:
    return {"version": (3, minor, 0), "implementation": "cpython", "executable": "/usr/bin/python3"}


def test_what_only_a_newer_target_can_parse_is_left_to_it() -> None:
    newer = OURS[1] + 1
    text = "syntax of the future: yes\n"
    judged = verdict(text, python=python(newer), parsed={"pkg/a.py": None})
    assert judged.warnings == (
        f"pkg/a.py: only the target's Python 3.{newer}.0 can parse it; its imports were not checked",
    )
    assert judged.reparse == ("pkg/a.py",)
    with pytest.raises(SourceError) as caught:
        verdict(text, python=python(newer), parsed={"pkg/a.py": (1, 8, "invalid syntax")})
    assert caught.value.why == "pkg/a.py:1:8 invalid syntax"


def test_an_older_target_gets_its_own_grammar() -> None:
    with pytest.raises(SourceError) as caught:
        verdict("match 1:\n    case 1: pass\n", python=python(9))
    assert caught.value.kind == "syntax_error" and caught.value.what.endswith("does not parse with Python 3.9")
    assert verdict("x = 1\n").reparse == ()


def test_modules_of_another_standard_library_are_not_for_pip() -> None:
    missing = {"missing": {"tomllib": "no module of that name is installed"}, "versions": {}}
    with pytest.raises(SourceError) as caught:
        verdict("import tomllib\n", modules=missing)
    assert "pip" not in caught.value.fix and "brings `tomllib`" in caught.value.fix


def test_several_missing_modules_are_counted_and_all_named() -> None:
    missing = {"missing": {"aaa": "gone", "bbb.c": "gone"}, "versions": {}}
    with pytest.raises(SourceError) as caught:
        verdict("import bbb.c\ntry:\n    import aaa\nexcept ImportError:\n    pass\nimport aaa\n", modules=missing)
    error = caught.value
    assert error.what == "2 modules are missing on `lab`" and error.fix.endswith(
        "pip install aaa bbb` (or what brings it)"
    )
    assert error.why.startswith("pkg/a.py:6:1 imports `aaa`: gone (and 1 more)")
    assert error.details["modules"] == ["aaa", "bbb.c"]


# --- words --------------------------------------------------------------------------------------------------------


def test_words() -> None:
    assert [size(n) for n in (0, 999, 1000, 41_300, 999_499, 999_500, 3_900_000, 212e9, 5e12)] == [
        "0 B", "999 B", "1 KB", "41 KB", "999 KB", "1.0 MB", "3.9 MB", "212 GB", "5.0 TB",
    ]  # fmt: skip
    assert [ago(s) for s in (-1, 0.4, 119, 120, 7200, 200_000)] == ["0 s", "0 s", "119 s", "2 min", "2 h", "2 d"]
    assert (count(1, "file"), count(3000, "file"), count(2, "entry", "entries")) == (
        "1 file",
        "3,000 files",
        "2 entries",
    )
