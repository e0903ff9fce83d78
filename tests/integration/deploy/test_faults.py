"""Whatever happens during a deploy: `current` is a whole release, and the next command works and cleans up.

Every fault happens at an exact place of the program on the target, in the real processes.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.deploy import release
from orchestrator.errors import DfoError, PreflightError, SourceError, TransferError

from .bench import REMOTE_DIES, Bench, before

#: Functions of the transaction, in the order in which they run, and whether the release is current by then.
PLACES = {
    "take_lock": False,
    "_place_lock": False,
    "check_fingerprint": False,
    "stage": False,
    "receive": False,
    "copy_unchanged": False,
    "check_hashes": False,
    "fsync_tree": False,
    "activate_release": False,
    "switch_to": False,
    "record_in_audit": True,
    "prune_releases": True,
    "discard_lock": True,
}

LAPTOP_DIES = "os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.3)"
CTRL_C = "os.kill(os.getppid(), signal.SIGINT); time.sleep(0.7)"


def recover(bench: Bench, *, reached: bool, old: str | None) -> None:
    """After a fault: `current` is whole, old or new; the next deploy works and leaves no trace."""
    content = bench.current_content()
    assert content == bench.content if reached else content in (old, bench.content)
    bench.write("pkg/next.py", "import os\n")
    # An orphan whose laptop is gone may still be finishing its work.
    bench.deploy(lock_wait=20.0)
    assert bench.current_content() == bench.content
    assert bench.traces() == []


@pytest.mark.parametrize("place", PLACES)
def test_the_program_on_the_target_is_killed(deployed: Bench, place: str) -> None:
    old = deployed.current_content()
    done = deployed.broken_deploy(place, REMOTE_DIES)
    assert done.returncode == 4 and "connection to `lab` ended" in done.stderr
    if not PLACES[place]:
        assert deployed.current_content() == old
    recover(deployed, reached=PLACES[place], old=old)


@pytest.mark.parametrize("place", PLACES)
def test_dfo_is_killed(deployed: Bench, place: str) -> None:
    old = deployed.current_content()
    assert deployed.broken_deploy(place, LAPTOP_DIES).returncode == -signal.SIGKILL
    recover(deployed, reached=PLACES[place], old=old)


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c(deployed: Bench, place: str) -> None:
    old = deployed.current_content()
    done = deployed.broken_deploy(place, CTRL_C)
    assert done.returncode == 130 and "nterrupted during" in done.stderr
    # dfo waits until the target has cleaned up: nothing is left even before the next command.
    assert deployed.traces() == []
    if not PLACES[place] and place != "switch_to":
        assert deployed.current_content() == old
    recover(deployed, reached=PLACES[place], old=old)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_dfo_is_killed_while_sending(deployed: Bench, part: float) -> None:
    old = deployed.current_content()
    script = (
        "import os, sys\n"
        "from orchestrator.deploy import delivery\n"
        "def dying(data, real=delivery.slices):\n"
        f"    for number, piece in enumerate(real(data[: int(len(data) * {part})])):\n"
        "        yield piece\n"
        "    os.kill(os.getpid(), 9)\n"
        "delivery.slices = dying\n"
        "from orchestrator.cli import main\n"
        "sys.exit(main(['deploy', '-i', sys.argv[1]]))\n"
    )
    deployed.dfo()
    argv = [sys.executable, "-c", script, str(deployed.project / "inventory.yaml")]
    assert subprocess.run(argv, capture_output=True, timeout=60).returncode == -signal.SIGKILL
    limit = time.monotonic() + 10
    while deployed.traces() and time.monotonic() < limit:
        time.sleep(0.05)
    # The orphan saw a short payload: it cleaned up by itself, and nothing has changed.
    assert deployed.traces() == [] and deployed.current_content() == old
    recover(deployed, reached=False, old=old)


def test_leftovers_are_removed_even_when_there_is_nothing_to_deploy(deployed: Bench) -> None:
    deployed.broken_deploy("check_hashes", REMOTE_DIES)
    assert len(deployed.traces()) == 2
    deployed.write("pkg/model.py", "x = 2\n")
    (deployed.project / "pkg/noise.bin").unlink()
    plan = deployed.plan()
    assert not plan.has_work and len(plan.leftovers) == 2
    done = subprocess.run(deployed.dfo("deploy"), capture_output=True, text=True, timeout=60)
    assert "left by a command that died" in done.stderr and "already runs this code" in done.stderr
    assert deployed.traces() == []


# --- damage and lies ----------------------------------------------------------------------------------------------


def failed(bench: Bench, trick: str) -> DfoError:
    before_it = bench.current_content()
    with pytest.raises(DfoError) as caught:
        bench.deploy(bench.session("apply", trick))
    assert bench.current_content() == before_it and bench.traces() == []
    return caught.value


def test_damage_between_sending_and_verifying(deployed: Bench) -> None:
    flip = (
        "for name in ('model.py', 'old.py'):\n"
        "    path = os.path.join(args[0], 'pkg', name)\n"
        "    data = bytearray(open(path, 'rb').read())\n"
        "    data[0] ^= 1\n"
        "    open(path, 'wb').write(data)"
    )
    error = failed(deployed, before("check_hashes", flip))
    assert isinstance(error, TransferError) and error.kind == "damaged"
    assert error.what.startswith("2 of 5 files arrived damaged") and "`pkg/model.py`, `pkg/old.py`" in error.why


@pytest.mark.parametrize(
    "harm", ["os.remove(path)", "os.chmod(path, 0o600)", "os.remove(path); os.symlink('old.py', path)"]
)
def test_other_damage_is_noticed_too(deployed: Bench, harm: str) -> None:
    error = failed(deployed, before("check_hashes", f"path = os.path.join(args[0], 'pkg', 'model.py')\n{harm}"))
    assert error.kind == "damaged" and "1 of 5" in error.what


def test_a_file_of_the_current_release_that_vanishes_meanwhile(deployed: Bench) -> None:
    old = deployed.current
    trick = before("copy_unchanged", "os.remove(args[0] + '/pkg/old.py')")
    with pytest.raises(TransferError) as caught:
        deployed.deploy(deployed.session("apply", trick))
    assert caught.value.kind == "damaged" and "`pkg/old.py`" in caught.value.why
    assert deployed.current == old and deployed.traces() == []
    deployed.deploy()
    assert deployed.current_content() == deployed.content


def test_the_targets_parser_has_the_last_word(deployed: Bench) -> None:
    # As if the versions differed: the laptop asks for the check, and the target's parser does not like a file.
    refuse = "raise SyntaxError('only here', (args[1], 7, 3, ''))"
    plan = deployed.plan()
    plan.request["parse"] = ("pkg/model.py",)  # type: ignore[index]
    with pytest.raises(SourceError) as caught:
        release.apply(deployed.session("apply", f"def compile(*args):\n    {refuse}\n"), plan)
    assert caught.value.why == "pkg/model.py:7:3 only here" and deployed.traces() == []


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return raw.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, b"x = 3\n" if kind == tarfile.REGTYPE else b""


@pytest.mark.parametrize(
    "evil",
    [
        member("../evil"), member("/tmp/dfo-evil"), member("pkg/../../evil"), member("pkg/unannounced.py"),
        member("pkg/model.py", tarfile.SYMTYPE, "/etc/passwd"), member("pkg/model.py", tarfile.LNKTYPE, "pkg/old.py"),
        member("pkg/model.py", tarfile.FIFOTYPE), member("pkg/model.py", tarfile.CHRTYPE),
        member("pkg", tarfile.DIRTYPE),
    ],
    ids=lambda pair: f"{pair[0].name}-{pair[0].type.decode()}",
)  # fmt: skip
def test_an_archive_that_holds_anything_else_is_refused(bench: Bench, evil: tuple[tarfile.TarInfo, bytes]) -> None:
    bench.deploy()
    bench.write("pkg/model.py", "x = 3\n")
    plan, old = bench.plan(), bench.current
    data = archive_of(evil, member("pkg/model.py"))
    with pytest.raises(TransferError) as caught:
        bench.session().call("apply", {**plan.request, "wait_s": 0, "archive_size": len(data)}, payload=[data])
    assert caught.value.kind == "damaged" and bench.current == old and bench.traces() == []
    assert not Path("/tmp/dfo-evil").exists() and not list(bench.root.rglob("evil"))


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a//b", "a/./b", "", ".dfo-manifest.json"])
def test_a_manifest_that_leads_out_is_refused(bench: Bench, path: str) -> None:
    bench.deploy()
    bench.write("pkg/model.py", "x = 3\n")
    request = json.loads(json.dumps({**bench.plan().request, "wait_s": 0}))
    request["files"][path] = request["files"]["pkg/model.py"]
    with pytest.raises(SourceError) as caught:
        bench.session().call("apply", request)
    assert caught.value.kind == "unsafe_path" and bench.traces() == []


@pytest.mark.parametrize("cut", [0, 1, 15, 100, 40_000, -1])
def test_a_short_archive_is_a_truncated_transfer(deployed: Bench, cut: int) -> None:
    plan, old = deployed.plan(), deployed.current
    with pytest.raises(TransferError) as caught:
        deployed.session().call("apply", {**plan.request, "wait_s": 0}, payload=[plan.archive[:cut]])
    assert caught.value.kind == "truncated" and deployed.current == old and deployed.traces() == []


def test_an_archive_with_flipped_bits_is_a_damaged_one(deployed: Bench) -> None:
    plan, old = deployed.plan(), deployed.current
    for position in (0, 12, 500, len(plan.archive) // 2):
        data = bytearray(plan.archive)
        data[position] ^= 0x55
        with pytest.raises(TransferError) as caught:
            deployed.session().call("apply", {**plan.request, "wait_s": 0}, payload=[bytes(data)])
        assert caught.value.kind == "damaged"
    assert deployed.current == old and deployed.traces() == []


# --- space and rights ---------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"NEEDS A MOUNT OF ITS OWN (root): {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_the_disk_fills_up_while_staging(bench: Bench) -> None:
    with mounted(bench.root, "size=2m"):
        bench.deploy()
        bench.write("pkg/model.py", "x = 2\n")
        bench.deploy()
        bench.write("pkg/noise.bin", os.urandom(200_000))
        fill = (
            f"with open({str(bench.root)!r} + '/tmp/ballast', 'wb') as ballast:\n"
            "    with contextlib.suppress(OSError):\n"
            "        while True: ballast.write(bytes(65536)); ballast.flush()"
        )
        error = failed(bench, before("receive", fill))
        assert isinstance(error, PreflightError) and error.kind == "disk_full" and "No space left" in error.why
        # Now that it is full, the plan already says so, and what it recommends works.
        with pytest.raises(PreflightError) as caught:
            bench.plan()
        assert caught.value.kind == "disk_full" and "need " in caught.value.why and "2 releases" in caught.value.why
        assert "--prune" in caught.value.fix
        assert len(release.prune(bench.session(), keep=1).removed) == 1
        (bench.root / "tmp/ballast").unlink()
        bench.deploy()
        assert bench.current_content() == bench.content


def test_too_few_inodes_are_noticed_before_anything_is_sent(bench: Bench) -> None:
    with mounted(bench.root, "size=8m", "nr_inodes=15"):
        with pytest.raises(PreflightError) as caught:
            bench.plan()
        assert caught.value.kind == "disk_full" and "inodes" in caught.value.why
        assert list(bench.root.iterdir()) == []


def test_a_read_only_root(bench: Bench) -> None:
    with mounted(bench.root, "size=8m"):
        bench.deploy()
        bench.write("pkg/model.py", "x = 2\n")
        subprocess.run(["mount", "-o", "remount,ro", bench.root], check=True)
        with pytest.raises(PreflightError) as caught:
            bench.plan()
        assert caught.value.kind == "read_only" and str(bench.root) in caught.value.why
        assert bench.current is not None
