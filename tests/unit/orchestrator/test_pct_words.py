"""What pct says, and which error that is: its exit status alone tells nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.transport.base import Completed
from orchestrator.transport.pct_words import Asker, explain

CASES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "data" / "pct_cases.yaml").read_text(encoding="utf-8")
)
FAILED = [case for case in CASES if case.get("exit") and case.get("err")]
ROOT = Asker("root@pve1", "/usr/sbin/pct", sudo=False)
USER = Asker("dfo@pve1", "/usr/sbin/pct", sudo=True)


def ended(code: int, stderr: str) -> Completed:
    return Completed((), code, b"", stderr.encode())


@pytest.mark.parametrize(
    ("code", "said", "kind", "exit_code"),
    [
        (2, "Configuration file 'nodes/pve1/lxc/101.conf' does not exist\n", "container_missing", 5),
        (2, "101 doesn't exist\n", "container_missing", 5),
        (255, "container '101' not running!\n", "container_stopped", 5),
        (255, "can only push files to a running CT\n", "container_stopped", 5),
        (255, "can only pull files from a running VM at /usr/share/x.pm line 664.\n", "container_stopped", 5),
        (255, "CT 101 not running\n", "container_stopped", 5),
        (4, "trying to acquire lock...\ncan't lock file '/run/lock/lxc/x.lock' - got timeout\n", "lock_held", 6),
        (255, "CT is locked (backup)\n", "lock_held", 6),
        (255, "cluster not ready - no quorum?\n", "cluster_not_ready", 5),
        (111, "ipcc_send_rec[1] failed: Connection refused\nUnable to load access control list: Connection refused\n",
         "cluster_not_ready", 5),
        (255, "Unable to load access control list: Unknown error -1\n", "not_permitted", 5),
        (127, "env: '/usr/sbin/pct': No such file or directory\n", "remote_failed", 5),
        (2, "Unknown option: keep-env\n400 unable to parse option\n", "remote_failed", 5),
        (-9, "", "connection_lost", 4),
        (255, "something new\n", "remote_failed", 5),
    ],
)  # fmt: skip
def test_words_and_kinds(code: int, said: str, kind: str, exit_code: int) -> None:
    error = explain(ROOT, 101, ended(code, said), lambda: None)
    assert (error.kind, error.exit_code) == (kind, exit_code)
    assert error.what and error.why and error.fix


@pytest.mark.parametrize(
    "said",
    [
        "sudo: a password is required\n",
        "sudo: a terminal is required to read the password; either use the -S option or a helper\n",
        "dfo is not in the sudoers file.\n",
        "Sorry, user dfo is not allowed to execute '/usr/sbin/pct exec 101' as root on pve1.\n",
        "env: 'sudo': No such file or directory\n",
    ],
)
def test_sudo_that_refuses(said: str) -> None:
    error = explain(USER, 101, ended(1, said), lambda: None)
    assert error.kind == "not_permitted"
    assert "echo 'dfo ALL=(root) NOPASSWD: /usr/sbin/pct' > /etc/sudoers.d/dfo-dfo" in error.fix


def test_the_node_that_has_it_is_named() -> None:
    said = "Configuration file 'nodes/pve1/lxc/101.conf' does not exist\n"
    error = explain(ROOT, 101, ended(2, said), lambda: "pve2")
    assert error.why == "the cluster has it on node `pve2`"
    assert (error.fix, error.details["node"]) == ("set `ssh.host` to `pve2`", "pve2")


def test_nobody_is_asked_about_a_container_that_is_here() -> None:
    def never() -> str | None:
        raise AssertionError

    assert explain(ROOT, 101, ended(255, "container '101' not running!\n"), never).kind == "container_stopped"


@pytest.mark.parametrize("case", FAILED, ids=[f"{case['name']}: {case['run'][:40]}" for case in FAILED])
def test_whatever_pct_says_reaches_the_user(case: dict[str, Any]) -> None:
    """Known words have their own message; all others are quoted."""
    error = explain(ROOT, 101, ended(case["exit"], case["err"]), lambda: None)
    if error.kind == "remote_failed" and "Unknown option: keep-env" not in case["err"]:
        assert case["err"].strip().splitlines()[-1].strip()[:100] in error.why
