# uses: _modules _system _cache
# How the inside of a target is, for `dfo doctor`. Changes nothing.
import glob
import pwd
import resource

CU_INIT = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
TORCH_S = 90
SYSTEMD_S = 10
UNLIMITED = 1 << 60


def init_facts():
    """`state`: what systemd says of itself, None without systemd; `failed`: its units that failed."""
    if not os.path.isdir("/run/systemd/system"):
        return {"name": first_line("/proc/1/comm"), "state": None, "failed": []}
    _, state, _ = run_quiet(["systemctl", "is-system-running"], SYSTEMD_S)
    _, units, _ = run_quiet(["systemctl", "--failed", "--plain", "--no-legend", "--no-pager"], SYSTEMD_S)
    names = [line.split()[0] for line in units.splitlines() if line.split()]
    return {"name": first_line("/proc/1/comm"), "state": state.strip() or "no answer", "failed": names}


def place_facts(path):
    """Space and rights at a folder, or at the one in which it would be made."""
    place = existing(path)
    space = os.statvfs(place)
    return {
        "path": path,
        "place": place,
        "file_system": file_system(os.path.realpath(place)),
        "free_bytes": space.f_bavail * space.f_frsize,
        "total_bytes": space.f_blocks * space.f_frsize,
        # Some file systems (btrfs) have no inode table and report 0 of 0.
        "free_inodes": space.f_favail if space.f_files else None,
        "writable": os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK),
        "read_only": bool(space.f_flag & os.ST_RDONLY),
    }


def number(text):
    return int(text) if text and text.isdigit() and int(text) < UNLIMITED else None


def cpu_facts():
    """`quota`: cores' worth of time that the control group allows, None without a limit."""
    words = (first_line("/sys/fs/cgroup/cpu.max") or "").split()
    quota = int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None
    return {"usable": len(os.sched_getaffinity(0)), "quota": quota}


def memory_facts():
    """`limit`: of the control group, version 2 or 1; lxcfs shows it as `total` as well."""
    names = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limits = [limit for limit in (number(first_line(name)) for name in names) if limit is not None]
    kilobytes = [int((first_line("/proc/meminfo", name) or "x 0").split()[1]) for name in ("MemTotal", "MemAvailable")]
    return {"total": kilobytes[0] * 1024, "available": kilobytes[1] * 1024, "limit": min(limits) if limits else None}


def open_devices():
    """Path → None, or the name of the error, for every NVIDIA device file when this user opens it."""
    found = {}
    for path in sorted(glob.glob("/dev/nvidia*")):
        if not os.path.isdir(path):
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                found[path] = None
            except OSError as error:
                found[path] = errno.errorcode.get(error.errno, str(error.errno))
    return found


def ended(argv):
    """`{code, said}` of a child; code None when it cannot run or does not end."""
    code, out, err = run_quiet(argv, CHILD_S)
    said = (err.strip() or out.strip()).splitlines()[-1:]
    return {"code": code, "said": said[0][:300] if said else ""}


def cu_init():
    """`{code, said}`: what cuInit returns, or why it could not be called."""
    done = ended([sys.executable, "-I", "-c", CU_INIT])
    return {"code": int(done["said"]), "said": ""} if done["code"] == 0 else {"code": None, "said": done["said"]}


def gpu_facts(ask):
    """The links of the chain that can be seen from inside. `ask`: whether somebody wants GPUs; None: where there is a
    trace of one. Without, nothing is opened and nothing slow is run.
    """
    module = kernel_module()
    if ask is None:
        ask = module is not None or bool(glob.glob("/dev/nvidia*"))
    library = library_version()
    return {
        "module": module,
        "devices": open_devices() if ask else {},
        "library": library,
        "smi": ended(["nvidia-smi", "-L"]) if ask and shutil.which("nvidia-smi") else None,
        "cu_init": cu_init() if ask and library else None,
        "torch": torch_facts(TORCH_S) if ask else None,
    }


def work(request, payload):
    need_python()
    root = request["root"]
    uid = os.getuid()
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {
        "time": time.time(),
        "user": user,
        "python": {"version": list(sys.version_info[:3]), "executable": sys.executable},
        "modules": module_facts(request["modules"], request["environment"]),
        "init": init_facts(),
        "root": place_facts(root),
        "cache": place_facts(cache_home(root)),
        "tmp": place_facts(request["environment"].get("TMPDIR", "/tmp")),
        "shm": place_facts("/dev/shm"),
        "memlock": None if memlock == resource.RLIM_INFINITY else memlock,
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "gpu": gpu_facts(request["gpus"]),
    }


_main(work)
