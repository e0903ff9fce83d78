"""The chain from the node's driver to CUDA in the container, link by link."""

from __future__ import annotations

import re

from orchestrator.doctor.facts import GpuInside, Node, Trouble
from orchestrator.doctor.verdict import Checks, Verdict, failed, ok, skipped, warning
from orchestrator.proxmox.gpu import ALWAYS, MAKE_DEVICES, Config, old_lines, passed, trouble
from orchestrator.words import count

#: Without these no CUDA program starts; the tools node is for profilers.
NEEDED = ALWAYS[:2]
_OPEN = {
    "EPERM": "the control group forbids it: its major number is not allowed",
    "EACCES": "its mode forbids it",
    "ENXIO": "there is no device behind the file: the driver went away, or its major number is an old one",
    "ENODEV": "there is no device behind the file: the driver went away, or its major number is an old one",
    "EIO": "the GPU does not answer: `dmesg | grep Xid` on the node",
    "EBUSY": "somebody else holds it alone",
}
_SMI = {
    9: "it cannot reach the driver",
    12: "it does not find the driver's libraries",
    18: "the libraries and the driver's module have different versions",
    15: "a GPU has fallen off the bus",
}
_CU_INIT = {
    3: "it is not initialised: the libraries are damaged",
    34: "the library is a stub for building, not the driver's",
    100: "it sees no GPU: the files are not there, or CUDA_VISIBLE_DEVICES hides them",
    101: "CUDA_VISIBLE_DEVICES names a GPU that is not there",
    802: "the GPUs wait for the fabric manager of the node",
    803: "the libraries and the driver's module have different versions",
    804: "the CUDA compatibility libraries do not fit this GPU",
    999: "unknown, which mostly is /dev/nvidia-uvm: missing, not allowed, or with an old major number",
}


# -- from the node -----------------------------------------------------------------------------------------------


def driver(node: Node) -> Verdict:
    if node.devices.driver is None:
        fix = "on the node: `apt install proxmox-headers-$(uname -r)`, `dkms autoinstall`, then `nvidia-smi`"
        return failed(f"no NVIDIA module is loaded in kernel {node.devices.kernel} of the node", fix)
    return ok(f"the node has driver {node.devices.driver}")


def node_files(node: Node) -> Verdict:
    wanted = [f"/dev/nvidia{number}" for number in node.wanted.gpus or ()]
    missing = [path for path in (*wanted, *NEEDED) if path not in node.devices.devices]
    if not node.devices.gpus and not wanted:
        missing.insert(0, "/dev/nvidia0")
    if missing:
        why = f"the node has no {', '.join(missing)}: they appear with the first use of CUDA after a boot"
        return failed(why, f"`{MAKE_DEVICES}` on the node, and in a unit ordered before pve-guests.service")
    return ok(f"the node has {count(len(node.devices.gpus), 'GPU')}: {', '.join(map(str, node.devices.gpus))}")


def node_majors(node: Node) -> Verdict:
    for path, (major, _) in sorted(node.devices.devices.items()):
        owner = node.devices.majors.get(major, "")
        if not owner.startswith("nvidia"):
            why = (
                f"{path} has major {major}, which in /proc/devices is {owner or 'nobody'}: it is left from another boot"
            )
            return failed(why, f"on the node: `rm {path}`, then `{MAKE_DEVICES}`")
    if not node.devices.devices:
        return skipped("the node has no device files")
    return ok("the files have the numbers of /proc/devices")


def passed_through(node: Node) -> Verdict:
    if isinstance(node.config, Trouble):
        return skipped(node.config.what)
    given = passed(node.config)
    gpus = [f"/dev/nvidia{number}" for number in node.wanted.gpus or node.devices.gpus]
    if not node.wanted.gpus and given.intersection(gpus):
        gpus = []  # some of them, which nobody has named
    if missing := [path for path in (*gpus, *NEEDED) if path not in given]:
        why = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not passed to container {node.wanted.vmid}"
        return failed(why, f"`dfo gpu plan {node.wanted.target}` prints the `pct set` lines")
    return ok(f"{count(len(given), 'device')} passed")


def allowed_majors(node: Node) -> Verdict:
    if isinstance(node.config, Trouble):
        return skipped(node.config.what)
    # Only the inside can tell whether a mode lets it in, so the hint about unprivileged containers is left out.
    if wrong := list(trouble(node.devices, Config({}, node.config.raw))):
        plan = f"`dfo gpu plan {node.wanted.target}`: `dev` entries follow the numbers by themselves"
        return failed("; ".join(wrong), plan)
    if old_lines(node.devices, node.config):
        return ok("the `lxc.cgroup2` lines allow the numbers of /proc/devices")
    return ok("`dev` entries: Proxmox VE allows the right numbers at each start")


def persistence(node: Node) -> Verdict:
    state = node.services.get("nvidia-persistenced")
    if state is None:
        return skipped("the node has no systemctl to ask")
    if state != "active":
        why = f"nvidia-persistenced is {state} on the node: GPUs sleep between programs and take seconds to wake"
        return warning(why, "`systemctl enable --now nvidia-persistenced` on the node")
    return ok("nvidia-persistenced is active on the node")


def fabric(node: Node) -> Verdict:
    if not any(path.startswith("/dev/nvidia-nvswitch") for path in node.devices.devices):
        return skipped("the node has no NVSwitch")
    state = node.services.get("nvidia-fabricmanager", "unknown")
    if state != "active":
        why = f"the node has NVSwitches and nvidia-fabricmanager is {state}: cuInit gives 802"
        return failed(why, "`systemctl enable --now nvidia-fabricmanager` on the node, in the driver's version")
    return ok("nvidia-fabricmanager is active on the node")


# -- from inside -------------------------------------------------------------------------------------------------


def module_inside(seen: GpuInside) -> Verdict:
    if seen.gpu.module is None:
        why = "/proc/driver/nvidia/version cannot be read inside: the node has no module loaded, or hides it"
        return failed(why, "`cat /proc/driver/nvidia/version` on the node")
    return ok(f"kernel module {seen.gpu.module}")


def files_inside(seen: GpuInside) -> Verdict:
    wanted = [f"/dev/nvidia{number}" for number in seen.wanted.gpus or ()]
    missing = [path for path in (*wanted, *NEEDED) if path not in seen.gpu.devices]
    gpus = [path for path in seen.gpu.devices if re.fullmatch(r"/dev/nvidia\d+", path)]
    if not gpus and not wanted:
        missing.insert(0, "/dev/nvidia0")
    if missing:
        why = f"{', '.join(missing)} not there: a mount with `optional` is left out without a word"
        return failed(why, _plan(seen) or "`nvidia-modprobe -c 0 -u` on its host")
    return ok(f"{count(len(gpus), 'GPU')} and {', '.join(NEEDED)}")


def opened(seen: GpuInside) -> Verdict:
    refused = {path: code for path, code in seen.gpu.devices.items() if code is not None and path in _used(seen)}
    if refused:
        path, code = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        fix = _plan(seen) or f"`ls -l {path}` there; `chmod 666` is what NVIDIA's own driver sets"
        return failed(f"{seen.said.user} cannot open {path}{more}: {code}, {_OPEN.get(code, 'an unusual one')}", fix)
    if not seen.gpu.devices:
        return skipped("there is no file to open")
    return ok(f"{seen.said.user} can open them")


def library(seen: GpuInside) -> Verdict:
    found = seen.gpu.library
    if found is None:
        fix = f"in the container: NVIDIA's driver {_driver(seen)} with `--no-kernel-module`, then `ldconfig`"
        return failed("`ldconfig -p` has no libcuda.so.1", fix)
    return ok(found.path)


def same_version(seen: GpuInside) -> Verdict:
    module, found = seen.driver or seen.gpu.module, seen.gpu.library
    if module is None or found is None or found.version is None:
        return skipped("one of the two versions is not known")
    if module != found.version:
        why = f"the node's module is {module}, the container's libcuda {found.version}"
        return failed(why, f"in the container: NVIDIA's driver {module} with `--no-kernel-module`, then `ldconfig`")
    return ok(f"module and libcuda are {module}")


def smi(seen: GpuInside) -> Verdict:
    done = seen.gpu.smi
    if done is None:
        return warning("there is no nvidia-smi: `status` cannot show GPUs", "install it with the driver's libraries")
    if done.code == 0:
        return ok("`nvidia-smi -L` works")
    means = _SMI.get(done.code or 0, done.said or "no message")
    if done.code is None:
        means = f"it did not end: {done.said}"
    return failed(f"`nvidia-smi -L` ended with {done.code}: {means}", "correct the links before this one first")


def cu_init(seen: GpuInside) -> Verdict:
    done = seen.gpu.cu_init
    if done is None:
        return skipped("there is no libcuda to call")
    if done.code == 0:
        return ok("cuInit gives 0")
    if done.code is None:
        return failed(
            f"cuInit cannot be called: {done.said}", "`ldd $(ldconfig -p | sed -n 's/.*libcuda.so.1.*=> //p')`"
        )
    fix = {
        802: "`systemctl enable --now nvidia-fabricmanager` on the node",
        999: f"`{MAKE_DEVICES}` on the node, then {_plan(seen) or 'try again'}",
    }.get(done.code, "correct the links before this one first")
    return failed(f"cuInit gives {done.code}: {_CU_INIT.get(done.code, 'see CUresult in the driver API')}", fix)


def torch(seen: GpuInside) -> Verdict:
    found = seen.gpu.torch
    pip = f"`{seen.said.python.executable} -m pip install --force-reinstall torch` (a CUDA build)"
    if found is None:
        return skipped("there is no torch")
    if found.import_error:
        return failed(f"torch does not import: {found.import_error}", pip)
    if found.cuda is None:
        return failed(f"torch {found.version} is a CPU build", pip)
    if not found.cuda_available:
        return failed(
            f"torch {found.version} (CUDA {found.cuda}) sees no GPU", "correct the links before this one first"
        )
    lost = [str(number) for number in seen.wanted.gpus or () if number >= found.gpu_count]
    if lost:
        why = f"torch sees {count(found.gpu_count, 'GPU')}; `gpus` names {', '.join(lost)}"
        return failed(
            why, f"correct `gpus` of target `{seen.wanted.target}`, or pass them: {_plan(seen) or 'see above'}"
        )
    return ok(f"torch {found.version} sees {count(found.gpu_count, 'GPU')}")


def _used(seen: GpuInside) -> set[str]:
    """The files that a run opens."""
    gpus = seen.wanted.gpus
    every = [path for path in seen.gpu.devices if re.fullmatch(r"/dev/nvidia\d+", path)]
    return {*NEEDED, *([f"/dev/nvidia{number}" for number in gpus] if gpus else every)}


def _plan(seen: GpuInside) -> str | None:
    return f"`dfo gpu plan {seen.wanted.target}`" if seen.wanted.vmid is not None else None


def _driver(seen: GpuInside) -> str:
    return seen.driver or seen.gpu.module or "as on the node"


FROM_NODE: Checks[Node] = (
    ("driver", driver),
    ("files on the node", node_files),
    ("numbers", node_majors),
    ("passed through", passed_through),
    ("allowed", allowed_majors),
    ("persistence", persistence),
    ("fabric", fabric),
)
INSIDE: Checks[GpuInside] = (
    ("module", module_inside),
    ("files", files_inside),
    ("open", opened),
    ("libcuda", library),
    ("same version", same_version),
    ("nvidia-smi", smi),
    ("cuInit", cu_init),
    ("torch", torch),
)
