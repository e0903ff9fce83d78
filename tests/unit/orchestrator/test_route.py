"""The hops to a host: ssh's own configuration, and what the inventory puts over it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.inventory.reach import SshConfig
from orchestrator.transport.route import Route, find_route, split_hop

CONFIG = """\
Include {folder}/more
Host pve1
    HostName 192.0.2.10
    Port 2222
    User ada
    IdentityFile {folder}/id
    IdentitiesOnly yes
    ProxyJump bob@bastion:2022,inner
Host alias
    HostName 192.0.2.11
    HostKeyAlias the-node
Host bastion
    HostName bastion.example.org
Host inner
    User carol
"""
INCLUDED = "Host far\n    HostName 192.0.2.12\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "more").write_text(INCLUDED)
    (tmp_path / "id").write_text("")
    return tmp_path


def route(folder: Path, host: str, **more: object) -> Route:
    return find_route(SshConfig(host=host, config=str(folder / "config"), **more))  # type: ignore[arg-type]


def test_a_host_alias_works_as_in_ssh(folder: Path) -> None:
    hop = route(folder, "pve1", jump=[]).hops[-1]
    assert (hop.spoken, hop.host, hop.port, hop.user) == ("pve1", "192.0.2.10", 2222, "ada")
    assert (hop.name, hop.label, hop.address) == ("[192.0.2.10]:2222", "ada@pve1", "192.0.2.10:2222")
    assert (hop.keys, hop.only_keys) == ((folder / "id",), True)


def test_the_inventory_wins(folder: Path) -> None:
    hop = route(folder, "pve1", user="root", port=22, keys=["/k"], jump=[]).hops[-1]
    assert (hop.user, hop.port, hop.keys, hop.name) == ("root", 22, (Path("/k"),), "192.0.2.10")


def test_without_configuration_a_host_is_itself(folder: Path) -> None:
    found = find_route(SshConfig(host="pve9", config="none", user="root"))
    assert [(hop.host, hop.port, hop.user) for hop in found.hops] == [("pve9", 22, "root")]
    assert found.beyond_paramiko is None


def test_includes_and_aliases_of_keys(folder: Path) -> None:
    assert route(folder, "far").hops[-1].host == "192.0.2.12"
    assert route(folder, "alias").hops[-1].name == "the-node"


def test_proxy_jump_of_ssh(folder: Path) -> None:
    hops = route(folder, "pve1").hops
    assert [(hop.label, hop.address) for hop in hops] == [
        ("bob@bastion", "bastion.example.org:2022"),
        ("carol@inner", "inner:22"),
        ("ada@pve1", "192.0.2.10:2222"),
    ]


def test_jump_of_the_inventory_replaces_it(folder: Path) -> None:
    hops = route(folder, "pve1", jump=["dan@[2001:db8::1]:99"]).hops
    assert [(hop.user, hop.host, hop.port) for hop in hops] == [("dan", "2001:db8::1", 99), ("ada", "192.0.2.10", 2222)]


def test_a_circle_of_jumps_ends(folder: Path) -> None:
    (folder / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(UsageError) as caught:
        route(folder, "a")
    assert "circle" in caught.value.why


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ProxyCommand nc %h %p", "ProxyCommand"),
        ("PKCS11Provider /usr/lib/x.so", "PKCS11Provider"),
        ("IdentityAgent /run/other", "IdentityAgent"),
        ("IdentityAgent SSH_AUTH_SOCK", None),
        ("CertificateFile /c", "CertificateFile"),
        ("ProxyCommand none", None),
        ("GSSAPIAuthentication yes", None),
    ],
)
def test_what_only_the_ssh_program_can_do(folder: Path, line: str, reason: str | None) -> None:
    (folder / "config").write_text(f"Host pve1\n  {line}\n")
    assert route(folder, "pve1").beyond_paramiko == reason


def test_hardware_keys_need_the_ssh_program(folder: Path) -> None:
    (folder / "id.pub").write_text("sk-ssh-ed25519@openssh.com AAAA yubikey\n")
    assert route(folder, "pve1").beyond_paramiko == f"the hardware key {folder / 'id'}"


def test_a_broken_configuration_is_named(folder: Path) -> None:
    (folder / "config").write_text("Host a\n  Porrt 3\n")
    with pytest.raises(UsageError) as caught:
        route(folder, "a")
    assert str(folder / "config") in caught.value.what
    assert "porrt" in caught.value.why.lower()


def test_without_an_ssh_program_paramiko_reads_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    hops = route(folder, "pve1").hops
    assert [hop.address for hop in hops] == ["bastion.example.org:2022", "inner:22", "192.0.2.10:2222"]
    assert (hops[-1].user, hops[-1].keys) == ("ada", (folder / "id",))
    assert os.environ["PATH"] == "/nowhere"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("pve1", (None, "pve1", None)),
        ("ada@pve1", ("ada", "pve1", None)),
        ("pve1:22", (None, "pve1", 22)),
        ("ada@pve1:2222", ("ada", "pve1", 2222)),
        ("[2001:db8::1]:22", (None, "2001:db8::1", 22)),
        ("2001:db8::1", (None, "2001:db8::1", None)),
        ("ssh://ada@pve1:22", ("ada", "pve1", 22)),
    ],
)
def test_hops_as_text(text: str, parts: tuple[str | None, str, int | None]) -> None:
    assert split_hop(text) == parts
