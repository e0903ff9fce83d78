"""Which `pct set` lines give a container the GPUs, and what of the old way is wrong."""

from __future__ import annotations

import pytest

from orchestrator.errors import PreflightError
from orchestrator.proxmox.gpu import Config, NodeDevices, plan

CONTROL = {"/dev/nvidiactl": (195, 255), "/dev/nvidia-uvm": (508, 0), "/dev/nvidia-uvm-tools": (508, 1)}
OTHERS = {"/dev/nvidia-modeset": (195, 254), "/dev/nvidia-caps/nvidia-cap1": (511, 1), "/dev/nvidia-nvlink": (504, 0)}
MAJORS = {10: "misc", 195: "nvidia", 508: "nvidia-uvm", 511: "nvidia-caps", 226: "drm", 240: "hidraw"}
OLD = (
    "lxc.cgroup2.devices.allow: c 195:* rwm",
    "lxc.cgroup2.devices.allow: c 508:* rwm",
    "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file",
)
KEEPS_OUT = "a device that is missing keeps the container from starting"


def node(gpus: int = 2, **more: tuple[int, int]) -> NodeDevices:
    cards = {f"/dev/nvidia{number}": (195, number) for number in reversed(range(gpus))}
    return NodeDevices("6.14.8-2-pve", "580.95.05", {**CONTROL, **OTHERS, **cards, **more}, MAJORS)


def config(*raw: str, **keys: str) -> Config:
    return Config({"hostname": "lab", **keys}, raw)


def lines(paths: list[str], option: str = "mode=0666", first: int = 0) -> tuple[str, ...]:
    return tuple(f"pct set 101 --dev{first + i} /dev/{path},{option}" for i, path in enumerate(paths))


BARE = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]


def test_everything_cuda_needs_and_no_more() -> None:
    made = plan(101, node(), config(), running=True)
    assert made.commands == ("pct shutdown 101", *lines(BARE), "pct start 101")
    assert not made.keep and not made.obsolete and not made.done
    assert "exactly 580.95.05" in made.notes[-1]
    assert plan(101, node(), config(), running=False).commands == lines(BARE)


def test_ten_gpus_come_in_their_order() -> None:
    made = plan(101, node(11), config(), running=False)
    assert [line.split()[-1] for line in made.commands[:11]] == [f"/dev/nvidia{i},mode=0666" for i in range(11)]


def test_chosen_gpus_for_a_group() -> None:
    made = plan(101, node(), config(), running=False, wanted=[1], gid=44)
    assert made.commands == lines(["nvidia1", *BARE[2:]], "gid=44,mode=0660")


def test_what_is_right_stays_and_other_devices_keep_their_slots() -> None:
    there = config(dev0="/dev/dri/renderD128", dev2="/dev/nvidia0,mode=0666", dev3="path=/dev/nvidiactl,mode=666")
    made = plan(101, node(1), there, running=False)
    assert made.keep == {"dev2": "/dev/nvidia0,mode=0666", "dev3": "path=/dev/nvidiactl,mode=666"}
    assert made.commands == (
        "pct set 101 --dev1 /dev/nvidia-uvm,mode=0666",
        "pct set 101 --dev4 /dev/nvidia-uvm-tools,mode=0666",
    )


@pytest.mark.parametrize(
    ("entry", "gid"), [("/dev/nvidia0", None), ("/dev/nvidia0,gid=44", None), ("/dev/nvidia0,mode=0666", 44)]
)
def test_an_entry_for_root_alone_or_another_group_is_set_again(entry: str, gid: int | None) -> None:
    made = plan(101, node(1), config(dev5=entry), running=False, gid=gid)
    assert made.commands[0].startswith("pct set 101 --dev5 /dev/nvidia0,") and not made.keep


def test_nothing_is_left_to_do() -> None:
    passed = {f"dev{i}": f"/dev/{path},mode=0666" for i, path in enumerate(BARE)}
    made = plan(101, node(), config(**passed), running=True)
    assert made.done and made.keep == passed and not made.commands


def test_a_passed_gpu_that_is_gone_is_taken_out_first() -> None:
    passed = {f"dev{i}": f"/dev/{path},mode=0666" for i, path in enumerate([*BARE, "nvidia7"])}
    assert plan(101, node(), config(**passed), running=False).commands == ("pct set 101 --delete dev5",)


def test_missing_uvm_is_made_before_it_is_passed() -> None:
    offered = NodeDevices("k", "580.95.05", {"/dev/nvidia0": (195, 0), "/dev/nvidiactl": (195, 255)}, {195: "nvidia"})
    made = plan(101, offered, config(), running=False)
    assert made.commands == ("nvidia-modprobe -c 0 -u", *lines(["nvidia0", *BARE[2:]]))


def test_partitions_are_passed() -> None:
    slice_ = "/dev/nvidia-caps/nvidia-cap21"
    made = plan(101, node(1, **{slice_: (511, 21)}), config(), running=False)
    assert made.commands[-1] == f"pct set 101 --dev4 {slice_},mode=0666"


def test_a_node_without_gpus() -> None:
    for offered, wanted, part in ((node(0), [], "offers no GPU"), (node(), [1, 5], "has no GPU 5")):
        with pytest.raises(PreflightError) as caught:
            plan(101, offered, config(), running=False, wanted=wanted)
        assert caught.value.kind == "device_missing" and part in caught.value.what


# -- the old way -----------------------------------------------------------------------------------------------------


def notes(*raw: str, **keys: str) -> tuple[tuple[str, ...], list[str]]:
    made = plan(101, node(), config(*raw, **keys), running=False)
    return made.obsolete, [note for note in made.notes if KEEPS_OUT not in note and "libraries" not in note]


def test_old_lines_that_work_are_named_without_alarm() -> None:
    other = (
        "lxc.cgroup2.devices.allow: c 226:* rwm",
        "lxc.mount.entry: /dev/dri dev/dri none bind",
        "lxc.cgroup2.devices.allow: a",
    )
    assert notes(*OLD, *other) == (OLD, [])


def test_majors_of_an_earlier_boot() -> None:
    stale = "lxc.cgroup2.devices.allow: c 509:* rwm"
    obsolete, said = notes(OLD[0], stale, OLD[2])
    assert obsolete == (OLD[0], stale, OLD[2])
    assert len(said) == 2
    assert said[0].startswith("major 509 is allowed, and no module has it")
    assert said[1].startswith("major 508 (/dev/nvidia-uvm) is not allowed")


def test_a_major_that_now_belongs_to_somebody_else() -> None:
    foreign = "lxc.cgroup2.devices.allow: c 240:* rwm"
    obsolete, said = notes(*OLD, foreign)
    assert foreign not in obsolete
    assert said == ["major 240 is allowed and belongs to hidraw now: look whether that is meant"]


def test_lines_of_the_first_cgroups_do_nothing() -> None:
    obsolete, said = notes("lxc.cgroup.devices.allow: c 195:* rwm", *OLD)
    assert len(obsolete) == 4 and "since Proxmox VE 7" in said[0]
    only_old, said = notes("lxc.cgroup.devices.allow: c 195:* rwm")
    assert only_old and any("major 195 (/dev/nvidiactl) is not allowed" in note for note in said)


def test_mounts_into_an_unprivileged_container() -> None:
    assert any("belongs to nobody" in note for note in notes(*OLD, unprivileged="1")[1])
