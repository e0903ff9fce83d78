# What the system says of itself: one line of a file, a file system, the driver, torch.
import importlib.util
import re

#: Seconds for a child: longer than a GPU without persistence mode takes to wake up.
CHILD_S = 30
PROBE = r"""
import json, sys
out = {}
try:
    import torch
    out["version"] = torch.__version__
    out["git_version"] = torch.version.git_version
    out["cuda"] = torch.version.cuda
    out["hip"] = getattr(torch.version, "hip", None)
    out["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    out["cxx11_abi"] = torch.compiled_with_cxx11_abi()
    out["arch_list"] = torch.cuda.get_arch_list() if torch.cuda.is_available() else []
    out["cuda_available"] = torch.cuda.is_available()
    out["gpu_count"] = torch.cuda.device_count()
    out["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
except BaseException as error:
    out["import_error"] = "%s: %s" % (type(error).__name__, error)
json.dump(out, sys.stdout)
"""


def run_quiet(argv, timeout):
    """(exit code, stdout, stderr); exit code None when it cannot run or does not end."""
    try:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = subprocess.run(argv, timeout=timeout, **streams)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def torch_facts(seconds=180):
    """Asked in a child: an import that crashes or hangs is itself a finding."""
    if importlib.util.find_spec("torch") is None:
        return None
    code, out, err = run_quiet([sys.executable, "-I", "-c", PROBE], seconds)
    try:
        return json.loads(out)
    except ValueError:
        last = (err.strip().splitlines() or ["no message"])[-1]
        return {"import_error": "the import ended with exit code %s: %s" % (code, last[:500])}


def first_line(path, prefix=""):
    try:
        with open(path) as file:
            return next((line.strip() for line in file if line.startswith(prefix)), None)
    except OSError:
        return None


def existing(path):
    """The path, or the nearest folder above it that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def file_system(path):
    """(type, mount point) of the deepest mount that holds `path`."""
    best = ("", None)
    with open("/proc/self/mounts", "rb") as file:
        for line in file:
            _, mount, kind = [part.decode(errors="replace") for part in line.split()[:3]]
            mount = mount.replace("\\040", " ")
            inside = path == mount or path.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best[0]):
                best = (mount, kind)
    return best[1]


def kernel_module():
    """The version of the node's NVIDIA module, which a container sees as its own; None where there is none to see."""
    line = first_line("/proc/driver/nvidia/version", "NVRM")
    words = [word for word in (line or "").split() if word[:1].isdigit() and "." in word]
    return words[0] if words else None


def library_version():
    """`{path, version}` of the libcuda that programs get; None without one."""
    _, listed, _ = run_quiet(["ldconfig", "-p"], CHILD_S)
    found = re.search(r"libcuda\.so\.1 \([^)]*x86-64[^)]*\) => (\S+)", listed) or re.search(
        r"libcuda\.so\.1 .*=> (\S+)", listed
    )
    if found is None:
        return None
    path = os.path.realpath(found.group(1))
    version = re.search(r"libcuda\.so\.(\d+\.[\d.]+)$", path)
    return {"path": path, "version": version.group(1) if version else None}
