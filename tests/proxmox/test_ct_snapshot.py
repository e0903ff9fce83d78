"""`dfo deploy` with the API beside ssh: a snapshot before the release, and power."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.node import Node
from fakepve import FakePve
from support.fake_api import SECRET, TOKEN_ID, add_container, fingerprint_of

from orchestrator.proxmox.tls import spelled

from .site import Site, site_on


@pytest.fixture
def pve(fakepve: FakePve) -> FakePve:
    add_container(fakepve, 200)
    return fakepve


@pytest.fixture
def site(
    lab: Node, pve: FakePve, fakepve_cafile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """Target `lab`: container 200 of the bench by ssh, and what the API says of it by `pve`."""
    monkeypatch.setenv("DFO_PVE_TOKEN", SECRET)
    with site_on(lab, tmp_path) as fresh:
        fresh.targets["lab"]["pct"]["api"] = {
            "token_id": TOKEN_ID,
            "token": {"env": "DFO_PVE_TOKEN"},
            "host": "127.0.0.1",
            "port": pve.port,
            "fingerprint": spelled(fingerprint_of(fakepve_cafile)),
            "keep_snapshots": 1,
        }
        yield fresh


def snapshots(pve: FakePve) -> dict[str, Any]:
    return dict(pve.ct(200).snapshots)


def test_a_snapshot_comes_before_the_release_and_only_with_one(site: Site, pve: FakePve) -> None:
    planned = site.dfo("deploy", "lab", "--ct-snapshot", "--dry-run")
    assert "snapshot  container 200 on `pve1`, before anything is sent" in planned.out and not snapshots(pve)

    done = site.dfo("deploy", "lab", "--ct-snapshot")
    assert done.code == 0, done.err
    [(name, first)] = snapshots(pve).items()
    assert site.current is not None and site.current in first["description"]
    assert f"`pct rollback 200 {name} --start 1` on `pve1`" in done.err
    assert SECRET not in done.out + done.err

    assert site.deploy("--ct-snapshot")["ct_snapshot"] is None
    assert list(snapshots(pve)) == [name]

    site.change()
    pve.ct(200).snapshots["dfo-20260101-000000"] = pve.ct(200).snapshots.pop(name)
    result = site.deploy("--ct-snapshot")
    assert list(snapshots(pve)) == [result["ct_snapshot"]["name"]]
    assert result["ct_snapshot"]["removed"] == ["dfo-20260101-000000"]


def test_without_the_flag_the_api_is_not_asked(site: Site, pve: FakePve) -> None:
    assert site.deploy()["ct_snapshot"] is None
    assert not pve.requests


def test_nothing_is_deployed_without_the_snapshot(site: Site, pve: FakePve) -> None:
    pve.snapshot_lock(200, "backup")
    refused = site.refused("--ct-snapshot")
    assert (refused.code, refused.kind, refused.why) == (6, "lock_held", "CT is locked (backup)")
    assert site.current is None
    site.is_clean()


def test_start_goes_through_the_api_where_there_is_one(site: Site, pve: FakePve) -> None:
    power_on = pve._start_steps

    async def both(*words: Any, **more: Any) -> None:
        await power_on(*words, **more)
        site.container.start()

    pve._start_steps = both
    site.container.stop()
    pve.ct(200).status = "stopped"
    assert site.deploy("--start")["changed"] is True
    assert [path for method, path, _ in pve.requests if method == "POST"] == [
        "/api2/json/nodes/pve1/lxc/200/status/start"
    ]


@pytest.mark.parametrize("way", ["pct", "local"])
def test_a_target_without_the_api(site: Site, way: str) -> None:
    site.targets["lab"]["pct"].pop("api")
    if way == "local":
        site.targets["lab"] = {"transport": "local"}
    refused = site.refused("--ct-snapshot")
    assert (refused.code, refused.kind) == (2, "usage")
    assert ("pct.api.token_id" in refused.why) == (way == "pct")


def test_the_token_in_the_inventory_is_refused_and_not_repeated(site: Site) -> None:
    site.targets["lab"]["pct"]["api"]["token"] = SECRET
    done = site.dfo("deploy", "lab", "--json")
    assert json.loads(done.out)["error"]["kind"] == "inventory_invalid"
    assert "pct.api.token" in done.out and SECRET not in done.out + done.err


def test_a_token_without_its_secret_is_incomplete(site: Site) -> None:
    del site.targets["lab"]["pct"]["api"]["token"]
    assert "missing key `token`" in site.refused().what


def test_only_the_source_of_the_secret_is_shown(site: Site) -> None:
    shown = site.dfo("config", "show", "lab").out
    line = next(line for line in shown.splitlines() if line.startswith("pct.api.token "))
    assert "*** (environment variable DFO_PVE_TOKEN)" in line
