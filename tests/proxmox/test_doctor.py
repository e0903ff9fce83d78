"""`dfo doctor` on the bench: everything passes on a healthy node, and every fault is found where it is."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from bench.container import Container
from bench.node import Node
from bench.relay import Relay
from cryptography.hazmat.primitives.asymmetric import dsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from orchestrator.doctor.look import inside as look_inside

from .doctor_site import examine, healthy_site, of, one_fails, one_warns, skipped
from .site import Site


@pytest.fixture
def site(node: Node, ct: Container, tmp_path: Path) -> Iterator[Site]:
    with healthy_site(node, ct, tmp_path) as made:
        yield made


# -- healthy -------------------------------------------------------------------------------------------------------


def test_a_healthy_node_passes_in_no_time_and_stays_as_it_is(site: Site) -> None:
    before = site.node.leftovers(), Path(site.node.ssh.known_hosts).read_bytes()
    with site.node.delay(0.5):  # what a call of the real pct takes
        seen = examine(site)
    assert of(seen, "failed", "warning") == {} and seen.code == 0
    assert len(of(seen, "ok")) >= 30 and seen.seconds < 4
    assert (site.node.leftovers(), Path(site.node.ssh.known_hosts).read_bytes()) == before
    assert not site.inside().exists()


def test_people_get_groups_marks_and_fixes(site: Site) -> None:
    with site.node.config_lock(200):
        done = site.dfo("doctor", "lab")
    lines = done.out.splitlines()
    assert [line for line in lines if not line.startswith(" ")][:3] == ["laptop", "hop root@127.0.0.1", "node"]
    assert "  ✓ state             running" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("  ! lock"))
    assert "`lock: backup`" in lines[at] and "fix: wait for that task" in lines[at + 1]
    assert any(line.startswith("  - driver, files on the node,") and "wants no GPU" in line for line in lines)
    assert "1 warning, 0 failed" in lines[-1] and "nothing was changed" in lines[-1]


@pytest.mark.parametrize("user", ["dfo", "root"])
def test_a_plain_user_with_a_sudo_rule_is_as_good(site: Site, user: str) -> None:
    site.targets["lab"] = site.target(site.node.endpoint(user), gpus=[], ssh={"sudo": True})
    assert of(examine(site), "failed", "warning") == {}


def test_a_container_with_an_sshd_of_its_own(site: Site) -> None:
    with site.container.sshd() as endpoint:
        site.targets["lab"] = site.target(endpoint, None, gpus=[])
        seen = examine(site)
    assert of(seen, "failed", "warning") == {}
    assert skipped(seen, "node") == {"the transport is `ssh`"}


# -- the way -------------------------------------------------------------------------------------------------------


def change_ssh(site: Site, **ssh: Any) -> None:
    site.targets["lab"] = site.target(site.node.ssh, gpus=[], ssh=ssh)


def test_a_name_that_nobody_knows(site: Site) -> None:
    change_ssh(site, host="no-such-host.invalid")
    seen = one_fails(site, "hop: name", "the name `no-such-host.invalid` is not known here", "ssh.host")
    assert skipped(seen, "node") == skipped(seen, "container")
    assert seen.checks["hop: login"][:2] == ("skipped", "the connection failed")


def test_nobody_listens(site: Site) -> None:
    site.node.sshd.stop()
    seen = one_fails(site, "hop: connection", "Connection refused", "start its sshd")
    assert skipped(seen, "node") == {"the connection of `127.0.0.1` failed"}


def test_something_that_says_no_word_of_ssh(site: Site, faulty_ssh: Callable[..., Any]) -> None:
    silent = faulty_ssh(banner_delay=30)
    site.targets["lab"] = site.target(silent.endpoint, gpus=[], ssh={"timeouts": {"banner": "1s"}})
    one_fails(site, "hop: connection", "no word of SSH")


CLIENTS = pytest.mark.parametrize("client", ["paramiko", "openssh"])


@CLIENTS
def test_a_changed_host_key(site: Site, client: str) -> None:
    change_ssh(site, client=client)
    assert of(examine(site), "failed", "warning") == {}
    site.node.sshd.new_host_key()
    one_fails(site, "hop: host key", "is not the one in", "dfo trust lab")


@CLIENTS
def test_a_new_host_key_is_told_and_not_accepted(site: Site, tmp_path: Path, client: str) -> None:
    own = tmp_path / "known_hosts_of_dfo"
    change_ssh(site, known_hosts=str(own), host_key_policy="accept-new", client=client)
    one_warns(site, "hop: host key", "nobody has compared it yet", "dfo trust lab")
    assert not own.exists()


@CLIENTS
def test_a_login_that_is_refused(site: Site, tmp_path: Path, client: str) -> None:
    import paramiko

    stranger = tmp_path / "stranger"
    paramiko.RSAKey.generate(2048).write_private_key_file(str(stranger))
    change_ssh(site, keys=[str(stranger)], client=client)
    one_fails(site, "hop: login", "refused user `root`", "ssh-copy-id")


def test_the_second_hop_is_named_when_it_fails(site: Site) -> None:
    way = site.node.ssh
    change_ssh(site, jump=[f"root@127.0.0.1:{way.port}"], host="127.0.0.2", port=1)
    seen = examine(site)
    failed = of(seen, "failed")
    assert list(failed) == ["hop: connection"] and "the hop before it cannot connect" in failed["hop: connection"][1]


def test_a_key_that_others_may_read(site: Site, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(Path(site.node.ssh.key).read_bytes())
    key.chmod(0o644)
    change_ssh(site, keys=[str(key)])
    one_warns(site, "laptop: key files", "has mode 0644", f"chmod 600 {key}")


@pytest.mark.filterwarnings("ignore:SSH DSA")
def test_a_key_of_a_kind_that_nobody_uses_any_more(site: Site, tmp_path: Path) -> None:
    old = tmp_path / "id_dsa"
    secret = dsa.generate_private_key(1024)
    old.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    old.chmod(0o600)
    change_ssh(site, keys=[str(old), str(site.node.ssh.key)])
    one_warns(site, "laptop: key files", "id_dsa cannot be used: paramiko does not know its kind", "private half")


# -- the node ------------------------------------------------------------------------------------------------------


def test_a_slow_and_chatty_login_shell(site: Site) -> None:
    (site.node.root / "root/.bashrc").write_text("sleep 0.5\necho Welcome to pve1\n")
    seen = examine(site)
    warned = of(seen, "warning")
    assert set(warned) == {"node: login shell", "node: quiet shell"} and seen.code == 0
    assert "ms of them in the login shell" in warned["node: login shell"][1]
    assert "Welcome to pve1" in warned["node: quiet shell"][1]


def test_a_far_node(site: Site, relay: Callable[..., Relay]) -> None:
    far = relay(site.node.ssh, delay=0.2)
    site.targets["lab"] = site.target(far.endpoint, gpus=[])
    one_warns(site, "node: latency", "every step takes several")


def test_a_user_without_rights(site: Site) -> None:
    site.targets["lab"] = site.target(site.node.endpoint("guest"), gpus=[])
    seen = one_fails(site, "node: rights", "may not run pct", "sudoers")
    assert len(skipped(seen, "container")) == 1
    site.targets["lab"] = site.target(site.node.endpoint("guest"), gpus=[], ssh={"sudo": True})
    one_fails(site, "node: rights", "may not become root", "/etc/sudoers.d/dfo-guest")


def test_a_host_that_is_no_node(site: Site) -> None:
    site.targets["lab"]["pct"]["path"] = "/usr/sbin/no-pct"
    one_fails(site, "node: rights", "there is no /usr/sbin/no-pct", "pct.path")


def test_a_container_on_another_node_and_one_on_none(site: Site) -> None:
    site.node.container_elsewhere(201)
    for vmid, saw in ((201, "the cluster has it on node `pve2`"), (202, "has no configuration for it")):
        site.targets["lab"] = site.target(site.node.ssh, vmid, gpus=[])
        seen = one_fails(site, "node: container", saw)
        assert skipped(seen, "container") == {f"container {vmid} does not exist on `127.0.0.1`"}


def test_a_stopped_container(site: Site) -> None:
    site.container.stop()
    seen = one_fails(site, "node: state", "container 200 is stopped", "pct start 200")
    assert skipped(seen, "container") == {"container 200 is stopped"}


def test_no_quorum_and_no_cluster(site: Site) -> None:
    with site.node.no_quorum():
        one_fails(site, "node: quorum", "cannot be started again", "pvecm status")
    with site.node.cluster_down():
        one_fails(site, "node: quorum", "Connection refused", "pve-cluster")


def test_somebody_at_work(site: Site) -> None:
    with site.node.locked(200):
        one_warns(site, "node: at work", "holds its lock: a push waits 10 s", "ps -fp ")
    with site.node.config_lock(200, "snapshot"):
        one_warns(site, "node: lock", "`lock: snapshot`", "pct unlock 200")


@pytest.mark.parametrize(
    ("before", "after", "name", "saw"),
    [
        ("features: nesting=1\n", "", "node: nesting", "226/NAMESPACE"),
        ("unprivileged: 1\n", "", "node: privileges", "root in it is root on the node"),
        ("memory: 2048\n", "memory: 256\n", "node: memory given", "256 MiB"),
    ],
)
def test_a_configuration_to_look_at(site: Site, before: str, after: str, name: str, saw: str) -> None:
    config = site.container.config
    config.write_text(config.read_text().replace(before, after))
    one_warns(site, name, saw, "")


def test_a_full_node(site: Site) -> None:
    with site.node.full_disk(free=50_000_000):
        one_fails(site, "node: node disk", "the cluster's database", "du -xsh")


# -- the container -------------------------------------------------------------------------------------------------


def test_a_container_without_python(site: Site) -> None:
    with site.container.without("usr/bin/python3*"):
        seen = one_fails(site, "container: answers", "cannot be run", "install Python there")
    assert seen.checks["container: clock"][:2] == ("skipped", "nothing answers there")


def test_an_exec_that_hangs_ends_by_our_own_deadline(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_inside, "DEADLINE", 1.5)
    started = time.monotonic()
    with site.node.hanging_attach():
        one_fails(site, "container: answers", "our own deadline", "check the load")
    assert time.monotonic() - started < 15


def test_a_container_without_torch(site: Site) -> None:
    with site.container.without("usr/lib/python3/dist-packages/torch"):
        one_fails(site, "container: modules", "no torch: the trainer imports them", "-m pip install torch")


def test_a_unit_that_failed(site: Site) -> None:
    site.container.run(["systemd-run", "--unit=broken", "--wait", "false"], check=False)
    one_warns(site, "container: init", "systemd is degraded: broken.service failed", "systemctl status broken.service")


def place(situation: str) -> Callable[[Site], AbstractContextManager[None]]:
    """What is wrong with a folder of the container."""
    return {
        "read-only root": lambda site: site.container.read_only(site.root),
        "full": lambda site: site.container.small(site.root, "1m"),
        "no inodes": lambda site: site.container.small(site.root, "700m,nr_inodes=20"),
        "small tmp": lambda site: site.container.small("/tmp", "1m"),
        "small shm": lambda site: site.container.small("/dev/shm", "8m"),
        "clock": lambda site: site.container.clock(3600),
    }[situation]


@pytest.mark.parametrize(
    ("situation", "name", "saw"),
    [
        ("read-only root", "container: folder", "is read-only"),
        ("full", "container: disk", "free of 1.0 MB"),
        ("no inodes", "container: inodes", "inodes free"),
        ("small tmp", "container: tmp", "free of 1.0 MB under /tmp"),
        ("clock", "container: clock", "59 min ahead of this machine's"),
    ],
)
def test_a_place_that_does_not_do(site: Site, situation: str, name: str, saw: str) -> None:
    with place(situation)(site):
        one_fails(site, name, saw)


def test_a_small_shared_memory(site: Site) -> None:
    with place("small shm")(site):
        one_warns(site, "container: shared memory", "8.4 MB", "remount,size=8g")


def test_ctrl_c_ends_it_although_a_step_hangs(site: Site) -> None:
    with site.node.hanging_attach():
        process = site.process("doctor", "lab", "--no-progress")
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Interrupted" in err
    assert time.monotonic() - started < 5


def test_sudo_that_asks_in_a_container_with_an_sshd(site: Site) -> None:
    with site.container.sshd() as endpoint:
        site.targets["lab"] = site.target(endpoint, None, gpus=[], ssh={"sudo": True})
        one_fails(site, "container: answers", "sudo")
