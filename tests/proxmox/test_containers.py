"""Into a container through its node, and on the node itself: what pct says, and what we make of it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from bench.container import Container
from bench.node import Node

from orchestrator.errors import ConnectError, DeadlineError, DfoError, LockError, PreflightError
from orchestrator.transport import Transport
from orchestrator.transport.pct import PctTransport

from .reach import CLIENTS, node_at, pct_to, quick, served, ssh_config, wait_until

client = pytest.mark.parametrize("client", CLIENTS)


def refused(transport: Transport) -> DfoError:
    with pytest.raises(DfoError) as caught:
        transport.run(("true",), deadline=30)
    return caught.value


# Inside


def test_the_environment_is_clean_and_complete(lab: Node) -> None:
    with pct_to(lab.ssh) as transport:
        environment = transport.run(("env",), deadline=30).stdout.decode().split("\n")
    values = dict(line.split("=", 1) for line in environment if line)
    assert {"HOME": "/root", "LC_ALL": "C.UTF-8"}.items() <= values.items()
    assert values["PATH"].startswith("/usr/local/sbin:/usr/local/bin:")
    assert not [name for name in values if name.startswith("SSH_")]


def test_with_keep_env_the_nodes_variables_come_along(lab: Node) -> None:
    transport = PctTransport(node_at(lab.ssh), 200, keep_env=True)
    done = transport.run(("printenv", "SSH_CONNECTION", "HOME"), deadline=30)
    assert done.stdout.decode().split("\n")[1:] == ["/root", ""] and b"127.0.0.1" in done.stdout
    transport.close()


@client
def test_a_user_with_a_sudo_rule_for_pct(node: Node, ct: Container, client: str) -> None:
    with pct_to(node.endpoint("dfo"), client=client, sudo=True) as transport:
        assert transport.label == "dfo@127.0.0.1, container 200"
        done = transport.run(
            ("sh", "-c", 'id -u; echo "$1"; cat; exit 5', "sh", "é '\"\n-"), stdin=[b"in"], deadline=30
        )
        assert (done.returncode, done.stdout.decode()) == (5, "0\né '\"\n-\nin")
        assert transport.node.status(200) == "running"


def test_a_signal_is_seen_though_old_lxc_loses_it(node: Node, ct: Container) -> None:
    with node.old_lxc(), pct_to(node.ssh) as transport:
        assert transport.run(("sh", "-c", "kill -9 $$"), deadline=30).returncode == -9


def test_a_locked_configuration_does_not_matter(node: Node, ct: Container) -> None:
    with node.config_lock(200, "backup"), node.locked(200), pct_to(node.ssh) as transport:
        assert transport.run(("true",), deadline=30).returncode == 0
        assert transport.node.config(200)["lock"] == "backup"


# What goes wrong


@client
def test_a_stopped_container(node: Node, client: str) -> None:
    node.create(200, start=False)
    with pct_to(node.ssh, client=client) as transport:
        error = refused(transport)
        assert (error.kind, error.exit_code) == ("container_stopped", 5)
        assert error.what == "container 200 is stopped"
        assert "`pct start 200`" in error.fix
        assert transport.node.status(200) == "stopped"


def test_a_container_that_does_not_exist(node: Node) -> None:
    with pct_to(node.ssh, 299) as transport:
        error = refused(transport)
        assert (error.kind, error.exit_code) == ("container_missing", 5)
        assert "`pct list`" in error.fix
        for ask in (transport.node.status, transport.node.config):
            with pytest.raises(PreflightError) as caught:
                ask(299)
            assert caught.value.kind == "container_missing"


def test_a_container_that_another_node_has(node: Node) -> None:
    node.container_elsewhere(201, "pve2")
    with pct_to(node.ssh, 201) as transport:
        error = refused(transport)
    assert (error.kind, error.details["node"]) == ("container_missing", "pve2")
    assert "`pve2`" in error.why and "`pve2`" in error.fix


def test_a_container_that_stops_in_the_middle(node: Node, ct: Container) -> None:
    with pct_to(node.ssh) as transport:
        with pytest.raises(ConnectError) as caught, transport.stream(("sh", "-c", "echo on; sleep 60")) as stream:
            for chunk in stream:
                if chunk:
                    ct.stop()
            stream.finish()
        assert caught.value.kind == "connection_lost"
        assert refused(transport).kind == "container_stopped"


def test_an_attach_that_hangs_meets_the_deadline(node: Node, ct: Container) -> None:
    started = time.monotonic()
    with node.hanging_attach(), pct_to(node.ssh) as transport, pytest.raises(DeadlineError):
        transport.run(("true",), deadline=2)
    assert time.monotonic() - started < 10


def test_a_cluster_that_is_down(node: Node, ct: Container) -> None:
    with node.cluster_down(), pct_to(node.ssh) as transport:
        error = refused(transport)
    assert (error.kind, error.exit_code) == ("cluster_not_ready", 5)
    assert "pve-cluster" in error.fix


def test_no_quorum_forbids_a_start_only(node: Node) -> None:
    ct = node.create(200)
    with node.no_quorum(), pct_to(node.ssh) as transport:
        assert transport.run(("true",), deadline=30).returncode == 0
        ct.stop()
        ended = transport.node.pct("start", "200", deadline=30)
        assert ended.returncode != 0
        assert transport.node.failed(200, ended).kind == "cluster_not_ready"


@pytest.mark.parametrize(
    ("user", "sudo", "what", "fix"),
    [
        ("guest", False, "`guest` may not run pct", "guest ALL=(root) NOPASSWD: /usr/sbin/pct"),
        ("dfo", False, "`dfo` may not run pct", "`ssh.sudo: true`"),
        ("guest", True, "`guest` may not become root", "guest ALL=(root) NOPASSWD: /usr/sbin/pct"),
    ],
)
def test_a_user_who_may_not(node: Node, ct: Container, user: str, sudo: bool, what: str, fix: str) -> None:
    with pct_to(node.endpoint(user), sudo=sudo) as transport:
        error = refused(transport)
    assert (error.kind, error.exit_code) == ("not_permitted", 5)
    assert what in error.what and fix in error.fix


def test_a_host_that_is_no_node(node: Node) -> None:
    (node.root / "usr/sbin/pct").unlink()
    with pct_to(node.ssh) as transport:
        error = refused(transport)
    assert error.kind == "remote_failed"
    assert error.what == "`127.0.0.1` has no pct"


def test_a_container_without_a_shell_environment(node: Node, ct: Container) -> None:
    """`sh` and `env` are all we need there; without them, that is what is said."""
    with ct.without("usr/bin/env"), pct_to(node.ssh) as transport:
        done = transport.run(("true",), deadline=30)
    assert done.returncode == 127 and b"env" in done.stderr


# On the node


@client
def test_a_file_goes_to_the_node_and_into_the_container(node: Node, ct: Container, client: str) -> None:
    data = bytes(range(256)) * 20_000
    with pct_to(node.ssh, client=client) as transport:
        with transport.node.private_folder() as folder:
            path = node.root / folder.lstrip("/")
            assert path.stat().st_mode & 0o777 == 0o700
            transport.node.put(f"{folder}/a file", [data[:1000], data[1000:]], deadline=30)
            assert (path / "a file").stat().st_mode & 0o777 == 0o600
            assert (path / "a file").read_bytes() == data
            assert transport.node.push(200, f"{folder}/a file", "/root/arrived", deadline=30) == ""
        assert not path.exists()
    assert (ct.root / "root/arrived").read_bytes() == data
    assert node.leftovers() == []


def test_what_pct_push_says_is_kept_though_it_exits_0(node: Node, ct: Container) -> None:
    with pct_to(node.ssh) as transport:
        said = transport.node.push(200, "/etc/hostname", "/no/such/folder/file", deadline=30)
        assert said == "failed to create file: /no/such/folder/file: No such file or directory"


def test_a_push_that_waits_for_a_lock(node: Node, ct: Container) -> None:
    with node.lock_patience(0.5), node.locked(200), pct_to(node.ssh) as transport, pytest.raises(LockError) as caught:
        transport.node.push(200, "/etc/hostname", "/root/x", deadline=30)
    assert (caught.value.kind, caught.value.exit_code) == ("lock_held", 6)
    assert caught.value.what == "container 200 is locked on `127.0.0.1`"
    with node.locked(200):
        node.run(["true"])
    with pct_to(node.ssh) as transport:
        assert transport.node.push(200, "/etc/hostname", "/root/x", deadline=30) == ""


def test_an_existing_file_is_not_overwritten(node: Node) -> None:
    with pct_to(node.ssh) as transport, pytest.raises(PreflightError) as caught:
        transport.node.put("/etc/hostname", [b"x"], deadline=30)
    assert "/etc/hostname" in caught.value.what
    assert (node.root / "etc/hostname").read_text() == "pve1\n"


@client
def test_a_full_disk_of_the_node(node: Node, client: str) -> None:
    with pct_to(node.ssh, client=client) as transport, transport.node.private_folder() as folder:
        with node.full_disk(free=100_000), pytest.raises(PreflightError) as caught:
            transport.node.put(f"{folder}/big", [bytes(1_000_000)], deadline=30)
        assert (caught.value.kind, caught.value.exit_code) == ("disk_full", 5)
    assert node.leftovers() == []


@client
def test_the_folder_goes_when_the_connection_does(node: Node, client: str) -> None:
    with pct_to(node.ssh, client=client) as transport, transport.node.private_folder() as folder:
        path = node.root / folder.lstrip("/")
        assert path.is_dir()
        node.sshd.drop()
        wait_until(lambda: not path.exists())


@client
def test_the_folder_goes_when_we_are_killed(node: Node, client: str) -> None:
    text = ssh_config(node.ssh, client).model_dump_json(exclude={"timeouts", "keepalive"})
    code = (
        "import sys, time\nfrom orchestrator.inventory.reach import SshConfig\n"
        "from orchestrator.transport.link import open_link\nfrom orchestrator.transport.node import Node\n"
        "link = open_link('lab', SshConfig.model_validate_json(sys.argv[1]), tell=print, trace=print)\n"
        "with Node(link).private_folder() as folder:\n    print('folder', folder, flush=True)\n    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, text], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while not (said := child.stdout.readline()).startswith("folder "):
        assert child.poll() is None
    path = node.root / said.split()[1].lstrip("/")
    assert path.is_dir()
    child.kill()
    child.wait()
    wait_until(lambda: not path.exists() and served(node) == 0)
    assert node.leftovers() == []


def test_a_chatty_login_profile_is_no_trouble(node: Node, ct: Container) -> None:
    """bash reads .bashrc for what sshd starts."""
    (node.root / "root/.bashrc").write_text("echo welcome: to the node; echo and more >&2\n")
    with pct_to(node.ssh) as transport:
        assert transport.node.status(200) == "running"
        with transport.node.private_folder() as folder:
            transport.node.put(f"{folder}/a", [b"data"], deadline=30)
            assert transport.node.push(200, f"{folder}/a", "/root/a", deadline=30).endswith("and more")
        assert transport.run(("cat", "/root/a"), deadline=30).stdout.endswith(b"data")


def test_a_slow_pct_is_only_slow(node: Node, ct: Container) -> None:
    with node.delay(0.5), pct_to(node.ssh, timeouts=quick()) as transport:
        started = time.monotonic()
        assert transport.run(("true",), deadline=30).returncode == 0
        assert time.monotonic() - started > 0.5
