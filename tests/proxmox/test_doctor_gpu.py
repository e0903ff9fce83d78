"""`dfo doctor` on the bench: the chain to a GPU as far as it can be real without one, and the API."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.container import Container
from bench.node import Node
from fakepve import FakePve
from support.fake_api import SECRET, TOKEN_ID, add_container

from .doctor_site import examine, healthy_site, of, one_fails
from .site import Site

GPU_FILES = {"nvidia0": (195, 0), "nvidiactl": (195, 255), "nvidia-uvm": (507, 0)}


@pytest.fixture
def site(node: Node, ct: Container, tmp_path: Path) -> Iterator[Site]:
    with healthy_site(node, ct, tmp_path) as made:
        yield made


# -- GPUs ----------------------------------------------------------------------------------------------------------


def pass_devices(site: Site) -> None:
    """Device files on the node, without a driver behind them, and `dev` entries for them."""
    for name, (major, minor) in GPU_FILES.items():
        os.mknod(site.node.root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    config = site.container.config
    devices = "".join(f"dev{index}: /dev/{name},mode=0666\n" for index, name in enumerate(GPU_FILES))
    config.write_text(config.read_text() + devices)


def test_the_chain_to_a_gpu_breaks_link_by_link(site: Site) -> None:
    """No driver here: the links that files and configuration make can be real, the others must say what is missing."""
    site.targets["lab"] = site.target(site.node.ssh, gpus=[0])
    first = of(examine(site), "failed")
    assert "no NVIDIA module is loaded" in first["gpu: driver"][1]
    assert "the node has no /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm" in first["gpu: files on the node"][1]
    assert first["gpu: passed through"][2] == "`dfo gpu plan lab` prints the `pct set` lines"
    for name, saw in {
        "module": "/proc/driver/nvidia/version cannot be read",
        "files": "/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm not there",
        "libcuda": "no libcuda.so.1",
    }.items():
        assert saw in first[f"gpu: {name}"][1]
    pass_devices(site)
    second = examine(site).checks
    assert second["gpu: files on the node"][:2] == ("ok", "the node has 1 GPU: 0")
    assert second["gpu: passed through"][:2] == ("ok", "3 devices passed")
    assert "which in /proc/devices is nobody" in second["gpu: numbers"][1]
    config = site.container.config
    stale = "lxc.cgroup2.devices.allow: c 507:* rwm\n"
    config.write_text(config.read_text() + stale)
    assert "major 507 is allowed, and no module has it" in examine(site).checks["gpu: allowed"][1]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_libraries_tools_and_device_files_inside(site: Site, tmp_path: Path) -> None:
    """A libcuda whose cuInit gives 999, an nvidia-smi that ends with 18, and device files with nothing behind."""
    site.targets["lab"] = site.target(site.node.ssh, gpus=[0])
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.580.95.05"
    source.write_text("int cuInit(unsigned flags) { return 999; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    place = site.container.root / "usr/lib/x86_64-linux-gnu"
    shutil.copy(library, place / library.name)
    (place / "libcuda.so.1").symlink_to(library.name)
    site.container.run(["ldconfig"])
    smi = site.container.root / "usr/bin/nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    smi.chmod(0o755)
    pass_devices(site)
    site.container.stop()
    site.container.start()
    seen = examine(site).checks
    assert seen["gpu: files"][:2] == ("ok", "1 GPU and /dev/nvidiactl, /dev/nvidia-uvm")
    assert "(and 2 more): ENXIO, there is no device behind the file" in seen["gpu: open"][1]
    assert seen["gpu: libcuda"][:2] == ("ok", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05")
    assert seen["gpu: nvidia-smi"][1].startswith("`nvidia-smi -L` ended with 18: the libraries and")
    assert seen["gpu: cuInit"][1].startswith("cuInit gives 999: unknown, which mostly is /dev/nvidia-uvm")
    assert seen["gpu: torch"][0] == "failed" and "torch does not import" in seen["gpu: torch"][1]


@pytest.mark.parametrize(
    ("mode", "saw"), [(0o600, "EACCES, its mode forbids it"), (0o666, "ENXIO, there is no device")]
)
def test_why_a_device_of_the_old_way_cannot_be_opened(site: Site, mode: int, saw: str) -> None:
    site.targets["lab"] = site.target(site.node.ssh, gpus=[0])
    for name, (major, minor) in GPU_FILES.items():
        os.mknod(site.node.root / "dev" / name, stat.S_IFCHR, os.makedev(major, minor))
        (site.node.root / "dev" / name).chmod(mode)
    lines = [f"lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file" for name in GPU_FILES]
    config = site.container.config
    config.write_text(config.read_text() + "\n".join([*lines, "lxc.cgroup2.devices.allow: c 195:* rwm", ""]))
    site.container.stop()
    site.container.start()
    seen = examine(site).checks
    assert f"root cannot open /dev/nvidia-uvm (and 2 more): {saw}" in seen["gpu: open"][1]
    assert seen["gpu: passed through"][:2] == ("ok", "3 devices passed")
    assert "major 507 (/dev/nvidia-uvm) is not allowed by the old lines" in seen["gpu: allowed"][1]


# -- the API -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokened(site: Site, fakepve: FakePve, fakepve_cafile: str, monkeypatch: pytest.MonkeyPatch) -> FakePve:
    """The healthy site with an API that knows container 200."""
    monkeypatch.setenv("DFO_TEST_TOKEN", SECRET)
    add_container(fakepve, 200)
    fakepve.grant(TOKEN_ID, "/nodes/pve1", "Sys.Audit")
    api = {"token_id": TOKEN_ID, "token": {"env": "DFO_TEST_TOKEN"}, "port": fakepve.port, "ca": fakepve_cafile}
    site.targets["lab"]["pct"]["api"] = api
    return fakepve


def test_a_token_with_the_least_rights_passes(site: Site, tokened: FakePve) -> None:
    seen = examine(site)
    assert of(seen, "failed", "warning") == {}
    assert seen.checks["api: sees container"][1] == "container 200 is on node pve1"
    assert seen.checks["laptop: secrets"][:2] == ("ok", "pct.api.token can be read")


def test_an_empty_list_is_not_no_container(site: Site, tokened: FakePve) -> None:
    tokened.acl = {}
    failed = of(examine(site), "failed")
    assert list(failed) == ["api: rights", "api: sees container"]
    assert "an empty list is not no container" in failed["api: rights"][1]
    assert f"pveum acl modify /vms/200 --tokens '{TOKEN_ID}'" in failed["api: rights"][2]


def test_a_token_that_is_refused_and_one_that_is_lost(
    site: Site, tokened: FakePve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFO_TEST_TOKEN", SECRET.replace("0", "1"))
    seen = one_fails(site, "api: token", "refused the token", "pveum user token")
    assert seen.checks["api: rights"][:2] == ("skipped", "the check before it failed")
    monkeypatch.delenv("DFO_TEST_TOKEN")
    assert list(of(examine(site), "failed")) == ["laptop: secrets", "api: token"]
