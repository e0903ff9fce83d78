"""Every check of `dfo doctor`, shown to pass on healthy facts and to fail, warn or stand back on others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor_facts import (
    ALL_WANTED,
    API,
    DEVICES,
    DRIVER,
    FILES,
    HOP,
    LAPTOP,
    MOUNTS,
    NO_GPU,
    NODE,
    RULES,
    TROUBLE,
    WANTED,
    chain,
    configured,
    inside,
    on_node,
    refused,
    without_devs,
)

from orchestrator.doctor.checks import api, container, gpu, hop, laptop, node
from orchestrator.doctor.examine import examine, wanted_of
from orchestrator.doctor.facts import Agent, KeyFile, Missing
from orchestrator.doctor.verdict import Checks, Status, Verdict, judge
from orchestrator.inventory.locate import Found, find_inventory
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.resolve import load_inventory

OK, WARNING, FAILED, SKIPPED = Status.OK, Status.WARNING, Status.FAILED, Status.SKIPPED


@dataclass(frozen=True)
class Case:
    """What a check says of some facts: the status, and words of it and its fix."""

    check: Callable[[Any], Verdict]
    facts: Any
    status: Status
    saw: str
    fix: str = ""


CASES = [
    # laptop
    Case(laptop.python, replace(LAPTOP, python=(3, 10, 1)), FAILED, "Python 3.10.1; dfo needs 3.11", "pipx"),
    Case(laptop.inventory, replace(LAPTOP, inventory_mode=0o666), WARNING, "anybody", "chmod o-w inventory/dfo.yaml"),
    Case(laptop.ssh_program, replace(LAPTOP, ssh=None), WARNING, "no ssh program", "openssh-client"),
    Case(laptop.ssh_program, replace(LAPTOP, ssh=None, needs_ssh="ProxyCommand"), FAILED, "ProxyCommand needs it"),
    Case(laptop.key_files, replace(LAPTOP, keys=(KeyFile("k", None),)), FAILED, "there is no k", "ssh-keygen"),
    Case(laptop.key_files, replace(LAPTOP, keys=(KeyFile("a b", 0o644),)), WARNING, "mode 0644", "chmod 600 'a b'"),
    Case(
        laptop.key_files,
        replace(LAPTOP, keys=(KeyFile("k.pub", 0o600, problem="odd"),)),
        WARNING,
        "k.pub cannot be used: odd",
        "private half",
    ),
    Case(laptop.key_files, replace(LAPTOP, keys=(KeyFile("sk", 0o600, problem="odd"),), needs_ssh="sk"), OK, "1 key"),
    Case(laptop.key_files, replace(LAPTOP, keys=()), OK, "no key files"),
    Case(laptop.agent, replace(LAPTOP, agent=Agent(True, None, None)), SKIPPED, "no agent answers; the key files"),
    Case(
        laptop.agent,
        replace(LAPTOP, agent=Agent(True, None, None), keys=(KeyFile("k", 0o600, locked=True),)),
        FAILED,
        "no agent answers, and k has a passphrase",
        "ssh-add k",
    ),
    Case(laptop.agent, replace(LAPTOP, agent=Agent(True, "s", 0), keys=()), FAILED, "holds no key, and", "ssh-add"),
    Case(laptop.agent, replace(LAPTOP, needs_ssh="ProxyCommand"), SKIPPED, "by itself"),
    Case(laptop.agent, replace(LAPTOP, agent=None), SKIPPED, "nothing here needs ssh"),
    Case(laptop.secrets, replace(LAPTOP, lost_secrets=(TROUBLE,)), FAILED, "no answer in 10 s", "check the network"),
    Case(laptop.secrets, replace(LAPTOP, secrets=()), SKIPPED, "no secret"),
    Case(laptop.run_config, replace(LAPTOP, config_there=False), FAILED, "there is no run.yaml", "launch.config"),
    Case(laptop.run_config, replace(LAPTOP, config=None), SKIPPED, "not set"),
    # hop
    Case(
        hop.name,
        replace(HOP, no_name="Name or service not known", stopped="connection", trouble=TROUBLE),
        FAILED,
        "Name or service not known",
        "check the network",
    ),
    Case(hop.name, replace(HOP, before="bastion"), SKIPPED, "`bastion` looks it up"),
    Case(hop.name, replace(HOP, command="nc %h %p"), SKIPPED, "ProxyCommand"),
    Case(hop.name, replace(HOP, blocked="`bastion` was not passed"), SKIPPED, "was not passed"),
    Case(hop.connection, replace(HOP, stopped="connection", trouble=TROUBLE), FAILED, "no answer in 10 s"),
    Case(hop.connection, replace(HOP, blocked="`bastion` was not passed"), SKIPPED, "`bastion` was not passed"),
    Case(hop.host_key, replace(HOP, key=None), WARNING, "nobody has compared it", "dfo trust lab"),
    Case(hop.host_key, replace(HOP, stopped="host key", trouble=TROUBLE), FAILED, "cannot reach"),
    Case(hop.host_key, replace(HOP, stopped="connection", trouble=TROUBLE), SKIPPED, "the connection failed"),
    Case(hop.login, replace(HOP, stopped="login", trouble=TROUBLE), FAILED, "cannot reach", "check the network"),
    Case(hop.login, replace(HOP, stopped="host key", trouble=TROUBLE), SKIPPED, "the host key failed"),
    # node
    Case(node.answers, TROUBLE, FAILED, "no answer in 10 s", "check the network"),
    Case(node.latency, on_node(true_ms=500.0), WARNING, "round trip takes 248 ms", "ssh.jump"),
    Case(node.latency, on_node(true_ms=500.0, shell_ms=490.0), OK, "takes 5 ms"),
    Case(
        node.login_shell,
        on_node(true_ms=900.0, shell_ms=880.0),
        WARNING,
        "880 ms of them in the login shell",
        "~root/.bashrc",
    ),
    Case(node.login_shell, on_node(true_ms=900.0, shell_ms=None), OK, "`true` takes 900 ms"),
    Case(node.quiet_shell, on_node(printed="\nWelcome!\n"), WARNING, "before every command: Welcome!", "[ -t 1 ]"),
    Case(node.version, on_node(version=None), WARNING, "no Proxmox VE node", "ssh.host"),
    Case(node.version, on_node(version="7.4-3"), WARNING, "7.4-3: devices need 8.2", "update"),
    Case(node.rights, refused("not_permitted"), FAILED, "no: because", "do that"),
    Case(node.rights, on_node(sudo=True, user="ada"), OK, "ada runs pct with `sudo -n`"),
    Case(node.quorum, on_node(quorate=False), FAILED, "cannot be started again", "pvecm status"),
    Case(node.quorum, refused("cluster_not_ready"), FAILED, "because"),
    Case(node.quorum, on_node(quorate=None), SKIPPED, "only root may ask"),
    Case(node.quorum, on_node(quorate=None, clustered=False), OK, "no cluster"),
    Case(node.exists, refused("container_missing", "container 101 does not exist on `pve1`"), FAILED, "does not exist"),
    Case(node.exists, refused("cluster_not_ready", "the cluster is not ready"), SKIPPED, "the cluster is not ready"),
    Case(node.state, on_node(status="stopped"), FAILED, "container 101 is stopped", "pct start 101"),
    Case(node.state, refused("container_missing"), SKIPPED, "no"),
    Case(node.config_lock, configured(lock="backup"), WARNING, "`lock: backup`", "pct unlock 101"),
    Case(node.flock, on_node(holder="812 pct push 101 a b"), WARNING, "process 812 pct push 101 a b", "ps -fp 812"),
    Case(node.nesting, configured(features=None), WARNING, "226/NAMESPACE", "pct set 101 --features nesting=1"),
    Case(node.nesting, configured(ostype="alpine"), SKIPPED, "alpine needs none"),
    Case(
        node.unprivileged, configured(unprivileged=None), WARNING, "root in it is root on the node", "--unprivileged 1"
    ),
    Case(node.memory, configured(memory="2048"), WARNING, "2048 MiB", "--memory 16384"),
    Case(node.memory, configured(memory=None), WARNING, "512 MiB"),
    Case(node.memory, replace(configured(memory="2048"), wanted=NO_GPU), OK, "2048 MiB"),
    Case(node.cores, configured(cores="1"), WARNING, "one core", "--cores 8"),
    Case(node.cores, configured(cores=None, cpulimit="4"), OK, "all cores, cpulimit 4"),
    Case(node.disk, on_node(free_bytes=300_000_000), WARNING, "300 MB free on the node's root", "du -xsh"),
    Case(node.disk, on_node(free_bytes=1000), FAILED, "the cluster's database"),
    # container
    Case(container.answers, TROUBLE, FAILED, "no answer in 10 s", "check the network"),
    Case(container.python, inside(python={"version": [3, 9, 2]}), FAILED, "is 3.9.2; the trainer needs 3.11", "python"),
    Case(
        container.modules, inside(modules={"missing": {"torch": "", "yaml": ""}}), FAILED, "torch, yaml", "torch pyyaml"
    ),
    Case(container.modules, inside(modules={"missing": {"triton": ""}}), FAILED, "no triton"),
    Case(container.modules, inside(NO_GPU, modules={"missing": {"triton": ""}}), OK, "torch 2.11.0"),
    Case(
        container.modules,
        inside(modules={"versions": {"torch": "2.6.0"}}),
        WARNING,
        "torch 2.6.0 (needs 2.11)",
        "'torch>=2.11'",
    ),
    Case(container.init_system, inside(init={"name": "init", "state": None}), WARNING, "init, no systemd", "template"),
    Case(
        container.init_system,
        inside(init={"state": "degraded", "failed": ["ssh.service", "sys-kernel-debug.mount"]}),
        WARNING,
        "degraded: ssh.service failed",
        "systemctl status ssh.service",
    ),
    Case(
        container.init_system, inside(init={"state": "degraded", "failed": ["sys-kernel-debug.mount"]}), OK, "but for"
    ),
    Case(container.init_system, inside(init={"state": "starting"}), FAILED, "`starting`", "--wait"),
    Case(container.init_system, inside(replace(WANTED, transport="local")), SKIPPED, "supervisor"),
    Case(container.root_folder, inside(root={"read_only": True}), FAILED, "/opt is read-only", "dmesg"),
    Case(
        container.root_folder, inside(root={"writable": False}), FAILED, "root may not write to /opt", "chown root /opt"
    ),
    Case(
        container.disk, inside(root={"free_bytes": 5_000_000_000}), WARNING, "5.0 GB free", "dfo releases lab --prune"
    ),
    Case(container.disk, inside(NO_GPU, root={"free_bytes": 5_000_000_000}), OK, "5.0 GB free"),
    Case(container.disk, inside(root={"free_bytes": 5_000}), FAILED, "5 KB free"),
    Case(container.inodes, inside(root={"free_inodes": 40}), FAILED, "40 inodes free", "du --inodes"),
    Case(container.inodes, inside(root={"free_inodes": 4000}), WARNING, "4,000 inodes"),
    Case(container.inodes, inside(root={"free_inodes": None, "file_system": "btrfs"}), OK, "btrfs counts none"),
    Case(container.tmp, inside(tmp={"writable": False}), FAILED, "may not write to /tmp", "chmod 1777 /tmp"),
    Case(container.tmp, inside(tmp={"free_bytes": 150_000_000}), WARNING, "150 MB free", "TMPDIR"),
    Case(container.cache, inside(cache={"file_system": "nfs4"}), WARNING, "stale file handles", "deploy.root"),
    Case(container.shared_memory, inside(shm={"place": "/dev"}), FAILED, "/dev/shm is not there", "mount -t tmpfs"),
    Case(container.shared_memory, inside(shm={"total_bytes": 67_000_000}), WARNING, "67.0 MB", "size=8g"),
    Case(container.memlock, inside(memlock=65536), WARNING, "66 KB: NCCL", "lxc.prlimit.memlock"),
    Case(container.memlock, inside(NO_GPU, memlock=65536), OK, "66 KB"),
    Case(container.cores, inside(cpu={"quota": 4.0}), WARNING, "`nproc` says 16, but 4 cores", "OMP_NUM_THREADS` to 4"),
    Case(container.cores, inside(cpu={"usable": 1}), WARNING, "one core", "--cores 8"),
    Case(container.memory, inside(memory={"available": 1_000_000_000}), WARNING, "1.0 GB of 68.0 GB", "--sort -rss"),
    Case(container.memory, inside(memory={"limit": 2_000_000_000}), WARNING, "of 2.0 GB"),
    Case(container.clock, inside(skew=90.0), WARNING, "90 s ahead of", "chrony"),
    Case(container.clock, inside(skew=-7200.0), FAILED, "2 h behind", "chrony"),
    # GPUs, from the node
    Case(gpu.driver, on_node(devices=replace(DEVICES, driver=None)), FAILED, "no NVIDIA module is loaded", "dkms"),
    Case(
        gpu.node_files,
        on_node(devices=replace(DEVICES, devices={"/dev/nvidia0": (195, 0), "/dev/nvidiactl": (195, 255)})),
        FAILED,
        "no /dev/nvidia1, /dev/nvidia-uvm",
        "nvidia-modprobe -c 0 -u",
    ),
    Case(
        gpu.node_files,
        on_node(wanted=ALL_WANTED, devices=replace(DEVICES, devices={})),
        FAILED,
        "no /dev/nvidia0, /dev/nvidiactl",
    ),
    Case(
        gpu.node_majors,
        on_node(devices=replace(DEVICES, majors={195: "nvidia", 509: "nvidia-uvm"})),
        FAILED,
        "/dev/nvidia-uvm has major 511, which in /proc/devices is nobody",
        "rm /dev/nvidia-uvm",
    ),
    Case(gpu.node_majors, on_node(devices=replace(DEVICES, devices={})), SKIPPED, "no device files"),
    Case(gpu.passed_through, without_devs(), FAILED, "/dev/nvidia-uvm are not passed to container 101", "gpu plan lab"),
    Case(gpu.passed_through, configured(dev3=None), FAILED, "/dev/nvidia-uvm is not passed", "dfo gpu plan lab"),
    Case(gpu.passed_through, replace(configured(dev1=None), wanted=ALL_WANTED), OK, "4 devices passed"),
    Case(gpu.passed_through, replace(without_devs(), wanted=ALL_WANTED), FAILED, "/dev/nvidia0, /dev/nvidia1, "),
    Case(gpu.passed_through, without_devs(*MOUNTS, *RULES), OK, "5 devices passed"),
    Case(gpu.passed_through, refused("container_missing", "container 101 is not here"), SKIPPED, "is not here"),
    Case(gpu.allowed_majors, without_devs(*MOUNTS, *RULES), OK, "`lxc.cgroup2` lines allow"),
    Case(
        gpu.allowed_majors,
        without_devs(*MOUNTS, RULES[0], "lxc.cgroup2.devices.allow: c 508:* rwm"),
        FAILED,
        "major 508 is allowed, and no module has it",
        "gpu plan lab",
    ),
    Case(gpu.allowed_majors, without_devs(*MOUNTS, RULES[0]), FAILED, "major 511 (/dev/nvidia-uvm) is not allowed"),
    Case(
        gpu.allowed_majors,
        without_devs(*MOUNTS, *(rule.replace("cgroup2", "cgroup") for rule in RULES)),
        FAILED,
        "do nothing since Proxmox VE 7",
    ),
    Case(gpu.persistence, on_node(services={"nvidia-persistenced": "inactive"}), WARNING, "inactive", "enable --now"),
    Case(gpu.persistence, on_node(services={}), SKIPPED, "no systemctl"),
    Case(
        gpu.fabric,
        on_node(devices=replace(DEVICES, devices={**FILES, "/dev/nvidia-nvswitch0": (235, 0)})),
        FAILED,
        "nvidia-fabricmanager is inactive: cuInit gives 802",
        "enable --now nvidia-fabricmanager",
    ),
    # GPUs, from inside
    Case(gpu.module_inside, chain(module=None), FAILED, "/proc/driver/nvidia/version cannot be read", "cat"),
    Case(gpu.files_inside, chain(devices={"/dev/nvidia0": None}), FAILED, "/dev/nvidia1, /dev/nvidiactl", "gpu plan"),
    Case(gpu.files_inside, chain(ALL_WANTED, devices={}), FAILED, "`optional` is left out without a word"),
    Case(
        gpu.files_inside,
        chain(replace(WANTED, transport="ssh", vmid=None), devices={}),
        FAILED,
        "not there",
        "nvidia-modprobe -c 0 -u` on its host",
    ),
    *(
        Case(gpu.opened, chain(devices={**dict.fromkeys(FILES), "/dev/nvidia-uvm": code}), FAILED, f"{code}, {words}")
        for code, words in {
            "EPERM": "the control group forbids it",
            "EACCES": "its mode forbids it",
            "ENXIO": "there is no device behind",
            "ENODEV": "there is no device behind",
            "EIO": "the GPU does not answer",
            "EBUSY": "somebody else holds it",
            "EINVAL": "an unusual one",
        }.items()
    ),
    Case(gpu.opened, chain(devices={**dict.fromkeys(FILES), "/dev/nvidia7": "EPERM"}), OK, "root can open them"),
    Case(gpu.opened, chain(devices={}), SKIPPED, "no file"),
    Case(gpu.library, chain(library=None), FAILED, "no libcuda.so.1", f"driver {DRIVER} with `--no-kernel-module`"),
    Case(
        gpu.same_version,
        chain(library={"path": "/lib/libcuda.so.570.86", "version": "570.86"}),
        FAILED,
        f"the node's module is {DRIVER}, the container's libcuda 570.86",
        DRIVER,
    ),
    Case(gpu.same_version, chain(library=None), SKIPPED, "not known"),
    *(
        Case(gpu.smi, chain(smi={"code": code, "said": "NVML"}), FAILED, f"ended with {code}: {words}")
        for code, words in {9: "it cannot reach", 12: "it does not find", 18: "the libraries", 99: "NVML"}.items()
    ),
    Case(gpu.smi, chain(smi={"code": None, "said": "timed out"}), FAILED, "it did not end: timed out"),
    Case(gpu.smi, chain(smi=None), WARNING, "no nvidia-smi", "libraries"),
    *(
        Case(gpu.cu_init, chain(cu_init={"code": code, "said": ""}), FAILED, f"cuInit gives {code}: {words}")
        for code, words in {
            100: "it sees no GPU",
            101: "CUDA_VISIBLE_DEVICES",
            802: "the GPUs wait for the fabric manager",
            803: "the libraries and",
            804: "the CUDA compatibility",
            999: "unknown, which mostly is /dev/nvidia-uvm",
            7: "see CUresult",
        }.items()
    ),
    Case(
        gpu.cu_init, chain(cu_init={"code": None, "said": "OSError: x"}), FAILED, "cannot be called: OSError: x", "ldd"
    ),
    Case(gpu.cu_init, chain(cu_init=None), SKIPPED, "no libcuda"),
    Case(
        gpu.torch, chain(torch={"import_error": "libcudnn"}), FAILED, "torch does not import: libcudnn", "pip install"
    ),
    Case(gpu.torch, chain(torch={"version": "2.11.0+cpu"}), FAILED, "is a CPU build", "CUDA build"),
    Case(gpu.torch, chain(torch={"version": "2.11", "cuda": "13.0"}), FAILED, "(CUDA 13.0) sees no GPU"),
    Case(
        gpu.torch,
        chain(torch={"version": "2.11", "cuda": "13.0", "cuda_available": True, "gpu_count": 1}),
        FAILED,
        "torch sees 1 GPU; `gpus` names 1",
        "correct `gpus`",
    ),
    Case(gpu.torch, chain(torch=None), SKIPPED, "there is no torch"),
    # API
    Case(api.token, replace(API, version=TROUBLE), FAILED, "no answer in 10 s", "check the network"),
    Case(
        api.rights,
        replace(API, lacking=("VM.Audit",)),
        FAILED,
        "no VM.Audit on /vms/101; an empty list is not no container",
        "pveum acl modify /vms/101 --tokens 'dfo@pve!deploy'",
    ),
    Case(api.rights, replace(API, lacking=None), SKIPPED, "the check before it failed"),
    Case(api.container, replace(API, node=TROUBLE), FAILED, "cannot reach"),
    Case(api.node_rights, replace(API, lacking_on_node=("Sys.Audit",)), WARNING, "Sys.Audit on /nodes/pve1", "DfoNode"),
    Case(api.node_rights, replace(API, lacking_on_node=None), SKIPPED, "failed"),
]

GROUPS: list[tuple[str, Checks[Any], Any]] = [
    ("laptop", laptop.CHECKS, LAPTOP),
    ("hop", hop.CHECKS, HOP),
    ("node", node.CHECKS, NODE),
    ("answers of node", (("answers", node.answers),), NODE),
    ("answers", (("answers", container.answers),), inside()),
    ("container", container.CHECKS, inside()),
    ("gpu", gpu.FROM_NODE, NODE),
    ("gpu inside", gpu.INSIDE, chain()),
    ("api", api.CHECKS, API),
]
ALL = [(check, facts) for _, checks, facts in GROUPS for _, check in checks]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check.__name__}-{case.status}-{case.saw[:30]}")
def test_a_check_says_what_is_wrong_and_how_to_help(case: Case) -> None:
    verdict = case.check(case.facts)
    assert verdict.status is case.status, verdict
    assert case.saw in verdict.saw
    assert (verdict.fix is not None) == (case.status in (WARNING, FAILED))
    assert case.fix in (verdict.fix or "")


@pytest.mark.parametrize(("check", "facts"), ALL, ids=lambda value: getattr(value, "__name__", ""))
def test_a_check_passes_on_a_healthy_box_and_can_fail(check: Callable[[Any], Verdict], facts: Any) -> None:
    expected = SKIPPED if check is gpu.fabric else OK  # this box has no NVSwitch
    assert check(facts).status is expected, check(facts)
    assert any(case.check is check and case.status in (WARNING, FAILED) for case in CASES)


def test_there_are_many_checks_and_their_names_are_unique_in_a_group() -> None:
    assert len(ALL) >= 35
    for _, checks, _ in GROUPS:
        names = [name for name, _ in checks]
        assert len(set(names)) == len(names)


def test_a_layer_that_was_not_reached_skips_its_checks_with_the_reason() -> None:
    found = judge("node", node.CHECKS, Missing("the login of `pve1` failed"))
    assert {(f.status, f.verdict.saw) for f in found} == {(SKIPPED, "the login of `pve1` failed")}
    assert len(found) == len(node.CHECKS)


def test_the_page_has_every_check_and_quotes_what_they_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "proxmox.md").read_text(encoding="utf-8")
    text = page.partition("## What `dfo doctor` checks")[2].partition("\n## ")[0]
    checks, messages = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    for _, group, _ in GROUPS:
        for name, _ in group:
            assert re.search(rf"\b{name}\b", checks), name
    said = [case.check(case.facts).saw.replace("`", "") for case in CASES]
    for row in messages.splitlines()[2:]:
        for code in re.findall(r"`` (.+?) ``|`([^`]+)`", row.split(" | ")[0]):
            pattern = ".*".join(map(re.escape, "".join(code).replace("`", "").strip().split("…")))
            assert any(re.search(pattern, text) for text in said), code


# -- a whole examination of this machine ---------------------------------------------------------------------------


def resolved(tmp_path: Path, text: str) -> tuple[ResolvedTarget, Found]:
    (tmp_path / "inventory").mkdir(exist_ok=True)
    (tmp_path / "inventory" / "dfo.yaml").write_text(f"version: 1\ntargets:\n  lab: {text}\n")
    found = find_inventory(environ={}, cwd=tmp_path)
    return load_inventory(found).resolve("lab", environ={}, flags={}).target, found


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("{transport: local}", None),
        ("{transport: local, gpus: []}", ()),
        ("{transport: local, gpus: [1, 0]}", (1, 0)),
        ("{transport: local, launch: {topology: {targets: [cpu], drafters: [cpu]}}}", ()),
        ("{transport: local, launch: {topology: {targets: [0, 2], drafters: [2, 3]}}}", (0, 2, 3)),
    ],
)
def test_which_gpus_are_expected(tmp_path: Path, text: str, gpus: tuple[int, ...] | None) -> None:
    target, _ = resolved(tmp_path, text)
    assert wanted_of(target).gpus == gpus


def test_this_machine_as_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    target, found = resolved(
        tmp_path, "{transport: local, gpus: [], env: {HF_TOKEN: {env: NO_SUCH_TOKEN}}, launch: {config: no.yaml}}"
    )
    diagnosis = examine(target, inventory=found, trace=lambda text, level: None)
    failed = {(finding.group, finding.name) for finding in diagnosis.of(FAILED)}
    assert failed == {("laptop", "secrets"), ("laptop", "run config")}
    assert {f.group for f in diagnosis.of(OK)} == {"laptop", "container"}
    assert {f.group for f in diagnosis.of(SKIPPED)} == {"laptop", "node", "container", "gpu", "api"}
    assert sum(diagnosis.counts.values()) == len(diagnosis.findings) and not (tmp_path / ".dfo").exists()
