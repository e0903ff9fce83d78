# uses: _lock _release _devices _modules _system
# Everything a plan needs to know about the target, in one answer. Changes nothing.
import ast
import base64
import platform


def parse(sources):
    """Path → None or `[line, column, message]`, for files (base64) that the laptop's older Python cannot judge."""
    verdicts = {}
    for path, text in sources.items():
        try:
            ast.parse(base64.b64decode(text), path)
            verdicts[path] = None
        except (SyntaxError, ValueError) as error:
            where = [getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1]
            verdicts[path] = [*where, getattr(error, "msg", None) or str(error)]
    return verdicts


def operating_system():
    try:
        with open("/etc/os-release") as file:
            pairs = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
        return pairs.get("PRETTY_NAME", "").strip('"') or platform.platform()
    except OSError:
        return platform.platform()


def root_facts(root):
    """Space and rights at the root, or at the folder in which it would be made."""
    place = existing(root)
    space = os.statvfs(place)
    return {
        "exists": place == root,
        "place": place,
        "is_folder": os.path.isdir(place),
        "current_is_link": not os.path.lexists(os.path.join(root, "current"))
        or os.path.islink(os.path.join(root, "current")),
        "writable": os.access(place, os.W_OK | os.X_OK),
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "free_bytes": space.f_bavail * space.f_frsize,
        # Some file systems (btrfs) have no inode table and report 0 of 0.
        "free_inodes": space.f_favail if space.f_files else None,
    }


def switches(root):
    """`[event, release]` of every time that `current` moved, oldest first."""
    moves = []
    with contextlib.suppress(OSError), open(os.path.join(root, "audit.jsonl"), "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line.decode())
                if entry["event"] in ("deploy", "rollback"):
                    moves.append([entry["event"], entry["release"]])
    return moves[-200:]


def wait_for_lock(root, seconds):
    """Wait for a running command, never for a person; returns the state of the lock."""
    limit = time.monotonic() + seconds
    told = 0.0
    while True:
        held = lock_state(root)
        if held is None or not held["alive"] or held.get("manual") or time.monotonic() >= limit:
            return held
        if time.monotonic() - told >= 10.0:
            told = time.monotonic()
            emit("waiting", holder=held)
        time.sleep(0.5)


def release_facts(root, content):
    """Releases, and which files of the current one and of those with this content are no longer as deployed."""
    # In this order: a deploy in between makes a release we do not know, never a current one that we do not.
    current = current_release(root)
    releases = list_releases(root)
    damaged, files = {}, {}
    for release in releases:
        if release["id"] == current or (content is not None and release["content"] == content):
            folder = release_path(root, release["id"])
            manifest = read_manifest(folder) or {"files": {}}
            damaged[release["id"]] = damaged_files(folder, manifest["files"])
            if release["id"] == current and (release["content"] != content or damaged[current]):
                files = manifest["files"]
    return {"releases": releases, "current": current, "damaged": damaged, "current_files": files}


def work(request, payload):
    root = request["root"]
    need_python()
    held = wait_for_lock(root, request.get("wait_s", 0.0))
    return {
        "v": 1,
        "time": time.time(),
        "python": {
            "version": list(sys.version_info[:3]),
            "implementation": sys.implementation.name,
            "executable": sys.executable,
        },
        "os": operating_system(),
        "init": first_line("/proc/1/comm"),
        "root": root_facts(root),
        "lock": held,
        "lock_error": held_error(held, request["owner"]).fields if held is not None and held["alive"] else None,
        "leftovers": leftovers(root) + (["lock"] if held is not None and not held["alive"] else []),
        "runs": [{key: run[key] for key in ("run", "state", "release", "devices")} for run in alive_runs(root)],
        "switches": switches(root),
        "modules": module_facts(request.get("modules", []), request.get("environment", {})),
        "parsed": parse(request.get("parse", {})),
        "gpus": gpu_table() if request.get("gpus") else None,
        "fingerprint": fingerprint(root),
        **release_facts(root, request.get("content")),
    }


_main(work)
