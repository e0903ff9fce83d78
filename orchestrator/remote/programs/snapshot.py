# uses: _devices
# What is installed and running in the target, as the interpreter that trains sees it.
import glob
import importlib.metadata
import importlib.util
import platform

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
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def torch_facts():
    """Asked in a child: an import that crashes or hangs is itself a finding."""
    if importlib.util.find_spec("torch") is None:
        return None
    code, out, err = run_quiet([sys.executable, "-I", "-c", PROBE], 180)
    try:
        return json.loads(out)
    except ValueError:
        last = (err.strip().splitlines() or ["no message"])[-1]
        return {"import_error": "the import ended with exit code %s: %s" % (code, last[:500])}


def origin_of(distribution):
    """`index`, `editable <url>`, `vcs <url>@<commit>` or `url <url>` (PEP 610)."""
    try:
        direct = json.loads(distribution.read_text("direct_url.json") or "null")
    except (OSError, ValueError):
        direct = None
    if not isinstance(direct, dict):
        return "index"
    url = str(direct.get("url"))
    if direct.get("dir_info", {}).get("editable"):
        return "editable " + url
    if "vcs_info" in direct:
        return "vcs %s@%s" % (url, direct["vcs_info"].get("commit_id"))
    return "url " + url


def packages():
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            key = name.lower().replace("_", "-").replace(".", "-")
            # The first on sys.path wins, as it does for an import.
            found.setdefault(
                key,
                {"name": key, "version": str(distribution.version), "origin": origin_of(distribution)},
            )
    return [found[key] for key in sorted(found)]


def first_line(path, prefix=""):
    try:
        with open(path) as file:
            return next((line.strip() for line in file if line.startswith(prefix)), None)
    except OSError:
        return None


GPU_FIELDS = ("index", "name", "uuid", "memory.total", "compute_cap", "driver_version")


def gpus():
    rows = _smi("--query-gpu=" + ",".join(GPU_FIELDS))
    return [dict(zip(GPU_FIELDS, row)) for row in rows if len(row) == len(GPU_FIELDS)]


def driver(cards):
    """Kernel module against library: a host upgrade changes only the first."""
    line = first_line("/proc/driver/nvidia/version", "NVRM")
    words = [word for word in (line or "").split() if word[:1].isdigit() and "." in word]
    return {
        "kernel_module": words[0] if words else None,
        "library": cards[0]["driver_version"] if cards else None,
    }


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


def folder_facts(path):
    size = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
                count += 1
    return {"path": path, "exists": os.path.isdir(path), "bytes": size, "files": count}


def cache_facts(root):
    cache = os.path.join(root, "shared", "cache")
    facts = {name: folder_facts(os.path.join(cache, name)) for name in ("inductor", "triton")}
    pattern = os.path.join(glob.escape(cache), "inductor", "warmup-*.json")
    records = [read_json(path) or {} for path in glob.glob(pattern)]
    newest = max(records, key=lambda record: record.get("created", 0), default={})
    base = cache if os.path.isdir(cache) else os.path.dirname(root)
    return dict(facts, file_system=file_system(base), warmup_fingerprint=newest.get("digest"))


def memory_facts():
    total = int((first_line("/proc/meminfo", "MemTotal") or "x 0").split()[1]) * 1024
    limit = first_line("/sys/fs/cgroup/memory.max")
    return {"total": total, "limit": int(limit) if limit and limit.isdigit() else None}


def os_facts():
    name = (first_line("/etc/os-release", "PRETTY_NAME=") or "=").split("=", 1)[1].strip('"')
    return {
        "name": name,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "init": first_line("/proc/1/comm"),
    }


VARIABLES = ("CUDA_", "NCCL_", "NVIDIA_", "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "LD_LIBRARY_PATH", "HF_HOME")


def work(request, payload):
    root = request["root"]
    cards = gpus()
    place = root if os.path.isdir(root) else os.path.dirname(root) or "/"
    disk = shutil.disk_usage(place if os.path.isdir(place) else "/")
    cpu = (first_line("/proc/cpuinfo", "model name") or ":").split(":", 1)[1].strip()
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "prefix": sys.prefix,
        },
        "packages": packages(),
        "torch": torch_facts(),
        "gpus": cards,
        "driver": driver(cards),
        "caches": cache_facts(root),
        "cpu": {"model": cpu, "cores": os.cpu_count(), "usable": len(os.sched_getaffinity(0))},
        "memory": memory_facts(),
        "disk": {"total": disk.total, "free": disk.free, "file_system": file_system(root)},
        "os": os_facts(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }


_main(work)
