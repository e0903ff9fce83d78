# uses: _runs
# What releases are: folders with a manifest, one of them current.
import re

MANIFEST = ".dfo-manifest.json"
RELEASE_ID = re.compile(r"[0-9]{8}-[0-9]{4}-[0-9a-f]{6}(-[0-9]+)?")


def release_path(root, release):
    assert RELEASE_ID.fullmatch(release), release
    return os.path.join(root, "releases", release)


def read_manifest(folder):
    """The manifest of a release folder, or None when it is missing or not the one that was written."""
    manifest = read_json(os.path.join(folder, MANIFEST))
    if manifest is None or not isinstance(manifest.get("files"), dict):
        return None
    text = json.dumps(manifest["files"], sort_keys=True, separators=(",", ":"))
    return manifest if hashlib.sha256(text.encode()).hexdigest() == manifest.get("content") else None


def list_releases(root):
    """Releases, oldest first (ids only know minutes). Folders that are not ours are not mentioned."""
    try:
        names = os.listdir(os.path.join(root, "releases"))
    except OSError:
        return []
    found = []
    for name in names:
        if RELEASE_ID.fullmatch(name):
            manifest = read_manifest(release_path(root, name)) or {}
            files = manifest.get("files", {})
            found.append(
                {
                    "id": name,
                    "content": manifest.get("content"),
                    "files": len(files),
                    "bytes": sum(entry["size"] for entry in files.values()),
                    "created": manifest.get("created"),
                    "by": manifest.get("by"),
                    "python": manifest.get("python"),
                }
            )
    return sorted(found, key=lambda release: (release["created"] or 0.0, release["id"]))


def fingerprint(root):
    """Changes whenever a plan made from the facts would no longer hold."""
    state = {
        "current": current_release(root),
        "releases": [[release["id"], release["content"]] for release in list_releases(root)],
        "python": list(sys.version_info[:2]),
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def check_fingerprint(root, expected):
    if fingerprint(root) != expected:
        raise Fail(
            "plan_stale",
            "the target changed after the plan was made",
            "another command deployed, rolled back or pruned in between; current is now %s" % current_release(root),
            "run the command again; nothing was changed",
        )


def damaged_files(folder, files):
    """Names in `files` whose content, size, mode or kind in `folder` is not what the manifest says, sorted."""
    damaged = []
    for path, entry in sorted(files.items()):
        full = os.path.join(folder, path)
        try:
            info = os.lstat(full)
            right = stat.S_ISREG(info.st_mode) and info.st_size == entry["size"]
            right = right and stat.S_IMODE(info.st_mode) == entry["mode"] and sha256_file(full) == entry["sha256"]
        except OSError:
            right = False
        if not right:
            damaged.append(path)
    return damaged


def fsync_path(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def switch_to(root, release):
    """Make a release current: readers see the old one or the new one, never none."""
    fresh = os.path.join(root, "current.new-%d" % os.getpid())
    os.symlink(os.path.join("releases", release), fresh)
    os.replace(fresh, os.path.join(root, "current"))
    fsync_path(root)


def broken(release, why, **details):
    return Fail(
        "release_broken",
        "release `%s` is no longer what was deployed" % release,
        why,
        "choose another release (`dfo releases`), or deploy the code again",
        **details,
    )


def verify_release(root, release):
    """Number of files of a complete release. Raises `unknown_release` or `release_broken`."""
    folder = release_path(root, release)
    manifest = read_manifest(folder)
    if manifest is None and os.path.isdir(folder):
        raise broken(release, "its manifest cannot be read")
    if manifest is None:
        known = [entry["id"] for entry in list_releases(root)]
        raise Fail(
            "unknown_release",
            "release `%s` is not on the target" % release,
            "it has %s" % (", ".join(known) or "no releases"),
            "choose one of those (`dfo releases`)",
        )
    damaged = damaged_files(folder, manifest["files"])
    if damaged:
        few = "%d of %d files differ from its manifest" % (len(damaged), len(manifest["files"]))
        raise broken(release, "%s, first `%s`" % (few, ascii(damaged[0])[1:-1]), files=damaged[:20])
    return len(manifest["files"])


def releases_in_use(root):
    """Release id → who needs it. Processes that outlived their supervisor count too, by the folder they work in."""
    used = {}
    for run in alive_runs(root):
        used.setdefault(run["release"], "run %d" % run["run"])
    prefix = os.path.join(os.path.realpath(root), "releases") + os.sep
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            folder = os.readlink("/proc/%s/cwd" % pid)
            if folder.startswith(prefix):
                used.setdefault(folder[len(prefix) :].split(os.sep)[0], "process %s" % pid)
    return used


def prune_releases(root, candidates):
    """Remove those of the candidates that nobody needs. Returns (removed, kept id → reason)."""
    kept, used, current = {}, releases_in_use(root), current_release(root)
    removed = []
    for release in candidates:
        if release == current:
            kept[release] = "current"
        elif release in used:
            kept[release] = used[release]
        elif os.path.isdir(release_path(root, release)):
            # Renamed first: a half-removed folder must not look like a release.
            doomed = release_path(root, release) + ".partial"
            os.rename(release_path(root, release), doomed)
            shutil.rmtree(doomed)
            removed.append(release)
    return removed, kept


def record_in_audit(root, event, owner, **fields):
    """Append to the audit file; returns what went wrong, if anything: the deed itself is done already."""
    try:
        audit(root, event, by=who(owner), command=owner.get("command"), **fields)
    except OSError as error:
        return ["the audit line could not be written: %s" % error]
    return []


def activate_release(root, lock, release, event, owner, removes=(), staged=None):
    """Make a verified release current, write the audit line, prune. `staged`: the folder to rename into place first.

    What fails after the switch is a warning: the release is current by then.
    """
    previous = current_release(root)
    with lock.sealed(), uninterrupted():
        if staged is not None:
            os.rename(staged, release_path(root, release))
            fsync_path(os.path.join(root, "releases"))
        switch_to(root, release)
        warnings = record_in_audit(root, event, owner, release=release, previous=previous)
    tell("step", name="prune")
    removed, kept = [], {}
    try:
        removed, kept = prune_releases(root, removes)
    except OSError as error:
        warnings.append("old releases could not be removed: %s" % error)
    return {"release": release, "previous": previous, "removed": removed, "kept": kept, "warnings": warnings}
