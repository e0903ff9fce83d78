# uses: _runs
# The files of one run: a manifest with hashes (`op` manifest), then bytes from any offset (`op` bytes).
import re
import stat as st

BLOCK = 256 * 1024
BEAT = 4.0


class Heart:
    """Lets the laptop hear us while a large file is hashed."""

    spoke = 0.0

    def beat(self):
        now = time.monotonic()
        if now - self.spoke > BEAT:
            emit("beat")
            self.spoke = now


def open_inside(folder, path):
    """A regular file of the run, opened without following a link anywhere on the way. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *parents, name = path.split("/")
        for parent in parents:
            inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        # A pipe must not make us wait.
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    finally:
        os.close(fd)
    if not st.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return found


def unfinished(name):
    """Names of what is still being written."""
    return name.startswith(".") or ".tmp-" in name or name.endswith((".partial", ".new"))


def walk(folder, include, skipped):
    """Relative paths of the regular files under `include`; what is left out is noted with the reason."""
    for top in include:
        place = os.path.join(folder, top)
        if os.path.islink(place):
            skipped.append({"path": top, "why": "it is a link"})
            continue
        if os.path.isfile(place):
            yield top
        for base, folders, names in os.walk(place):
            relative = os.path.relpath(base, folder)
            for name in [name for name in folders if os.path.islink(os.path.join(base, name))]:
                skipped.append({"path": os.path.join(relative, name), "why": "it is a link"})
            folders[:] = sorted(name for name in folders if not unfinished(name))
            for name in sorted(names):
                mode = os.lstat(os.path.join(base, name)).st_mode
                path = os.path.normpath(os.path.join(relative, name))
                if st.S_ISREG(mode) and not unfinished(name):
                    yield path
                elif not st.S_ISREG(mode):
                    skipped.append(
                        {"path": path, "why": "it is a %s" % ("link" if st.S_ISLNK(mode) else "device or pipe")}
                    )


def newest_only(folder, top, keep):
    """Folders of `top` that are not among its `keep` newest, by the number in their name."""
    try:
        names = os.listdir(os.path.join(folder, top))
    except OSError:
        return []
    numbered = [(int(found.group()), name) for name in names for found in [re.search(r"\d+$", name)] if found]
    numbered = sorted(item for item in numbered if not unfinished(item[1]))
    return ["%s/%s/" % (top, name) for _, name in numbered[:-keep]]


def measure(folder, path, heart):
    """Size and hash of a file as it is now; a log that grows meanwhile is taken up to that size."""
    fd = open_inside(folder, path)
    try:
        size, digest, done = os.fstat(fd).st_size, hashlib.sha256(), 0
        while done < size:
            block = os.read(fd, min(1 << 20, size - done))
            if not block:
                raise OSError(errno.EIO, "became shorter", path)
            digest.update(block)
            done += len(block)
            heart.beat()
        return {"path": path, "size": size, "sha256": digest.hexdigest()}
    finally:
        os.close(fd)


def manifest(run, folder, request):
    skipped, files, heart = [], [], Heart()
    left_out = tuple(name for top, keep in request.get("newest", {}).items() for name in newest_only(folder, top, keep))
    for path in walk(folder, request["include"], skipped):
        if left_out and path.startswith(left_out):
            continue
        try:
            files.append(measure(folder, path, heart))
        except OSError as error:
            # Checkpoints are pruned while the run goes on: what vanished is not there to be copied.
            skipped.append({"path": path, "why": error.strerror or str(error)})
    return {"run": run, "state": run_state(folder)["state"], "files": files, "skipped": skipped, "older": len(left_out)}


def send(folder, files):
    for wanted in files:
        path, offset, end = wanted["path"], wanted["offset"], wanted["size"]
        try:
            fd = open_inside(folder, path)
        except OSError as error:
            emit("gone", path=path, why=error.strerror or str(error))
            continue
        try:
            while offset < end:
                block = os.pread(fd, min(BLOCK, end - offset), offset)
                if not block:
                    emit("gone", path=path, why="it became shorter")
                    break
                emit("data", block, path=path, offset=offset)
                offset += len(block)
        finally:
            os.close(fd)


def work(request, payload):
    run, folder = find_run(request["root"], request.get("run"))
    if request["op"] == "manifest":
        return manifest(run, folder, request)
    send(folder, request["files"])
    return {}


_main(work)
