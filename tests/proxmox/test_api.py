"""The API against `fakepve`: containers, snapshots, tokens and tasks. Every fault has its message."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakepve import FakePve
from support.fake_api import TOKEN_ID, Connect, answering, asked, fails

from orchestrator.errors import ConnectError, DeadlineError, LockError, PreflightError
from orchestrator.proxmox import rights, snapshots, tasks
from orchestrator.proxmox.container import Container, version

DAY = datetime(2026, 11, 30, 16, 12, tzinfo=UTC)


# -- what works ------------------------------------------------------------------------------------------------------


def test_facts_of_a_container_and_its_node(pve: FakePve, guest: Container) -> None:
    assert version(guest.api) == pve.version
    status = guest.status()
    assert (status.node, status.name, status.state, status.lock) == ("pve1", "lab", "running", None)
    assert guest.config()["rootfs"].startswith("local-lvm:vm-101-disk-0")
    pve.grant(TOKEN_ID, "/nodes/pve1", "Sys.Audit")
    assert guest.node_facts().node == "pve1"


def test_a_container_is_found_on_whichever_node_it_is(pve: FakePve, connect: Connect) -> None:
    pve.add_node("pve2")
    pve.ct(101).node = "pve2"
    assert Container(connect(), 101).status().node == "pve2"


def test_raw_lines_of_a_configuration_are_kept(pve: FakePve, guest: Container) -> None:
    pve.ct(101).config["lxc"] = [["lxc.cgroup2.devices.allow", "c 195:* rwm"], ["lxc.mount.auto", "cgroup:rw"]]
    assert guest.config()["lxc"] == "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.mount.auto: cgroup:rw"


def test_start_waits_for_its_task_and_is_not_repeated(pve: FakePve, guest: Container) -> None:
    ct = pve.ct(101)
    ct.status, ct.start_secs, pve.time_scale = "stopped", 0.6, 1.0
    ended = guest.start()
    assert ended is not None and ended.seconds >= 0.5 and ct.status == "running"
    assert guest.start() is None
    assert asked(pve, "POST") == 1


def test_warnings_of_a_task_are_counted_and_no_failure(pve: FakePve, guest: Container) -> None:
    ct = pve.ct(101)
    ct.status, ct.start_error = "stopped", "WARNINGS: 2"
    ended = guest.start()
    assert ended is not None and ended.warnings == 2


def test_facts_of_a_node_are_read_as_versions_8_and_9_tell_them(tmp_path: Path) -> None:
    common = {"pveversion": "pve-manager/9.2.11/abc", "cpuinfo": {"model": "AMD EPYC", "cpus": 64}, "uptime": 77}
    common |= {"memory": {"total": 2**37, "used": 2**30}, "kversion": "Linux 6.8.4-2-pve #1 SMP"}
    for more, kernel in (
        ({}, "Linux 6.8.4-2-pve #1 SMP"),
        ({"current-kernel": {"release": "6.14.8-2-pve"}}, "6.14.8-2-pve"),
    ):
        with answering(tmp_path, body=json.dumps({"data": {**common, **more}}).encode()) as api:
            container = Container(api, 101)
            container.__dict__["node"] = "pve1"
            assert container.node_facts().as_dict() == {
                "node": "pve1", "proxmox": "pve-manager/9.2.11/abc", "kernel": kernel, "cpu": "AMD EPYC", "cores": 64,
                "memory": 2**37, "used_memory": 2**30, "uptime_s": 77,
            }  # fmt: skip


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_snapshots_of_ours_are_kept_to_a_number_and_others_stay(pve: FakePve, guest: Container) -> None:
    ct = pve.ct(101)
    ct.snapshots |= {"before-upgrade": {}, "dfo-mine": {}, "dfo-20200101-000000x": {}}
    taken = [snapshots.take(guest, f"number {i}", keep=2, now=DAY + timedelta(minutes=i)) for i in range(4)]
    assert snapshots.names_of_ours(guest) == ["dfo-20261130-161400", "dfo-20261130-161500"]
    assert [one.removed for one in taken] == [(), (), (taken[0].name,), (taken[1].name,)]
    assert {"before-upgrade", "dfo-mine", "dfo-20200101-000000x"} <= set(ct.snapshots)
    assert ct.snapshots[taken[3].name]["description"] == "number 3"
    assert taken[3].back == "pct rollback 101 dfo-20261130-161500 --start 1" and not taken[3].warnings


def test_a_snapshot_that_cannot_be_removed_is_a_warning(pve: FakePve, guest: Container) -> None:
    first = snapshots.take(guest, "", keep=1, now=DAY)
    pve.fail("DELETE", f"/snapshot/{first.name}", 500, "zfs error: dataset is busy")
    second = snapshots.take(guest, "", keep=1, now=DAY + timedelta(seconds=1))
    assert not second.removed
    assert second.warnings == (f"the old snapshot `{first.name}` is still there: 500 zfs error: dataset is busy",)
    assert second.name in pve.ct(101).snapshots


def test_a_storage_without_snapshots(pve: FakePve, guest: Container) -> None:
    pve.ct(101).config["rootfs"] = "local:101/vm-101-disk-0.raw,size=8G"
    with fails(PreflightError, "api_failed") as caught:
        snapshots.take(guest, "", keep=3)
    assert "snapshot feature is not available" in caught.value.why
    assert "zfs, lvm-thin, btrfs or ceph" in caught.value.fix


# -- the token -------------------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_told_after_three_seconds_and_not_tried_again(pve: FakePve, connect: Connect) -> None:
    pve.slow_network(3.0)
    pve.time_scale = 1.0
    with fails(ConnectError, "api_refused") as caught:
        version(connect(secret="11111111-2222-3333-4444-555555555555"))
    error = caught.value
    assert error.exit_code == 4 and asked(pve) == 1
    assert TOKEN_ID in error.what and "401" in error.why and "after 3." in error.why
    assert "`pveum user token remove dfo@pve deploy`" in error.fix


def test_an_empty_list_is_not_no_container(pve: FakePve, connect: Connect) -> None:
    pve.acl = {}
    api = connect()
    assert api.rows("cluster", "resources", type="vm") == []
    with fails(PreflightError, "api_forbidden") as caught:
        Container(api, 101).status()
    error = caught.value
    assert error.details["privileges"] == ["VM.Audit"] and error.details["path"] == "/vms/101"
    assert error.details["commands"] == [
        "pveum role add Dfo --privs 'VM.Audit VM.PowerMgmt VM.Snapshot' || "
        "pveum role modify Dfo --privs 'VM.Audit VM.PowerMgmt VM.Snapshot'",
        "pveum acl modify /vms/101 --users dfo@pve --roles Dfo",
        "pveum acl modify /vms/101 --tokens 'dfo@pve!deploy' --roles Dfo",
    ]
    assert all(f"`{command}`" in error.fix for command in error.details["commands"])


def test_a_missing_privilege_is_named(pve: FakePve, connect: Connect) -> None:
    pve.acl = {TOKEN_ID: [("/vms/101", {"VM.Audit"})]}
    container = Container(connect(), 101)
    assert rights.missing(container.api, "/vms/101") == ["VM.PowerMgmt", "VM.Snapshot"]
    with fails(PreflightError, "api_forbidden") as caught:
        snapshots.take(container, "", keep=3)
    assert caught.value.why == "403 Permission check failed (/vms/101, VM.Snapshot)"
    assert caught.value.details["privileges"] == ["VM.Snapshot"]
    with fails(PreflightError, "api_forbidden") as caught:
        container.node_facts()
    assert caught.value.details["commands"][1] == "pveum acl modify /nodes/pve1 --users dfo@pve --roles DfoNode"
    assert "Sys.Audit" in caught.value.details["commands"][0]


def test_what_has_no_reason_is_still_a_refusal(pve: FakePve, guest: Container) -> None:
    pve.fail("GET", "/version", 403, "Permission check failed")
    with fails(PreflightError, "api_forbidden"):
        version(guest.api)


# -- containers ------------------------------------------------------------------------------------------------------


def test_no_such_container(pve: FakePve, connect: Connect) -> None:
    pve.grant(TOKEN_ID, "/vms", "VM.Audit")
    with fails(PreflightError, "container_missing") as caught:
        Container(connect(), 299).status()
    assert "299" in caught.value.what and "no node has it" in caught.value.why


def test_a_container_that_vanished_is_a_500(pve: FakePve, guest: Container) -> None:
    assert guest.node == "pve1"
    pve.vms.clear()
    pve.cts.clear()
    with fails(PreflightError, "container_missing") as caught:
        guest.status()
    assert caught.value.why == "Configuration file 'nodes/pve1/lxc/101.conf' does not exist"
    assert caught.value.what.startswith("container 101 does not exist")


def test_a_virtual_machine_is_no_container(pve: FakePve, connect: Connect) -> None:
    pve.add_vm(300, "vm")
    pve.grant(TOKEN_ID, "/vms/300", "VM.Audit")
    with fails(PreflightError, "container_missing") as caught:
        Container(connect(), 300).status()
    assert caught.value.why == "300 is a virtual machine"


def test_a_locked_container(pve: FakePve, guest: Container) -> None:
    pve.ct(101).status = "stopped"
    pve.snapshot_lock(101, "backup")
    for change in (guest.start, lambda: snapshots.take(guest, "", keep=3)):
        with fails(LockError, "lock_held") as caught:
            change()
        assert caught.value.why == "CT is locked (backup)" and caught.value.exit_code == 6


def test_a_container_that_another_task_holds(pve: FakePve, guest: Container) -> None:
    pve.ct(101).status = "stopped"
    pve.ct(101).lock_holder = "somebody"
    with fails(LockError, "lock_held") as caught:
        guest.start()
    assert "can't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout" in caught.value.why


def test_a_cluster_without_quorum(pve: FakePve, guest: Container) -> None:
    pve.lose_quorum()
    pve.ct(101).status = "stopped"
    assert guest.status().state == "stopped"
    for change in (guest.start, lambda: snapshots.take(guest, "", keep=3)):
        with fails(PreflightError, "cluster_not_ready") as caught:
            change()
        assert "no quorum" in caught.value.why and "pvecm status" in caught.value.fix


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_a_task_that_is_too_slow_goes_on(pve: FakePve, guest: Container) -> None:
    ct = pve.ct(101)
    ct.status, ct.start_secs, pve.time_scale = "stopped", 1.5, 1.0
    began = time.monotonic()
    with fails(DeadlineError, "deadline") as caught:
        guest.start(deadline=0.5)
    assert time.monotonic() - began < 1.4
    upid = caught.value.details["upid"]
    assert f"`pvenode task status '{upid}'` on `pve1`" in caught.value.fix
    assert tasks.wait(guest.api, upid, "container 101", deadline=5).warnings == 0
    assert ct.status == "running"


@pytest.mark.parametrize(
    ("text", "kind", "part"),
    [
        ("startup for container '101' failed", "api_failed", "`vzstart` of container 101 failed"),
        ("Device /dev/nvidia0 does not exist", "device_missing", "container 101"),
        (
            "unable to open file '/etc/pve/nodes/pve1/lxc/101.conf.tmp.7' - Permission denied",
            "cluster_not_ready",
            "the cluster of",
        ),
        ("lvcreate failed: No space left on device", "disk_full", "container 101"),
    ],
)
def test_a_task_that_fails(pve: FakePve, guest: Container, text: str, kind: str, part: str) -> None:
    pve.ct(101).status, pve.ct(101).start_error = "stopped", text
    with fails(PreflightError, kind) as caught:
        guest.start()
    assert part in caught.value.what
    assert text in caught.value.why or caught.value.why in text


def test_the_end_of_a_failed_tasks_log_is_told(pve: FakePve, guest: Container) -> None:
    pve.ct(101).status, pve.ct(101).start_error = "stopped", "startup for container '101' failed"
    upid = guest.api.post(*guest.path, "status", "start")
    pve.tasks[upid]["log"][:0] = ["noise", "run_buffer: 571 Script exited with status 1", "lxc_init: 845 Failed"]
    with fails(PreflightError, "api_failed") as caught:
        tasks.wait(guest.api, upid, guest.label, deadline=5)
    assert caught.value.why == (
        "startup for container '101' failed; run_buffer: 571 Script exited with status 1; lxc_init: 845 Failed"
    )


@pytest.mark.parametrize("upid", [None, 7, "UPID:../../access:1:1:1:vzstart:101:x:", "UPID:pve1:1:1:1:vz/start:1:x:"])
def test_an_answer_that_is_no_task(guest: Container, upid: object) -> None:
    with fails(PreflightError, "api_failed"):
        tasks.wait(guest.api, upid, guest.label, deadline=5)
