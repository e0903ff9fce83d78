# uses: _devices _runs _core _cache _system
# What is installed and running in the target, as the interpreter that trains sees it.
import importlib.metadata
import platform


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


GPU_FIELDS = ("index", "name", "uuid", "memory.total", "compute_cap", "driver_version")


def gpus():
    rows = _smi("--query-gpu=" + ",".join(GPU_FIELDS))
    return [dict(zip(GPU_FIELDS, row)) for row in rows if len(row) == len(GPU_FIELDS)]


def driver(cards):
    """Kernel module against library: an upgrade of the node changes only the first, and silences nvidia-smi."""
    library = (library_version() or {}).get("version") or (cards[0]["driver_version"] if cards else None)
    return {"kernel_module": kernel_module(), "library": library}


def folder_facts(path):
    size = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
                count += 1
    return {"path": path, "exists": os.path.isdir(path), "bytes": size, "files": count}


def cache_facts(root):
    """Size of the cache that was filled last, and the records of all."""
    records, home, newest = [], cache_home(root), "none"
    for name in store_names(root):
        found = records_in(store_path(root, name))
        if found and found[-1]["created"] >= max([record["created"] for record in records], default=0):
            newest = name
        records += found
    facts = {name: folder_facts(os.path.join(home, newest, name)) for name in ("inductor", "triton")}
    records.sort(key=lambda record: record["created"])
    base = home if os.path.isdir(home) else os.path.dirname(root)
    fingerprint = records[-1]["digest"] if records else None
    return dict(facts, file_system=file_system(base), warmup_fingerprint=fingerprint, records=records)


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
