"""What changed between two environments, sorted by how much it hurts, with the consequence in words.

A finding is either a difference between two snapshots or a fault of one of them alone: a mixed CUDA wheel set is
wrong even if it was wrong yesterday, but only a fault that is new is a difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from orchestrator.environment import node_drift
from orchestrator.environment.caches import CacheRecord, gone
from orchestrator.environment.findings import Finding, Severity, changed
from orchestrator.environment.snapshot import Package, Snapshot

COLD_CACHE = "compile cache will not be reused: the next launch compiles everything again"
#: Package → consequence, where a change hurts more than a note.
PACKAGES: dict[str, tuple[Severity, str]] = {
    "torch": (Severity.COLD, COLD_CACHE),
    "triton": (Severity.COLD, COLD_CACHE),
    "pytorch-triton": (Severity.COLD, COLD_CACHE),
    "transformers": (Severity.RISK, "the target's code path may differ: compare features before you train on"),
    "tokenizers": (Severity.RISK, "token ids may differ from those of the data already prepared"),
    "safetensors": (Severity.RISK, "checkpoints are read and written by it"),
    "numpy": (Severity.RISK, "a major step breaks packages compiled against the old one"),
}
#: Packages that pin their own torch, triton or CUDA wheels and pull the trainer's along.
SERVING = ("sglang", "vllm", "flashinfer-python", "flashinfer", "sgl-kernel", "tensorrt-llm", "lmdeploy", "xformers")
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "fuse.glusterfs", "9p"})
CUDA_WHEEL = re.compile(r"^(?:nvidia|cuda|cupy|cuequivariance|nixl).*-cu(?P<major>1[0-9])$")


def faults(now: Snapshot) -> Iterator[Finding]:
    """What is wrong with one environment, whatever it was before."""
    if now.torch is None:
        yield Finding(Severity.BROKEN, "torch", None, "not installed", "nothing can train in this environment")
    elif now.torch.import_error:
        yield Finding(Severity.BROKEN, "torch import", None, now.torch.import_error, _why_no_import(now))
    yield from _mixed_cuda_wheels(now)
    yield from node_drift.faults(now.node)
    module, library = now.driver.kernel_module, now.driver.library
    if module and library and module != library:
        yield Finding(
            Severity.BROKEN,
            "driver",
            None,
            f"kernel module {module}, library {library}",
            "CUDA refuses to start (driver/library version mismatch): install the libraries of the node's driver",
        )
    if now.gpus and now.torch and not now.torch.import_error and not now.torch.cuda_available:
        reason = "is a CPU build" if now.torch.cuda is None else "cannot open them"
        yield Finding(
            Severity.BROKEN, "GPUs", None, f"{len(now.gpus)} visible, torch {reason}", "training would run on the CPU"
        )
    if now.caches.file_system in NETWORK_FILE_SYSTEMS:
        yield Finding(
            Severity.RISK,
            "cache file system",
            None,
            now.caches.file_system,
            "compile caches on a network file system end in stale file handles: use a local disk",
        )


def differences(before: Snapshot, now: Snapshot) -> list[Finding]:
    """What `now` has that `before` had not, or otherwise: worst first, then by name."""
    known = list(faults(before))
    appeared = (fault for fault in faults(now) if fault not in known)
    found = [*appeared, *_packages(before, now), *_builds(before, now), *_machine(before, now), *_caches(before, now)]
    found += node_drift.differences(before.node, now.node, now.driver.library)
    return sorted(found, key=lambda f: (-f.severity, f.what))


def _why_no_import(now: Snapshot) -> str:
    text = (now.torch and now.torch.import_error) or ""
    wheel = f"nvidia-cudnn-cu{_torch_cuda_major(now)}"
    library = re.search(r"lib[\w+-]+\.so[.\d]*", text)
    if library and "cudnn" in library[0]:
        return f"{library[0]} is missing: install {wheel} in the version torch asks for"
    if "cuDNN version incompatibility" in text:
        return f"another cuDNN is found first: reinstall {wheel}, and look for one in LD_LIBRARY_PATH or the system"
    if library:
        return f"{library[0]} cannot be loaded: a CUDA wheel of torch was removed or replaced"
    return "nothing can train until `python -c 'import torch'` works there"


def _torch_cuda_major(now: Snapshot) -> str:
    """CUDA major that torch was built for, from its local version or from the wheels beside it."""
    version = now.version_of("torch") or ""
    tagged = re.search(r"\+cu(\d\d)", version)
    majors = {m["major"] for p in now.packages if (m := CUDA_WHEEL.match(p.name))}
    return tagged[1] if tagged else (majors.pop() if len(majors) == 1 else "XX")


def _mixed_cuda_wheels(now: Snapshot) -> Iterator[Finding]:
    wheels: dict[str, list[str]] = {}
    for package in now.packages:
        if match := CUDA_WHEEL.match(package.name):
            wheels.setdefault(match["major"], []).append(package.name)
    if len(wheels) > 1:
        listed = "; ".join(f"cu{major}: {', '.join(names[:3])}" for major, names in sorted(wheels.items()))
        yield Finding(
            Severity.BROKEN,
            "mixed CUDA wheels",
            None,
            listed,
            "two CUDA major versions in one environment load each other's libraries: keep the one torch was built for",
        )


def _packages(before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    old = {p.name: p for p in before.packages}
    new = {p.name: p for p in now.packages}
    for name in sorted(old.keys() | new.keys()):
        was, is_ = old.get(name), new.get(name)
        if was and is_ and (was.version, was.origin) == (is_.version, is_.origin):
            continue
        severity, consequence = PACKAGES.get(name, (Severity.NOTE, ""))
        if was is None and name in SERVING:
            severity = Severity.RISK
            consequence = (
                "a serving package appeared beside the trainer: it pins its own torch and CUDA wheels, "
                "so the next install may change both; give it an environment of its own"
            )
        elif is_ is None and name in PACKAGES:
            severity, consequence = Severity.BROKEN, "the trainer imports it"
        yield Finding(severity, name, _shown(was), _shown(is_), consequence)


def _shown(package: Package | None) -> str | None:
    if package is None:
        return None
    return package.version if package.origin == "index" else f"{package.version} ({package.origin})"


def _builds(before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    """The same version can be another build: CUDA, commit or ABI decide what the cache is keyed by."""
    rows: list[tuple[Severity, str, object, object, str]] = [
        (Severity.COLD, "python", before.python.version, now.python.version, COLD_CACHE),
        (Severity.RISK, "python executable", before.python.executable, now.python.executable,
         "another environment answers now"),
    ]  # fmt: skip
    if before.torch and now.torch:
        rows += [
            (Severity.COLD, "torch build", before.torch.git_version, now.torch.git_version, COLD_CACHE),
            (Severity.COLD, "torch CUDA", before.torch.cuda, now.torch.cuda, COLD_CACHE),
            (Severity.COLD, "cuDNN", before.torch.cudnn, now.torch.cudnn, "convolution and attention plans change"),
            (Severity.COLD, "C++ ABI", before.torch.cxx11_abi, now.torch.cxx11_abi, COLD_CACHE),
            (Severity.COLD, "CPU capability", before.torch.cpu_capability, now.torch.cpu_capability, COLD_CACHE),
        ]
        if now.torch.import_error:
            rows = rows[:2]
    yield from changed(rows)


def _machine(before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    def cards(snapshot: Snapshot) -> str:
        names = [gpu.get("name", "?") for gpu in snapshot.gpus]
        return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or "none"

    cold_gpu = "kernels are compiled per GPU model: " + COLD_CACHE
    yield from changed([
        (Severity.COLD, "GPUs", cards(before), cards(now), cold_gpu),
        (Severity.RISK, "driver library", before.driver.library, now.driver.library,
         "must equal the node's kernel module"),
        *_module(before, now),
        (Severity.NOTE, "usable cores", before.cpu.usable, now.cpu.usable, ""),
        (Severity.NOTE, "CPU", before.cpu.model, now.cpu.model, ""),
        (Severity.NOTE, "memory limit", before.memory.limit, now.memory.limit, ""),
        (Severity.NOTE, "OS", before.os.name, now.os.name, ""),
        (Severity.NOTE, "kernel", before.os.kernel, now.os.kernel, ""),
        (Severity.RISK, "libc", before.os.libc, now.os.libc, "compiled extensions may not load"),
    ])  # fmt: skip
    for name in sorted(before.variables.keys() | now.variables.keys()):
        was, is_ = before.variables.get(name), now.variables.get(name)
        yield from changed([(Severity.NOTE, f"${name}", was, is_, "")])


def _module(before: Snapshot, now: Snapshot) -> list[tuple[Severity, str, object, object, str]]:
    """The kernel module as seen from inside, where nobody asked the node itself."""
    if before.node and now.node:
        return []
    was, is_ = before.driver.kernel_module, now.driver.kernel_module
    return [(Severity.RISK, "driver module", was, is_, node_drift.what_follows(is_, now.driver.library))]


def _caches(before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    """Warm-ups that were of use before and are no longer: lost, or made useless by what is installed now."""
    kept = {record.digest for record in now.caches.records}
    for record in before.caches.records:
        if gone(record, before.installed):
            continue
        if lost := gone(record, now.installed):
            yield _useless("cache", record, "; ".join(lost))
        elif record.digest not in kept:
            what = f"it took {record.seconds:.0f} s to make; `dfo cache restore` puts a saved one back"
            yield Finding(Severity.COLD, f"cache {record.name}", "warm", None, what)


def useless_archives(records: Iterable[CacheRecord], now: Snapshot) -> Iterator[Finding]:
    """Saved caches that nothing installed in `now` can use."""
    for record in records:
        if lost := gone(record, now.installed):
            yield _useless("saved cache", record, "; ".join(lost))


def _useless(kind: str, record: CacheRecord, why: str) -> Finding:
    what = f"it took {record.seconds:.0f} s to make, and the next launch compiles all of it again"
    return Finding(Severity.COLD, f"{kind} {record.name}", "warm", f"useless: {why}", what)
