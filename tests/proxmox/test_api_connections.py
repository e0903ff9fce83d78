"""The way to the API: nodes and networks, certificates, strange answers, and the secret that nobody may see."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakepve import FakePve
from fakepve.certs import make_cert
from support.fake_api import SECRET, TOKEN_ID, Connect, answering, asked, config, fails, fingerprint_of
from support.https_answers import https_answers

from orchestrator.errors import ConnectError, DeadlineError, PreflightError, UsageError
from orchestrator.inventory.secrets import Secret
from orchestrator.proxmox import snapshots
from orchestrator.proxmox.client import ATTEMPTS, open_api
from orchestrator.proxmox.container import Container, version
from orchestrator.proxmox.tls import spelled

# -- nodes and networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [595, 596])
def test_a_node_that_cannot_be_reached_is_asked_again(pve: FakePve, guest: Container, status: int) -> None:
    assert guest.node
    pve.fail("GET", "/status/current", status, "No route to host")
    with fails(ConnectError, "unreachable") as caught:
        guest.status()
    assert caught.value.exit_code == 4 and f"{status} No route to host" in caught.value.why
    assert asked(pve, end="/status/current") == ATTEMPTS
    pve.failures.clear()
    pve.fail("GET", "/status/current", status, "No route to host", times=ATTEMPTS - 1)
    assert guest.status().state == "running"


def test_a_change_is_never_asked_for_again(pve: FakePve, guest: Container) -> None:
    assert guest.node
    pve.fail("POST", "/snapshot", 596, "Broken pipe")
    with fails(ConnectError, "unreachable"):
        snapshots.take(guest, "", keep=3)
    pve.set_node_offline("pve1")
    with fails(ConnectError, "unreachable"):
        guest.api.post(*guest.path, "status", "start")
    assert (asked(pve, "POST", "/snapshot"), asked(pve, "POST", "/start")) == (1, 1)


def test_connections_that_are_cut(pve: FakePve, guest: Container) -> None:
    pve.flaky_network(drop_rate=1.0)
    for ask in (lambda: version(guest.api), lambda: guest.api.post("nodes", "pve1", "lxc", 101, "status", "start")):
        with fails(ConnectError, "connection_lost"):
            ask()
    assert asked(pve) == asked(pve, "POST") == 0


def test_a_question_survives_a_connection_that_is_cut(pve: FakePve, connect: Connect) -> None:
    pve.flaky_network(drop_rate=1.0)
    threading.Timer(0.15, lambda: pve.flaky_network()).start()
    assert version(connect(pause=0.2)) == pve.version


def test_a_slow_answer_has_a_limit_and_is_not_asked_for_again(pve: FakePve, connect: Connect) -> None:
    pve.flaky_network(hang_rate=1.0, hang_secs=1.5)
    began = time.monotonic()
    with fails(DeadlineError, "deadline") as caught:
        version(connect(timeout=0.5))
    assert time.monotonic() - began < 1.4 and "0.5 s" in caught.value.what


def test_an_unknown_node_name(pve: FakePve, guest: Container) -> None:
    assert guest.node
    pve.fail("GET", "/status/current", error="hostname_lookup_failed")
    with fails(PreflightError, "cluster_not_ready") as caught:
        guest.status()
    assert "`pve1`" in caught.value.what and "hostname lookup 'pve1' failed" in caught.value.why


@pytest.mark.parametrize(
    ("status", "text", "part"),
    [
        (400, "Parameter verification failed.", "400 Parameter verification failed."),
        (500, "unexpected", "500 unexpected"),
        (501, "Method 'GET /version' not implemented", "501"),
        (502, "Bad Gateway", "502"),
    ],
)
def test_other_failures_are_quoted(pve: FakePve, guest: Container, status: int, text: str, part: str) -> None:
    pve.fail("GET", "/version", status, text)
    with fails(PreflightError, "api_failed") as caught:
        version(guest.api)
    assert part in caught.value.why


def test_the_parameters_that_were_refused_are_named(guest: Container) -> None:
    with fails(PreflightError, "api_failed") as caught:
        guest.api.post(*guest.path, "snapshot", snapname="1bad")
    assert "snapname:" in caught.value.why


# -- certificates ----------------------------------------------------------------------------------------------------


def test_the_pinned_certificate_is_enough(pve: FakePve, connect: Connect, fakepve_cafile: str) -> None:
    digits = fingerprint_of(fakepve_cafile)
    for spelling in (digits, digits.upper(), spelled(digits), f"SHA256:{spelled(digits)}"):
        for ca in (None, fakepve_cafile):
            assert version(connect(ca=ca, fingerprint=spelling)) == pve.version


@pytest.mark.parametrize("with_ca", [False, True])
def test_another_certificate_than_the_pinned(
    pve: FakePve, connect: Connect, fakepve_cafile: str, with_ca: bool
) -> None:
    wrong, right = "AB:" * 31 + "AB", spelled(fingerprint_of(fakepve_cafile))
    with fails(ConnectError, "certificate_untrusted") as caught:
        version(connect(ca=fakepve_cafile if with_ca else None, fingerprint=wrong))
    assert (caught.value.details["got"], caught.value.details["expected"]) == (right, wrong)
    assert right in caught.value.why and "stop and ask" in caught.value.fix
    assert not pve.requests, "the token was sent"


def test_a_certificate_that_nobody_vouches_for(
    pve: FakePve, connect: Connect, fakepve_cafile: str, tmp_path: Path
) -> None:
    other = make_cert(str(tmp_path), "other", ("127.0.0.1",))[0]
    for ca in (None, other):
        with fails(ConnectError, "certificate_untrusted") as caught:
            version(connect(ca=ca))
        assert "certificate" in caught.value.why
        assert caught.value.details["got"] == spelled(fingerprint_of(fakepve_cafile))
        assert "`pvenode cert info`" in caught.value.fix
    assert not pve.requests, "the token was sent"


def test_a_certificate_for_another_name(connect: Connect, tmp_path: Path) -> None:
    certificate, key, _ = make_cert(str(tmp_path))
    with https_answers(certificate, key, host="127.0.0.2") as port, fails(ConnectError, "certificate_untrusted") as it:
        version(connect(host="127.0.0.2", port=port, ca=certificate))
    assert "127.0.0.2" in it.value.why


def test_a_file_that_is_no_authority(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("hello\n")
    for ca in (tmp_path / "text.pem", tmp_path / "missing.pem"):
        with fails(UsageError, "inventory_invalid") as caught:
            connect(ca=str(ca))
        assert str(ca) in caught.value.why


def test_variables_change_nothing(pve: FakePve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nonexistent")
    assert version(connect()) == pve.version


# -- what is no Proxmox VE -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        {"body": b"<html>hello</html>"},
        {"body": b"[]"},
        {"body": b"null"},
        {"body": b"{}"},
        {"body": b'{"data": [1]}'},
        {"body": b'{"data": null}'},
        {"body": f'{{"data": "{SECRET}"}}'.encode()},
        {"body": b"null", "status": 500},
        {"body": b"\xff", "status": 404},
        {"body": b"", "status": 304},
    ],
)
def test_answers_that_are_not_proxmoxs(tmp_path: Path, answer: dict[str, Any]) -> None:
    with answering(tmp_path, **answer) as api:
        for ask in (lambda: api.mapping("version"), lambda: api.rows("nodes")):
            with fails(PreflightError, "api_failed"):
                ask()


def test_a_redirection_is_not_followed(tmp_path: Path) -> None:
    with (
        answering(tmp_path, status=302, Location="https://127.0.0.1:1/") as api,
        fails(ConnectError, "unreachable") as it,
    ):
        version(api)
    assert "redirection" in it.value.why


def test_nobody_listens(connect: Connect) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        with fails(ConnectError, "unreachable") as caught:
            version(connect(port=taken.getsockname()[1]))
    assert "refused" in caught.value.why


def test_a_name_that_nobody_knows(connect: Connect) -> None:
    with fails(ConnectError, "unreachable") as caught:
        version(connect(host="no-such-node.invalid"))
    assert "no-such-node.invalid" in caught.value.why and "pct.api.host" in caught.value.fix


def test_a_server_without_tls(connect: Connect) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as plain:

        def answer() -> None:
            accepted, _ = plain.accept()
            with accepted:
                accepted.recv(1)
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with fails(ConnectError, "unreachable") as caught:
            version(connect(port=plain.getsockname()[1]))
    assert "does not speak TLS" in caught.value.what


# -- the secret ------------------------------------------------------------------------------------------------------


def test_the_secret_is_fetched_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(token=Secret(env="T"))
    monkeypatch.setenv("T", SECRET)
    with closing(open_api(wanted, tmp_path)) as api:
        assert SECRET not in repr(api) and SECRET not in str(vars(api.asked)) and repr(api).endswith("=***)")
    for text in (f"{TOKEN_ID}={SECRET}", f"{SECRET}\nX-Header: 1", "ü" * 36):
        monkeypatch.setenv("T", text)
        with fails(UsageError, "secret_missing") as caught:
            open_api(wanted, tmp_path)
        assert text not in caught.value.why + caught.value.what


def test_an_answer_cannot_make_us_print_the_secret(pve: FakePve, guest: Container) -> None:
    pve.fail("GET", "/version", 500, f"you sent {SECRET}")
    with fails(PreflightError, "api_failed") as caught:
        version(guest.api)
    assert "you sent ***" in caught.value.why


@pytest.mark.parametrize("flags", [(), ("--json",), ("-vv",)])
def test_a_deploy_that_may_take_no_snapshot_changes_and_shows_nothing(
    pve: FakePve, fakepve_cafile: str, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    pve.acl = {TOKEN_ID: [("/vms/101", {"VM.Audit"})]}
    api = {"host": "127.0.0.1", "port": pve.port, "token_id": TOKEN_ID, "token": {"env": "DFO_PVE_TOKEN"}}
    api |= {"fingerprint": spelled(fingerprint_of(fakepve_cafile))}
    target = {"transport": "pct", "ssh": {"host": "192.0.2.1", "config": "none"}, "pct": {"container": 101, "api": api}}
    (tmp_path / "dfo.yaml").write_text(json.dumps({"version": 1, "targets": {"lab": target}}))
    argv = [sys.executable, "-m", "orchestrator", "deploy", "-i", str(tmp_path / "dfo.yaml"), "--ct-snapshot", *flags]
    environment = {**os.environ, "DFO_PVE_TOKEN": SECRET, "DFO_DEBUG": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=60, cwd=tmp_path)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "VM.Snapshot" in done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert not asked(pve, "POST")
