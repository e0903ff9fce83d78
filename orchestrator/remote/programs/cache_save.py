# uses: _runs _core _cache
# Sends one compile cache as a tar.gz: the same files give the same bytes, whenever and by whomever they were written.
import gzip

BLOCK = 256 * 1024
BEAT_S = 4.0


class Outlet(io.RawIOBase):
    """What is written here goes to the laptop in blocks, and into a hash."""

    def __init__(self):
        self.waiting, self.digest, self.sent, self.unpacked, self.spoke = bytearray(), hashlib.sha256(), 0, 0, 0.0

    def writable(self):
        return True

    def write(self, data):
        self.waiting += data
        while len(self.waiting) >= BLOCK:
            self._send(BLOCK)
        if time.monotonic() - self.spoke > BEAT_S:
            emit("beat")
            self.spoke = time.monotonic()
        return len(data)

    def _send(self, size):
        block = bytes(self.waiting[:size])
        del self.waiting[:size]
        self.digest.update(block)
        self.sent += len(block)
        self.spoke = time.monotonic()
        emit("data", block, unpacked=self.unpacked)

    def finish(self):
        while self.waiting:
            self._send(BLOCK)


def belongs(name):
    """Locks and what is still being written stay where they are."""
    return not (name.startswith(".") or name.endswith((".lock", ".tmp", ".partial")) or ".tmp." in name)


def files_of(folder, left_out):
    """(relative path, size) of the regular files, sorted."""
    found = []
    for base, folders, names in os.walk(folder):
        relative = os.path.relpath(base, folder)
        left_out.extend(name for name in folders if os.path.islink(os.path.join(base, name)))
        folders[:] = [name for name in folders if name not in ("locks", "__pycache__") and not name.startswith("tmp.")]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                info = os.lstat(os.path.join(base, name))
                if not stat.S_ISREG(info.st_mode):
                    left_out.append(name)
                elif belongs(name):
                    found.append((os.path.normpath(os.path.join(relative, name)), info.st_size))
    return sorted(found)


def add(archive, folder, path, outlet):
    """One file as it is now; False when it is gone."""
    try:
        descriptor = os.open(os.path.join(folder, path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        member = tarfile.TarInfo(path)
        member.size = info.st_size
        member.mode = 0o755 if info.st_mode & stat.S_IXUSR else 0o644
        archive.addfile(member, file)
        outlet.unpacked += member.size
    return True


def work(request, payload):
    root, name = request["root"], request["store"]
    if name not in store_names(root):
        raise Fail(
            "unknown_cache",
            "there is no cache `%s`" % name,
            "`%s` has %s" % (cache_home(root), ", ".join(store_names(root)) or "none"),
            "`dfo cache status` lists them",
        )
    folder, left_out, count = store_path(root, name), [], 0
    with nobody_fills(root, name):
        files = files_of(folder, left_out)
        emit("begin", unpacked=sum(size for _, size in files), files=len(files))
        outlet = Outlet()
        # No name and no time in the head, so that equal caches give equal archives.
        packed = gzip.GzipFile(filename="", mode="wb", compresslevel=3, fileobj=outlet, mtime=0)
        with packed, tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            for path, _ in files:
                count += add(archive, folder, path, outlet)
        outlet.finish()
        records = records_in(folder)
    return {
        "path": folder,
        "sha256": outlet.digest.hexdigest(),
        "bytes": outlet.sent,
        "unpacked": outlet.unpacked,
        "files": count,
        "left_out": sorted(left_out)[:20],
        "records": records,
    }


_main(work)
