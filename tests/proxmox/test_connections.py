"""What can go wrong on the way to a host, and what is said about it: real sshds, relays, an SSH server with faults."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench.faulty_ssh import FaultySsh
from bench.node import Node
from bench.relay import Relay
from bench.sshd import Endpoint, make_key

from orchestrator.errors import ConnectError, DeadlineError, DfoError, PreflightError
from orchestrator.transport import Transport
from orchestrator.transport.trust import look

from .reach import CLIENTS, quick, served, ssh_config, ssh_to, wait_until

client = pytest.mark.parametrize("client", CLIENTS)


def refused(endpoint: Endpoint, client: str = "paramiko", **more: object) -> DfoError:
    """The error of a first command."""
    with ssh_to(endpoint, client, **more) as transport, pytest.raises(DfoError) as caught:
        transport.run(("true",), deadline=20)
    return caught.value


def works(endpoint: Endpoint, client: str, **more: object) -> None:
    with ssh_to(endpoint, client, **more) as transport:
        assert transport.run(("echo", "hi"), deadline=20).stdout == b"hi\n"


# Reaching it


@client
def test_nobody_listens(lab: Node, client: str) -> None:
    error = refused(replace(lab.ssh, port=1), client)
    assert (error.kind, error.exit_code) == ("unreachable", 4)
    assert error.what == "cannot reach `127.0.0.1` (127.0.0.1:1)"
    assert "refused" in error.why


@client
def test_a_name_that_nobody_knows(lab: Node, client: str) -> None:
    error = refused(replace(lab.ssh, host="no-such-host.invalid"), client)
    assert error.kind == "unreachable"
    assert "no-such-host.invalid" in error.why


@client
def test_a_server_that_says_nothing(faulty_ssh: Callable[..., FaultySsh], client: str) -> None:
    started = time.monotonic()
    error = refused(faulty_ssh(banner_delay=60).endpoint, client, timeouts=quick())
    assert error.kind == "unreachable"
    assert time.monotonic() - started < 12


def test_a_server_that_is_slow_is_waited_for(faulty_ssh: Callable[..., FaultySsh]) -> None:
    works(faulty_ssh(banner_delay=1).endpoint, "paramiko")


@client
def test_a_dead_network(lab: Node, relay: Callable[..., Relay], client: str) -> None:
    way = relay(lab.ssh)
    with way.black_hole():
        error = refused(way.endpoint, client, timeouts=quick())
    assert error.kind == "unreachable"


def test_a_host_alias_of_ssh(lab: Node, tmp_path: Path) -> None:
    """`host: pve1` works as in `ssh pve1`."""
    here = lab.ssh
    lines = ["Host pve1", f"HostName {here.host}", f"Port {here.port}", "User root", f"IdentityFile {here.key}"]
    lines += [f"UserKnownHostsFile {here.known_hosts}"]
    (tmp_path / "config").write_text("\n".join(lines) + "\n")
    for name in CLIENTS:
        bare = {"port": None, "user": None, "keys": [], "known_hosts": str(tmp_path / "none")}
        works(replace(here, host="pve1"), name, config=str(tmp_path / "config"), **bare)


@client
def test_what_else_ssh_is_told_to_do_is_not_done(lab: Node, client: str, tmp_path: Path) -> None:
    """A shared master, a forwarded agent, a command and a terminal of the user's own configuration."""
    lines = ["ControlMaster auto", f"ControlPath {tmp_path}/shared", "ForwardAgent yes", "RequestTTY force"]
    lines += ["RemoteCommand echo theirs", "LocalForward 9 localhost:9", "StrictHostKeyChecking no"]
    (tmp_path / "config").write_text("\n  ".join(["Host *", *lines]) + "\n")
    with ssh_to(lab.ssh, client, config=str(tmp_path / "config")) as transport:
        done = transport.run(("sh", "-c", "echo ours; printenv SSH_AUTH_SOCK; tty"), deadline=20)
        assert done.stdout == b"ours\nnot a tty\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config"]
    nobody = str(tmp_path / "none")
    assert refused(lab.ssh, client, config=str(tmp_path / "config"), known_hosts=nobody).kind == "host_key_unknown"


# Host keys


@client
def test_a_changed_host_key(node: Node, client: str) -> None:
    works(node.ssh, client)
    before = fingerprint(node.ssh.host_key)
    node.sshd.new_host_key()
    node.sshd.restart()
    for policy in ("strict", "accept-new"):
        error = refused(node.ssh, client, host_key_policy=policy)
        assert (error.kind, error.exit_code) == ("host_key_mismatch", 4)
        assert before in error.why and fingerprint(node.ssh.host_key) in error.why
        assert "`dfo trust lab`" in error.fix


@client
def test_an_unknown_host_key(lab: Node, client: str, tmp_path: Path) -> None:
    mine = tmp_path / "deep" / "known hosts"
    error = refused(lab.ssh, client, known_hosts=str(mine))
    assert error.kind == "host_key_unknown"
    assert fingerprint(lab.ssh.host_key) in error.why
    assert "`dfo trust lab`" in error.fix
    told: list[str] = []
    works(lab.ssh, client, known_hosts=str(mine), host_key_policy="accept-new", tell=told.append)
    assert fingerprint(lab.ssh.host_key) in told[0]
    assert mine.read_text().strip() == f"[127.0.0.1]:{lab.ssh.port} {lab.ssh.host_key}"
    works(lab.ssh, client, known_hosts=str(mine))


@client
def test_a_pinned_host_key(lab: Node, client: str, tmp_path: Path) -> None:
    nothing = {"known_hosts": str(tmp_path / "none")}
    works(lab.ssh, client, host_key=[fingerprint(lab.ssh.host_key)], **nothing)
    other = f"SHA256:{'A' * 43}"
    error = refused(lab.ssh, client, host_key=[other])
    assert error.kind == "host_key_mismatch"
    assert other in error.why and fingerprint(lab.ssh.host_key) in error.why
    assert not (tmp_path / "none").exists()


@client
def test_an_impostor(faulty_ssh: Callable[..., FaultySsh], client: str) -> None:
    server = faulty_ssh(other_host_key=True)
    assert refused(server.endpoint, client).kind == "host_key_mismatch"
    assert server.commands == []


def fingerprint(public: str) -> str:
    shown = subprocess.run(["ssh-keygen", "-lf", "-"], input=public, capture_output=True, text=True, check=True)
    return shown.stdout.split()[1]


# Logging in


@client
def test_a_key_that_is_not_accepted(lab: Node, client: str, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    error = refused(lab.ssh, client, keys=[str(tmp_path / "other")])
    assert (error.kind, error.exit_code) == ("login_refused", 4)
    assert error.what == "`127.0.0.1` refused user `root`"
    assert str(tmp_path / "other") in error.why
    assert "ssh-copy-id" in error.fix


def test_the_right_key_may_come_second(lab: Node, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    works(lab.ssh, "paramiko", keys=[str(tmp_path / "other"), str(tmp_path / "missing"), str(lab.ssh.key)])


def test_a_key_with_a_passphrase_is_for_the_agent(lab: Node, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    (tmp_path / "broken").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n")
    error = refused(lab.ssh, keys=[str(tmp_path / "missing"), str(tmp_path / "broken"), str(locked)])
    assert error.kind == "login_refused"
    assert f"{locked} has a passphrase" in error.why and f"there is no {tmp_path / 'missing'}" in error.why
    assert f"`ssh-add {locked}`" in error.fix


@client
def test_the_agent(lab: Node, client: str, agent: Callable[[Path], None]) -> None:
    assert refused(lab.ssh, client, keys=[], agent=True).kind == "login_refused"
    agent(lab.ssh.key)
    works(lab.ssh, client, keys=[], agent=True)
    assert refused(lab.ssh, client, keys=[], agent=False).kind == "login_refused"


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """An ssh-agent of the test's own, empty at first."""
    started = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    values = dict(part.split("=") for part in started.replace(";", " ").split() if "=" in part)
    monkeypatch.setenv("SSH_AUTH_SOCK", values["SSH_AUTH_SOCK"])
    yield lambda key: subprocess.run(["ssh-add", "-q", key], check=True) and None
    os.kill(int(values["SSH_AGENT_PID"]), signal.SIGTERM)


def test_an_agent_that_is_gone_is_no_obstacle(lab: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "nobody"))
    works(lab.ssh, "paramiko", agent=True)


def test_an_agent_that_hangs_is_not_waited_for(lab: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "mute"))
        started = time.monotonic()
        assert refused(lab.ssh, agent=True, timeouts=quick()).kind == "unreachable"
        assert time.monotonic() - started < 15


@client
def test_a_user_without_a_shell(node: Node, client: str) -> None:
    passwd = node.root / "etc/passwd"
    passwd.write_text(passwd.read_text().replace("/home/guest:/bin/sh", "/home/guest:/usr/sbin/nologin"))
    error = refused(node.endpoint("guest"), client)
    assert (error.kind, error.exit_code) == ("not_permitted", 5)
    assert "login shell" in error.why


# Hops


@client
def test_through_a_jump_host(lab: Node, node: Node, client: str, tmp_path: Path) -> None:
    both = known_by(tmp_path, lab, node)
    more = {"jump": [f"root@127.0.0.1:{lab.ssh.port}"], "keys": [str(lab.ssh.key), str(node.ssh.key)], **both}
    with ssh_to(node.ssh, client, **more) as transport:
        done = transport.run(("sh", "-c", "echo $SSH_CONNECTION; sha256sum"), stdin=[b"x" * 5_000_000], deadline=30)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2


@client
def test_the_hop_that_fails_is_named(lab: Node, node: Node, client: str, tmp_path: Path) -> None:
    both = known_by(tmp_path, node)
    jump = [f"root@localhost:{lab.ssh.port}"]
    error = refused(node.ssh, client, jump=jump, keys=[str(lab.ssh.key), str(node.ssh.key)], **both)
    assert error.kind == "host_key_unknown"
    assert "`localhost`" in error.what and fingerprint(lab.ssh.host_key) in error.why


@client
def test_a_jump_host_that_cannot_go_on(lab: Node, client: str) -> None:
    error = refused(replace(lab.ssh, port=1), client, jump=[f"root@127.0.0.1:{lab.ssh.port}"])
    assert error.kind == "unreachable"


def known_by(folder: Path, *nodes: Node) -> dict[str, str]:
    lines = [f"[127.0.0.1]:{node.ssh.port} {node.ssh.host_key}\n" for node in nodes]
    (folder / "both").write_text("".join(lines))
    return {"known_hosts": str(folder / "both")}


def test_a_proxy_command_brings_in_the_ssh_program(lab: Node, node: Node, tmp_path: Path) -> None:
    proxy = " ".join([*lab.ssh.command()[:-1], "-W", "%h:%p", "root@127.0.0.1"])
    (tmp_path / "config").write_text(f"Host pve1\n  HostName 127.0.0.1\n  ProxyCommand {proxy}\n")
    told: list[str] = []
    here = replace(node.ssh, host="pve1")
    works(here, "auto", config=str(tmp_path / "config"), tell=told.append)
    assert told == ["`pve1` is reached with the ssh program: ~/.ssh/config asks for ProxyCommand"]
    seen, _ = look("lab", ssh_config(here, config=str(tmp_path / "config")), lambda seen: False)
    assert [(one.fingerprint, one.state) for one in seen] == [(fingerprint(node.ssh.host_key), "known")]


# Losing it


@client
def test_a_dropped_connection_is_told_and_the_next_command_connects_again(node: Node, client: str) -> None:
    with ssh_to(node.ssh, client) as transport:
        with pytest.raises(ConnectError) as caught, transport.stream(("sh", "-c", "echo on; sleep 60")) as stream:
            for chunk in stream:
                if chunk:
                    node.sshd.drop()
            stream.finish()
        assert caught.value.kind == "connection_lost"
        assert transport.run(("echo", "back"), deadline=20).stdout == b"back\n"


@client
@pytest.mark.parametrize("direction", ["cut_up", "cut_down"])
def test_cut_at_any_byte(lab: Node, relay: Callable[..., Relay], client: str, direction: str) -> None:
    """Wherever it breaks, it is a ConnectError, soon, and nothing is taken for an answer that is none."""
    payload = os.urandom(300_000)
    dice = random.Random(f"{client} {direction}")
    for position in sorted(dice.randrange(1, 300_000) for _ in range(10)):
        way = relay(lab.ssh, **{direction: position})
        started = time.monotonic()
        with ssh_to(way.endpoint, client) as transport, pytest.raises(ConnectError) as caught:
            transport.run(("cat",), stdin=[payload], deadline=20)
        assert caught.value.kind in ("connection_lost", "unreachable"), position
        assert time.monotonic() - started < 15, position
        way.close()


@client
def test_a_stalled_connection_meets_the_deadline(lab: Node, relay: Callable[..., Relay], client: str) -> None:
    way = relay(lab.ssh)
    with ssh_to(way.endpoint, client) as transport:
        transport.run(("true",), deadline=10)
        started = time.monotonic()
        with way.black_hole(), pytest.raises(DeadlineError):
            transport.run(("cat",), stdin=[bytes(30_000_000)], deadline=2)
        assert time.monotonic() - started < 10


def test_a_server_that_stops_in_the_middle(faulty_ssh: Callable[..., FaultySsh]) -> None:
    stalled = faulty_ssh(stall_after=1000)
    with ssh_to(stalled.endpoint) as transport, pytest.raises(DeadlineError):
        transport.run(("head", "-c", "100000", "/dev/zero"), deadline=2)
    cut = faulty_ssh(cut_after=1000)
    with ssh_to(cut.endpoint) as transport, pytest.raises(ConnectError) as caught:
        transport.run(("head", "-c", "100000", "/dev/zero"), deadline=20)
    assert caught.value.kind == "connection_lost"


@client
def test_too_few_channels_are_named(node: Node, client: str) -> None:
    """The master of the ssh program holds one itself."""
    node.sshd.configure(f"MaxSessions {1 + CLIENTS.index(client)}")
    with ssh_to(node.ssh, client) as transport, transport.stream(("sh", "-c", "echo on; sleep 60")) as first:
        assert next(iter(first)) == b"on\n"
        with pytest.raises(ConnectError) as caught:
            transport.run(("true",), deadline=10)
        assert (caught.value.kind, "MaxSessions" in caught.value.why) == ("connection_lost", True)


# Leaving


@client
def test_a_command_ends_with_its_reader(lab: Node, client: str) -> None:
    """sshd itself would let it run on until it writes again."""
    with ssh_to(lab.ssh, client) as transport:
        with pytest.raises(DeadlineError):
            transport.run(("sleep", "4711"), deadline=0.5)
        wait_until(lambda: b"sleep 4711" not in lab.run(["ps", "axo", "args"]).stdout, 5)


@client
def test_nothing_stays_after_a_kill(node: Node, client: str) -> None:
    """SIGKILL of the laptop's process: its connection ends, and no ssh process of ours lives on."""
    config = ssh_config(node.ssh, client)
    code = (
        "import sys\nfrom orchestrator.inventory.reach import SshConfig\n"
        "from orchestrator.transport.link import open_link\nfrom orchestrator.transport.shell import RemoteTransport\n"
        "link = open_link('lab', SshConfig.model_validate_json(sys.argv[1]), tell=print, trace=print)\n"
        "with RemoteTransport(link).stream(('sh', '-c', 'echo on; cat')) as stream:\n"
        "    for chunk in stream:\n        print(chunk, flush=True)\n"
    )
    text = config.model_dump_json(exclude={"timeouts", "keepalive"})
    child = subprocess.Popen([sys.executable, "-c", code, text], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while "b'on" not in child.stdout.readline():
        assert child.poll() is None
    assert served(node) == 1
    child.kill()
    child.wait()
    wait_until(lambda: served(node) == 0)


def test_closing_twice_is_fine(lab: Node) -> None:
    for name in CLIENTS:
        with ssh_to(lab.ssh, name) as transport:
            transport.run(("true",), deadline=10)
            transport.close()


# sudo


@client
def test_sudo_for_everything_needs_a_rule_for_everything(node: Node, client: str) -> None:
    error = refused(node.endpoint("dfo"), client, sudo=True)
    assert isinstance(error, PreflightError)
    assert (error.kind, error.exit_code) == ("not_permitted", 5)
    assert "`dfo` may not become root" in error.what
    assert "NOPASSWD: ALL" in error.fix
    (node.root / "etc/sudoers.d/all").write_text("dfo ALL=(root) NOPASSWD: ALL\n")
    with ssh_to(node.endpoint("dfo"), client, sudo=True) as transport:
        done = transport.run(("sh", "-c", "id -u; echo $HOME $LC_ALL; cat; exit 7"), stdin=[b"in"], deadline=20)
    assert (done.returncode, done.stdout) == (7, b"0\n/root C.UTF-8\nin")


def label(transport: Transport) -> str:
    return transport.label


def test_labels(lab: Node) -> None:
    with ssh_to(lab.ssh) as plain, ssh_to(lab.ssh, sudo=True) as root:
        assert (label(plain), label(root)) == ("root@127.0.0.1", "root@127.0.0.1 with sudo")
