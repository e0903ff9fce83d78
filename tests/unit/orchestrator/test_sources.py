"""What belongs to a release, and that its archive and identity depend on nothing else."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.deploy.sources import Entry, SourceFile, Sources, collect
from orchestrator.errors import SourceError
from orchestrator.inventory.models import DeployConfig

#: Any name a file can have, except that the release must be able to travel as JSON (so: valid UTF-8).
NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=40).filter(
    lambda name: len(name.encode()) <= 200 and name not in (".", "..")
)


def write(project: Path, *paths: str, text: str = "") -> None:
    for path in paths:
        full = project / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_text(text or f"# {path}\n")


def config(*include: str, **more: object) -> DeployConfig:
    return DeployConfig(include=list(include or ("pkg",)), **more)  # type: ignore[arg-type]


def paths(project: Path, *include: str, **more: object) -> list[str]:
    return list(collect(project, config(*include, **more)).files)


def refused(project: Path, *include: str, **more: object) -> SourceError:
    with pytest.raises(SourceError) as caught:
        collect(project, config(*include, **more))
    return caught.value


def sources_of(contents: dict[str, bytes]) -> Sources:
    import hashlib

    return Sources(
        {
            path: SourceFile(path, data, Entry(hashlib.sha256(data).hexdigest(), len(data), 0o644))
            for path, data in contents.items()
        }
    )


# --- what is included ---------------------------------------------------------------------------------------------


def test_folders_files_and_order(tmp_path: Path) -> None:
    write(tmp_path, "pkg/b.py", "pkg/a/z.py", "tools/run.sh", "other/x.py", "pkg/data.json")
    assert paths(tmp_path, "tools/run.sh", "pkg", "./pkg/a/") == [
        "pkg/a/z.py", "pkg/b.py", "pkg/data.json", "tools/run.sh",
    ]  # fmt: skip


def test_a_dot_means_the_whole_project_with_what_never_ships_left_out(tmp_path: Path) -> None:
    write(
        tmp_path, "pkg/a.py", ".git/config", ".venv/lib/x.py", "pkg/__pycache__/a.pyc", "pkg/a.pyc", ".env", "setup.cfg"
    )
    write(tmp_path, ".dfo-manifest.json", "x.egg-info/PKG-INFO", ".mypy_cache/3.11/x.json")
    assert paths(tmp_path, ".") == ["pkg/a.py", "setup.cfg"]


def test_ignore_files_follow_git_also_in_nested_folders(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py", "pkg/a.log", "pkg/keep.log", "pkg/build/x.py", "pkg/sub/build/y.py", "pkg/sub/n.txt")
    write(tmp_path, "pkg/sub/deep/n.txt", "pkg/sub/only_here.bin", "pkg/only_here.bin")
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n/pkg/build/\n")
    (tmp_path / "pkg/sub/.gitignore").write_text("only_here.bin\n/n.txt\n")
    assert [path for path in paths(tmp_path) if not path.endswith(".gitignore")] == [
        "pkg/a.py", "pkg/keep.log", "pkg/only_here.bin", "pkg/sub/build/y.py", "pkg/sub/deep/n.txt",
    ]  # fmt: skip


def test_dfoignore_has_the_last_word_and_can_bring_back_what_is_left_out_by_default(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py", "pkg/big.bin", "pkg/small.bin", "pkg/.env")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / ".dfoignore").write_text("!small.bin\n!.env\n/pkg/a.py\n")
    assert paths(tmp_path) == ["pkg/.env", "pkg/small.bin"]


def test_nothing_comes_back_from_inside_an_ignored_folder(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py", "pkg/out/x.py")
    (tmp_path / ".gitignore").write_text("out/\n!out/x.py\n")
    assert paths(tmp_path) == ["pkg/a.py"]


def test_an_ignored_include_is_an_error_and_not_an_empty_release(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py", "conf/run.yaml")
    (tmp_path / ".gitignore").write_text("conf/\n")
    error = refused(tmp_path, "pkg", "conf")
    assert error.kind == "no_sources" and "`conf`" in error.what and "!/conf/" in error.fix
    (tmp_path / ".dfoignore").write_text("!/conf/\n")
    assert paths(tmp_path, "pkg", "conf") == ["conf/run.yaml", "pkg/a.py"]


def test_what_the_project_does_not_have_comes_with_dfo(tmp_path: Path) -> None:
    found = paths(tmp_path, "dflash_core")
    assert "dflash_core/config.py" in found and not [path for path in found if "__pycache__" in path]


def test_a_missing_or_empty_include_is_named(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    assert "`nowhere`" in refused(tmp_path, "nowhere").what
    assert refused(tmp_path, "pkg").kind == "no_sources"


def test_the_executable_bit_is_all_that_is_kept_of_a_mode(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.sh", "pkg/b.py")
    (tmp_path / "pkg/a.sh").chmod(0o700)
    (tmp_path / "pkg/b.py").chmod(0o600)
    files = collect(tmp_path, config()).files
    assert [file.entry.mode for file in files.values()] == [0o755, 0o644]


# --- limits -------------------------------------------------------------------------------------------------------


def test_three_thousand_files_are_refused_and_the_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py")
    (tmp_path / "pkg/data").mkdir()
    for number in range(3000):
        (tmp_path / f"pkg/data/{number}").touch()
    error = refused(tmp_path)
    assert error.kind == "too_many_files" and "3,001 files" in error.what and "2,000" in error.what
    assert "`pkg/data` (3,000)" in error.why


def test_a_file_of_60_mb_is_refused_unread_and_the_five_largest_are_named(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py")
    for number in range(6):
        with (tmp_path / f"pkg/{number}.bin").open("wb") as file:
            file.truncate(60_000_000 if number == 0 else number * 1000)
    error = refused(tmp_path)
    assert error.kind == "too_large" and "60.0 MB" in error.what and "50.0 MB" in error.what
    assert "`pkg/0.bin` (60.0 MB), `pkg/5.bin` (5 KB)" in error.why and error.why.count("pkg/") == 5
    assert "pkg/0.bin" in paths(tmp_path, max_size="61MB")


# --- links and odd files ------------------------------------------------------------------------------------------


def test_a_link_out_of_the_tree_is_refused(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project, "pkg/a.py")
    (tmp_path / "secret").write_text("x")
    (project / "pkg/link").symlink_to("../../secret")
    error = refused(project)
    assert error.kind == "unsafe_path" and "pkg/link" in error.what and "out of the project" in error.why


def test_a_link_to_a_file_of_the_release_travels_as_that_file(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py", text="x = 1\n")
    (tmp_path / "pkg/a.py").chmod(0o755)
    (tmp_path / "pkg/link.py").symlink_to("a.py")
    files = collect(tmp_path, config()).files
    assert files["pkg/link.py"].data == b"x = 1\n" and files["pkg/link.py"].entry.mode == 0o755


@pytest.mark.parametrize("target", ["missing.py", "../other/x.py", "sub", "link.py", "."])
def test_other_links_are_refused(tmp_path: Path, target: str) -> None:
    write(tmp_path, "pkg/a.py", "pkg/sub/b.py", "other/x.py")
    (tmp_path / "pkg/link.py").symlink_to(target)
    assert refused(tmp_path).kind == "unsafe_path"


def test_an_included_folder_may_not_be_a_link_out(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    write(elsewhere, "pkg/a.py")
    project.mkdir()
    (project / "pkg").symlink_to(elsewhere / "pkg")
    (project / "way").symlink_to(elsewhere)
    assert refused(project).kind == "unsafe_path"
    assert refused(project, "way/pkg").kind == "unsafe_path"


def test_sockets_and_pipes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "pkg/a.py")
    os.mkfifo(tmp_path / "pkg/pipe")
    assert refused(tmp_path).kind == "unsafe_path"
    (tmp_path / "pkg/pipe").unlink()
    monkeypatch.chdir(tmp_path / "pkg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        assert refused(tmp_path).kind == "unsafe_path"


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/pkg/\xff.txt")).touch()
    error = refused(tmp_path)
    assert error.kind == "unsafe_path" and error.what.encode("utf-8")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py")
    (tmp_path / "pkg/a.py").chmod(0)
    assert refused(tmp_path).kind == "unreadable_source"


# --- identity and archive -----------------------------------------------------------------------------------------


@given(st.dictionaries(NAMES, st.binary(max_size=300), min_size=1, max_size=8), st.randoms())
def test_equal_files_give_equal_bytes_and_identity_in_any_order(contents: dict[str, bytes], random: object) -> None:
    shuffled = list(contents)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = sources_of(contents), sources_of({path: contents[path] for path in shuffled})
    assert one.content == two.content
    assert one.archive(contents) == two.archive(shuffled)
    with tarfile.open(fileobj=io.BytesIO(one.archive(contents)), encoding="utf-8") as archive:
        members = archive.getmembers()
        unpacked = {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert unpacked == contents
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


@given(st.dictionaries(NAMES, st.binary(max_size=20), min_size=1, max_size=4), st.data())
def test_any_change_gives_another_identity(contents: dict[str, bytes], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(contents)))
    before = sources_of(contents).content
    assert sources_of({**contents, path: contents[path] + b"\0"}).content != before
    renamed = {name if name != path else f"{name}_": body for name, body in contents.items()}
    assert sources_of(renamed).content != before
    files = dict(sources_of(contents).files)
    entry = files[path].entry
    files[path] = SourceFile(path, contents[path], Entry(entry.sha256, entry.size, 0o755))
    assert Sources(files).content != before


def test_times_and_owners_do_not_matter(tmp_path: Path) -> None:
    write(tmp_path, "pkg/a.py")
    before = collect(tmp_path, config())
    os.utime(tmp_path / "pkg/a.py", (1, 1))
    after = collect(tmp_path, config())
    assert before.content == after.content and before.archive(before.files) == after.archive(after.files)
