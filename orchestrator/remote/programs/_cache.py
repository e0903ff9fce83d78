# uses: _runs _core
# Compile caches: one folder per set of compilers, with the records of the warm-ups that filled it.
import re

STORE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,150}")
RECORD = re.compile(r"warmup-[0-9a-f]{16}\.json")
LARGEST_RECORD = 1 << 20
RECORD_KEYS = {"digest": str, "created": (int, float), "seconds": (int, float), "entries": list, "fingerprint": dict}
ASK_S = 200  # importing torch from a cold disk is what takes long


def cache_home(root):
    return os.path.join(root, "shared", "cache", "compile")


def store_path(root, name):
    assert STORE.fullmatch(name), name
    return os.path.join(cache_home(root), name)


def store_names(root):
    """Folders only: a link would lead to what is not ours to measure or to remove."""
    home = cache_home(root)
    names = os.listdir(home) if os.path.isdir(home) else []
    folders = [name for name in names if os.path.isdir(os.path.join(home, name))]
    return sorted(n for n in folders if STORE.fullmatch(n) and not os.path.islink(os.path.join(home, n)))


def records_in(store):
    """The records of warm-ups in a cache's folder, oldest first, without those that are damaged."""
    folder = os.path.join(store, "inductor")
    found = []
    for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        path = os.path.join(folder, entry)
        if RECORD.fullmatch(entry) and os.path.isfile(path) and os.path.getsize(path) <= LARGEST_RECORD:
            record = read_json(path) or {}
            if all(isinstance(record.get(key), kind) for key, kind in RECORD_KEYS.items()):
                kept = {key: record[key] for key in RECORD_KEYS}
                numbers = {key: float(record[key]) for key in ("created", "seconds")}
                found.append(dict(kept, entries=len(record["entries"]), **numbers))
    return sorted(found, key=lambda record: record["created"])


def is_bare(place):
    """Folders and locks only, as a process leaves them that has compiled nothing yet."""
    return not os.path.islink(place) and all(name.endswith(".lock") for _, _, names in os.walk(place) for name in names)


def cache_stores(root):
    """All caches with anything in them: name, path, bytes, files and records."""
    found = []
    for name in [name for name in store_names(root) if not is_bare(store_path(root, name))]:
        size = count = 0
        for folder, _, names in os.walk(store_path(root, name)):
            for entry in names:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(folder, entry)).st_size
                    count += 1
        path = store_path(root, name)
        found.append({"name": name, "path": path, "bytes": size, "files": count, "records": records_in(path)})
    return found


def live_store(root, environment):
    """The name of the cache that the current release would use now, or None."""
    release = current_release(root)
    if release is None:
        return None
    variables = json_from_core(os.path.join(root, "releases", release), ["environment"], environment, ASK_S) or {}
    parent, name = os.path.split(os.path.dirname(variables.get("TORCHINDUCTOR_CACHE_DIR", "")))
    return name if parent == cache_home(root) else None


@contextlib.contextmanager
def nobody_fills(root, name):
    """Keep warm-ups out of a cache for the block; fails at once while one is at work."""
    path = os.path.join(store_path(root, name), "inductor", "warmup.lock")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            raise Fail(
                "cache_busy",
                "the cache `%s` is being filled" % name,
                "process %s holds its lock" % (holder or "unknown"),
                "wait for the warm-up (`dfo status`), then run the command again",
            ) from error
        yield
    finally:
        os.close(descriptor)


def refuse_runs(root, store, environment):
    """A cache that a run may be using stays as it is."""
    runs = [run["run"] for run in alive_runs(root)]
    if runs and live_store(root, environment) in (store, None):
        raise Fail(
            "run_alive",
            "run %d may be using the cache `%s`" % (runs[0], store),
            "it is alive, and this is the cache of the current release",
            "wait for it, or `dfo stop %d`" % runs[0],
            run=runs[0],
        )
