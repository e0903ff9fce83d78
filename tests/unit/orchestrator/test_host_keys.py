"""Host keys: which file counts, what is refused, what is written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from orchestrator.errors import ConnectError
from orchestrator.transport.host_keys import HostKeyCheck, KnownHosts, lookup_name, words_for


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[paramiko.PKey]:
    """Two ed25519 keys and an RSA one, made by ssh-keygen."""
    folder = tmp_path_factory.mktemp("keys")
    made = []
    for name, kind in (("a", "ed25519"), ("b", "ed25519"), ("c", "rsa")):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", folder / name], check=True)
        made.append(paramiko.PKey.from_path(folder / name))
    return made


def line(name: str, key: paramiko.PKey) -> str:
    return f"{name} {key.get_name()} {key.get_base64()}\n"


Make = Callable[..., HostKeyCheck]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(own="…", others=["…"], policy=…)`; files are absent unless given."""

    def check(own: str | None = None, others: tuple[str, ...] = (), name: str = "pve1", **more: object) -> HostKeyCheck:
        files = [tmp_path / "own", *(tmp_path / f"other{n}" for n in range(len(others)))]
        for path, text in zip(files, (own, *others), strict=True):
            if text is not None:
                path.write_text(text)
        known = KnownHosts(files[0], tuple(files[1:]))
        settings: dict[str, object] = {"target": "lab", "policy": "strict", "host": "pve1", **more}
        return HostKeyCheck(known, name=name, **settings)  # type: ignore[arg-type]

    return check


def refused(check: HostKeyCheck, key: paramiko.PKey) -> ConnectError:
    with pytest.raises(ConnectError) as caught:
        check.check(key)
    return caught.value


def test_names_are_those_of_known_hosts_files() -> None:
    assert [lookup_name("PVE1", 22), lookup_name("pve1", 2222)] == ["pve1", "[pve1]:2222"]
    assert lookup_name("2001:db8::1", 2222) == "[2001:db8::1]:2222"


def test_a_fingerprint_is_as_ssh_keygen_prints_it(keys: list[paramiko.PKey], tmp_path: Path) -> None:
    for key, kind in ((keys[0], "ED25519"), (keys[2], "RSA")):
        (tmp_path / "pub").write_text(f"{key.get_name()} {key.get_base64()}\n")
        shown = subprocess.run(["ssh-keygen", "-lf", tmp_path / "pub"], capture_output=True, text=True, check=True)
        assert words_for(key) == f"{kind} {shown.stdout.split()[1]}"


def test_a_known_key_passes_and_nothing_is_written(make: Make, keys: list[paramiko.PKey], tmp_path: Path) -> None:
    check = make(others=(line("pve1", keys[0]),))
    check.check(keys[0])
    check.logged_in()
    assert not (tmp_path / "own").exists()


def test_an_unknown_key_is_refused_when_strict(make: Make, keys: list[paramiko.PKey]) -> None:
    error = refused(make(own=line("pve2", keys[0])), keys[0])
    assert (error.kind, error.exit_code) == ("host_key_unknown", 4)
    assert keys[0].fingerprint in error.why
    assert "`dfo trust lab`" in error.fix


def test_an_unknown_key_is_accepted_once_it_let_us_in(make: Make, keys: list[paramiko.PKey], tmp_path: Path) -> None:
    told: list[str] = []
    check = make(policy="accept-new", tell=told.append)
    check.check(keys[0])
    assert not (tmp_path / "own").exists()
    check.logged_in()
    assert keys[0].fingerprint in told[0]
    assert (tmp_path / "own").read_text() == line("pve1", keys[0])
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
    assert refused(make(policy="accept-new"), keys[1]).kind == "host_key_mismatch"


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_a_changed_key_is_refused_whatever_the_policy(make: Make, keys: list[paramiko.PKey], policy: str) -> None:
    error = refused(make(others=(line("pve1", keys[0]),), policy=policy), keys[1])
    assert error.kind == "host_key_mismatch"
    assert keys[0].fingerprint in error.why and keys[1].fingerprint in error.why
    assert "`dfo trust lab`" in error.fix
    assert (error.details["got"], error.details["expected"]) == (keys[1].fingerprint, [keys[0].fingerprint])


def test_another_type_than_the_known_one_is_a_change(make: Make, keys: list[paramiko.PKey]) -> None:
    """Else an impostor would only have to offer RSA."""
    check = make(own=line("pve1", keys[0]), policy="accept-new")
    assert check.types == ["ssh-ed25519"]
    assert refused(check, keys[2]).kind == "host_key_mismatch"


def test_our_own_file_wins_over_those_of_ssh(make: Make, keys: list[paramiko.PKey]) -> None:
    check = make(own=line("pve1", keys[1]), others=(line("pve1", keys[0]),))
    check.check(keys[1])
    assert refused(check, keys[0]).kind == "host_key_mismatch"


def test_a_pin_needs_no_file_and_no_file_helps_against_it(make: Make, keys: list[paramiko.PKey]) -> None:
    pinned = {"pins": [keys[0].fingerprint]}
    make(**pinned).check(keys[0])
    error = refused(make(own=line("pve1", keys[1]), **pinned), keys[1])
    assert error.kind == "host_key_mismatch"
    assert "the inventory" in error.what and keys[1].fingerprint in error.fix


def test_a_revoked_key_is_refused(make: Make, keys: list[paramiko.PKey]) -> None:
    check = make(own=line("pve1", keys[0]), others=("@revoked * " + line("", keys[0]).strip() + "\n",))
    assert refused(check, keys[0]).kind == "host_key_mismatch"


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("pve1", "pve1", True),
        ("pve1", "pve11", False),
        ("other,pve1", "pve1", True),
        ("[pve1]:2222", "[pve1]:2222", True),
        ("pve1", "[pve1]:2222", False),
        ("*.example.org", "pve1.example.org", True),
        ("pve?", "pve1", True),
        ("*.example.org,!pve1.example.org", "pve1.example.org", False),
        ("PVE1", "pve1", True),
    ],
)
def test_patterns(make: Make, keys: list[paramiko.PKey], pattern: str, name: str, fits: bool) -> None:
    assert bool(make(own=line(pattern, keys[0]), name=name).known.keys) is fits


def test_hashed_names(make: Make, keys: list[paramiko.PKey], tmp_path: Path) -> None:
    """As `ssh-keygen -H` writes them."""
    make(own=line("pve1", keys[0]))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", tmp_path / "own"], check=True, capture_output=True)
    assert "pve1" not in (tmp_path / "own").read_text()
    make().check(keys[0])
    assert refused(make(name="pve2"), keys[0]).kind == "host_key_unknown"


def test_broken_lines_are_passed_over(make: Make, keys: list[paramiko.PKey]) -> None:
    """One strange line must not hide the rest (paramiko dropped whole files for it, pyinfra#1339)."""
    text = "\n".join(
        ["# comment", "@cert-authority * ssh-ed25519 AAAA", "pve1", "pve1 ssh-ed25519 !!!", "pve1 what AAAA", ""]
    )
    make(own=text + line("pve1", keys[0])).check(keys[0])


def test_accepting_replaces_the_old_key_and_keeps_the_rest(
    make: Make, keys: list[paramiko.PKey], tmp_path: Path
) -> None:
    text = (
        "# mine\n" + line("pve2", keys[0]) + line("pve1", keys[0]) + "@revoked pve1 " + line("", keys[2]).strip() + "\n"
    )
    check = make(own=text)
    check.known_hosts.accept("pve1", keys[1])
    kept = (tmp_path / "own").read_text()
    text = text.replace("\n" + line("pve1", keys[0]), "\n").replace("pve3,pve1", "pve3")
    assert kept == text + line("pve1", keys[1])
    make().check(keys[1])


def test_several_new_hosts_at_once(make: Make, keys: list[paramiko.PKey], tmp_path: Path) -> None:
    known = make(own="# no line end").known_hosts
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: known.accept(f"pve{n}", keys[n % 2]), range(40)))
    first, *others = (tmp_path / "own").read_text().splitlines()
    assert first == "# no line end"
    assert sorted(filter(None, others)) == sorted(line(f"pve{n}", keys[n % 2]).strip() for n in range(40))


def test_a_file_that_cannot_be_written_is_told_and_stops_nothing(
    make: Make, keys: list[paramiko.PKey], tmp_path: Path
) -> None:
    told: list[str] = []
    (tmp_path / "file").write_text("")
    check = make(policy="accept-new", tell=told.append)
    check.known_hosts = KnownHosts(tmp_path / "file" / "own")
    check.check(keys[0])
    check.logged_in()
    assert "cannot be written" in told[0]
