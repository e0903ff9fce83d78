"""Whatever goes wrong on the way into a container: the right words and exit code, the current release as it was, and
nothing left on the node and in the container.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.node import Node
from bench.relay import Relay
from bench.sshd import make_key

from orchestrator.deploy import method, planning

from .site import Site, site_on


@pytest.fixture
def site(lab: Node, tmp_path: Path) -> Iterator[Site]:
    """One release is deployed, and the project has moved on."""
    with site_on(lab, tmp_path) as fresh:
        fresh.deploy()
        fresh.change()
        yield fresh


@pytest.fixture
def untouched(site: Site) -> Iterator[None]:
    """For a fault: the release from before it is current and whole, and nothing is left anywhere."""
    before, files = site.current, site.whole()
    yield
    assert site.current == before and site.whole() == files
    site.is_clean()


@pytest.fixture
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan sees no obstacle; it comes up afterwards."""
    monkeypatch.setattr(method, "_obstacle", lambda *_: None)


# The container


@pytest.mark.usefixtures("untouched")
def test_it_does_not_exist(site: Site) -> None:
    site.targets["lab"]["pct"]["container"] = 333
    error = site.refused()
    assert (error.kind, error.code, error.what) == (
        "container_missing", 5, "container 333 does not exist on `127.0.0.1`",
    )  # fmt: skip


@pytest.mark.usefixtures("untouched")
def test_it_is_on_another_node(site: Site) -> None:
    site.node.container_elsewhere(334)
    site.targets["lab"]["pct"]["container"] = 334
    error = site.refused()
    assert (error.kind, error.code) == ("container_missing", 5)
    assert error.why == "the cluster has it on node `pve2`" and error.fix == "set `ssh.host` to `pve2`"


def test_it_stops_in_the_middle(node: Node, tmp_path: Path) -> None:
    node.create(200)
    with site_on(node, tmp_path) as site, node.delay(0.5):
        before = site.deploy()["release"]
        site.change()
        doomed = site.process("deploy", "lab")
        limit = time.monotonic() + 20
        while not list(site.inside("tmp").glob("pushed-*")) and time.monotonic() < limit:
            time.sleep(0.01)
        site.container.stop()
        out = doomed.communicate(timeout=60)[1].decode()
        assert doomed.returncode in (4, 5) and "error: container 200" in out
        site.container.start()
        assert site.current == before and site.whole()
        # Its process numbers mean nothing after the start, so the lock's heartbeat has to run out first.
        error = site.refused()
        assert error.kind == "lock_held" and "`--lock-wait" in error.fix
        site.container.run(["touch", "-d", "2 minutes ago", f"{site.root}/lock/beat"])
        site.deploy()
        site.is_deployed()


@pytest.mark.usefixtures("untouched")
def test_it_has_no_python(site: Site) -> None:
    with site.container.without("usr/bin/python3*"):
        error = site.refused()
    assert (error.kind, error.code, error.what) == ("no_python", 5, "`python3` cannot be run on `lab`")


@pytest.mark.parametrize("offset", [100_000, -100_000])
def test_its_clock_is_wrong(site: Site, offset: int) -> None:
    before = site.current
    with site.container.clock(offset):
        assert site.deploy()["previous"] == before
        site.is_deployed()
    site.change()
    site.deploy()
    site.is_deployed()


# Locks


def test_somebody_holds_the_config_lock(site: Site) -> None:
    with site.node.locked(200):
        plan = site.dfo("deploy", "lab", "-n").out
        assert "method    stream: `flock` (pid " in plan and "holds the config lock of container 200\n" in plan
        assert site.deploy()["plan"]["method"] == "stream"
    site.is_deployed()


@pytest.mark.usefixtures("untouched")
def test_somebody_holds_it_and_only_a_push_will_do(site: Site) -> None:
    with site.node.locked(200), site.node.lock_patience(0.2):
        error = site.refused("--method", "pct-push")
    assert (error.kind, error.code, error.what) == ("lock_held", 6, "container 200 is locked on `127.0.0.1`")
    assert "got timeout" in error.why


@pytest.mark.usefixtures("unforeseen")
def test_somebody_takes_it_after_the_plan(site: Site) -> None:
    with site.node.locked(200), site.node.lock_patience(0.2):
        done = site.dfo("deploy", "lab")
    assert done.code == 0 and "sending it through stdin instead" in done.err
    site.is_deployed()


def test_a_backup_is_no_obstacle(site: Site) -> None:
    with site.node.config_lock(200, "backup"):
        assert site.deploy()["plan"]["method"] == "pct-push"
    site.is_deployed()


def test_two_deploys_at_once(site: Site) -> None:
    with site.node.delay(1.0):
        both = [site.process("deploy", "lab") for _ in range(2)]
        words = {one.returncode: out for one in both if (out := one.communicate(timeout=60)[1].decode())}
    assert words.keys() in ({0, 6}, {0, 7})
    lost = words[max(words)]
    assert "another deploy to `lab` is running" in lost or "the target changed after the plan was made" in lost
    site.is_deployed()


# Disks


@pytest.mark.usefixtures("untouched")
def test_the_disk_of_the_container_is_full(site: Site) -> None:
    with site.container.full(free=100_000):
        error = site.refused()
    assert (error.kind, error.code) == ("disk_full", 5)
    assert f"on `lab` under `{site.root}`" in error.what or "not enough space" in error.what


def test_there_is_room_for_the_release_but_not_for_the_archive_beside_it(site: Site) -> None:
    with site.container.small(f"{site.root}-small", "700k"):
        site.root += "-small"
        site.targets["lab"]["deploy"]["root"] = site.root
        plan = site.deploy()["plan"]
        assert plan["method_reason"] == "container 200 has no room for the archive beside the release"
        site.is_deployed()


def test_the_disk_of_the_container_fills_up_meanwhile(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_check_space", lambda *_: None)
    monkeypatch.setattr("orchestrator.deploy.release.space_needed", lambda _: 0)
    site.root += "-small"
    site.targets["lab"]["deploy"]["root"] = site.root
    with site.container.small(site.root, "900k"):
        site.deploy()
        site.change()
        before = site.current
        site.container.run(["fallocate", "-l", "200k", f"{site.root}/.filler"])
        error = site.refused()
        assert (error.kind, error.code, error.what) == ("disk_full", 5, f"no space left under `{site.root}`")
        assert site.current == before and site.whole()
        site.is_clean()


@pytest.mark.usefixtures("untouched")
def test_the_target_is_read_only(site: Site) -> None:
    with site.container.read_only(site.root):
        error = site.refused()
    assert (error.kind, error.code) == ("read_only", 5)


def test_the_disk_of_the_node_is_full(site: Site) -> None:
    with site.node.full_disk(free=150_000):
        plan = site.deploy()["plan"]
        assert plan["method"] == "stream" and "free in /var/tmp" in plan["method_reason"]
        site.is_deployed()


@pytest.mark.usefixtures("untouched")
def test_the_disk_of_the_node_is_full_and_only_a_push_will_do(site: Site) -> None:
    with site.node.full_disk(free=150_000):
        error = site.refused("--method", "pct-push")
    assert (error.kind, error.code) == ("disk_full", 5)
    assert "on `root@127.0.0.1`" in error.what and "stream" in error.fix


@pytest.mark.usefixtures("unforeseen")
def test_the_disk_of_the_node_fills_up_after_the_plan(site: Site) -> None:
    with site.node.full_disk(free=150_000):
        done = site.dfo("deploy", "lab")
    assert done.code == 0 and "No space left on device); sending it through stdin instead" in done.err
    site.is_deployed()


def test_a_push_that_lies(site: Site) -> None:
    with site.node.push_truncated(1000):
        done = site.dfo("deploy", "lab")
    assert done.code == 0, done.err
    assert "`pct push` into container 200 said it worked, and did not" in done.err
    assert "1,000 of 3" in done.err and "sending it through stdin instead" in done.err
    site.is_deployed()


@pytest.mark.usefixtures("untouched")
def test_a_push_that_lies_and_only_a_push_will_do(site: Site) -> None:
    with site.node.push_truncated(1000):
        error = site.refused("--method", "pct-push")
    assert (error.kind, error.code) == ("truncated", 7)
    assert error.why.startswith("1,000 of 3") and "`--method stream`" in error.fix


# The way there


@pytest.mark.usefixtures("untouched")
def test_the_host_key_has_changed(site: Site, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    (tmp_path / "known").write_text(f"[127.0.0.1]:{site.node.ssh.port} {other}\n")
    site.targets["lab"]["ssh"]["known_hosts"] = str(tmp_path / "known")
    error = site.refused()
    assert (error.kind, error.code) == ("host_key_mismatch", 4) and "`dfo trust lab`" in error.fix


@pytest.mark.usefixtures("untouched")
def test_the_key_is_refused(site: Site, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    site.targets["lab"]["ssh"]["keys"] = [str(tmp_path / "other")]
    error = site.refused()
    assert (error.kind, error.code) == ("login_refused", 4)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("sudo", [True, False])
def test_the_user_may_not_run_pct(site: Site, sudo: bool) -> None:
    site.targets["lab"] = site.target(site.node.endpoint("guest"), ssh={"sudo": sudo})
    error = site.refused()
    assert (error.kind, error.code) == ("not_permitted", 5)
    assert "guest ALL=(root) NOPASSWD: /usr/sbin/pct" in error.fix


@pytest.mark.parametrize("seed", [1, 2])
def test_the_connection_is_cut_at_any_byte(site: Site, relay: Callable[..., Relay], seed: int) -> None:
    way = relay(site.node.ssh)
    site.targets["lab"] = site.target(way.endpoint)
    site.deploy()
    dice, whole_way = random.Random(seed), way.bytes_up
    for position in sorted(dice.randrange(1, int(whole_way * 0.97)) for _ in range(10)):
        site.change()
        before = site.current
        cut = relay(site.node.ssh, cut_up=position)
        site.targets["lab"] = site.target(cut.endpoint)
        error = site.refused()
        assert error.kind in ("connection_lost", "unreachable") and error.code == 4, position
        site.is_clean()
        # Once the archive is there, the program inside finishes without us.
        assert site.whole() and (site.current == before or position > 0.9 * whole_way), position
        cut.close()
    site.targets["lab"] = site.target(site.node.ssh)
    site.deploy()
    site.is_deployed()


# dfo itself

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
PATCH = """
from orchestrator.transport.node import Node
from orchestrator.deploy import delivery
from orchestrator.session import Session
def replace(owner, name, wrapper):
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: wrapper(real, *args, **more))
def die(*_, **__): KILL
def die_late(real, *args, **more):
    real(*args, **more)
    KILL
def die_soon(real, *args, **more):
    threading.Timer(0.5, die).start()
    real(*args, **more)
def die_in_the_middle(real, *args, **more):
    for number, piece in enumerate(real(*args, **more)):
        if number == 4: KILL
        yield piece
def die_at(word):
    def hear(real, self, record):
        if record.fields.get("name") == word: KILL
        real(self, record)
    replace(delivery.Pushed, "hear", hear)
def die_calling(real, self, program, *args, **more):
    if program == "apply": KILL
    return real(self, program, *args, **more)
""".replace("KILL", KILL)
#: What dfo is doing when it is killed, and whether the archive is in the container by then.
MOMENTS = {
    "the folder on the node is made": ("replace(Node, 'put', die)", False),
    "the archive goes to the node": ("replace(delivery, 'slices', die_in_the_middle)", False),
    "the archive is on the node": ("replace(Node, 'put', die_late)", False),
    "the transaction begins": ("replace(Session, 'call', die_calling)", False),
    "the lock is taken": ("die_at('send')", False),
    "the push begins": ("replace(Node, 'push', die)", False),
    "the push is on its way": ("replace(Node, 'push', die_soon)", False),
    "the push is done": ("replace(Node, 'push', die_late)", False),
    "the archive is unpacked": ("die_at('verify')", True),
    "the release becomes current": ("die_at('activate')", True),
    "old releases are removed": ("die_at('prune')", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_dfo_is_killed_while(site: Site, moment: str) -> None:
    action, arrived = MOMENTS[moment]
    before = site.current
    with site.node.delay(1.0 if "on its way" in moment else 0.0):
        doomed = site.process("deploy", "lab", first=f"{PATCH}\n{action}")
        output = doomed.communicate(timeout=60)
        assert doomed.returncode == -signal.SIGKILL, output
    site.is_clean()
    assert site.whole() and (site.current == before or arrived)
    site.change()
    site.deploy()
    site.is_deployed()


def test_ctrl_c(site: Site) -> None:
    before = site.current
    with site.node.delay(1.0):
        interrupted = site.process("deploy", "lab")
        limit = time.monotonic() + 20
        while not list(site.inside("tmp").glob("pushed-*")) and time.monotonic() < limit:
            time.sleep(0.01)
        interrupted.send_signal(signal.SIGINT)
        said = interrupted.communicate(timeout=60)[1].decode()
    assert interrupted.returncode == 130 and "Interrupted during `send` on `lab`." in said
    site.is_clean()
    assert site.current == before and site.whole()


def test_what_a_power_cut_left_on_the_node_is_swept(site: Site) -> None:
    folders = site.node.root / "var/tmp"
    dead, alive, young = (folders / f"dfo-{letter * 10}" for letter in "DAY")
    for folder in (dead, alive, young):
        folder.mkdir(mode=0o700)
        (folder / "archive").write_bytes(b"old")
    for folder in (dead, alive):
        os.utime(folder, (1, 1))
    guard = subprocess.Popen(
        site.node.inside(["flock", f"/var/tmp/{alive.name}", "sh", "-c", "echo; exec cat"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert guard.stdout and guard.stdout.readline()
    site.deploy()
    assert not dead.exists() and alive.exists() and young.exists()
    guard.communicate()
    for folder in (alive, young):
        (folder / "archive").unlink()
        folder.rmdir()
