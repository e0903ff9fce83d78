# uses: _lock _runs _core _cache _unpack
# Puts a saved compile cache into its place: all of it is here and has the right hash before any of it is unpacked, and
# all of it is unpacked beside its place before that place changes.
import gzip
import zlib

PARTS = ("inductor/", "triton/")
LONGEST_READ = 8 << 20


class Bounded(io.RawIOBase):
    """Unpacked bytes. No honest archive makes us read much at once: its files are copied in pieces."""

    def __init__(self, packed):
        self.packed = packed

    def read(self, size=-1):
        if not 0 <= size <= LONGEST_READ:
            raise damaged("it asks for %d bytes at once" % size)
        return self.packed.read(size)

    def tell(self):
        return self.packed.tell()

    def seek(self, *place):
        return self.packed.seek(*place)


def damaged(why):
    return Fail(
        "damaged",
        "the saved cache is damaged; nothing was changed",
        why,
        "restore another one, or warm up again: `dfo launch --warmup-first`",
    )


def receive(payload, request, path):
    """Write the payload to a file and compare its hash: before that, nothing looks into it."""
    source, digest = Counted(payload), hashlib.sha256()
    with open(path, "xb") as file:
        while True:
            block = source.read(1 << 20)
            if not block:
                break
            if source.count > request["bytes"]:
                raise damaged("more than the announced %d bytes came" % request["bytes"])
            digest.update(block)
            file.write(block)
    if source.count < request["bytes"]:
        raise Fail(
            "truncated",
            "the transfer broke off; nothing was changed",
            "%d of %d bytes arrived" % (source.count, request["bytes"]),
            "run the command again; if it repeats, check the connection",
        )
    if digest.hexdigest() != request["sha256"]:
        raise damaged("its SHA-256 is %s…, not %s…" % (digest.hexdigest()[:12], request["sha256"][:12]))


def unpack(path, folder, request):
    """Regular files below the two parts of a cache, in the announced number and size; anything else ends it."""
    count = size = 0
    try:
        with gzip.open(path) as packed, tarfile.open(fileobj=Bounded(packed), mode="r:", encoding="utf-8") as archive:
            while True:
                member = archive.next()
                if member is None:
                    break
                if not member.isreg() or not is_safe(member.name) or not member.name.startswith(PARTS):
                    raise damaged("it holds `%s`, which is no file of a cache" % ascii(member.name)[1:-1][:200])
                count, size = count + 1, size + member.size
                if count > request["files"] or size > request["unpacked"]:
                    raise damaged("it holds more than the announced files or bytes")
                with create(folder, member.name, 0o755 if member.mode & 0o100 else 0o644) as target:
                    shutil.copyfileobj(archive.extractfile(member), target, 1 << 20)
                archive.members = []  # tarfile would remember every one
    except (tarfile.TarError, EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged("it cannot be read: %s" % error) from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise damaged("it holds `%s` twice" % ascii(os.path.relpath(error.filename, folder))[1:-1]) from error
    if (count, size) != (request["files"], request["unpacked"]):
        raise damaged(
            "%d files with %d bytes were in it, %d with %d announced"
            % (count, size, request["files"], request["unpacked"])
        )


def check_space(home, request):
    free = shutil.disk_usage(home).free
    need = request["bytes"] + request["unpacked"]
    if need > free:
        raise Fail(
            "disk_full",
            "not enough space for the cache under `%s`" % home,
            "%.1f MB are needed, %.1f MB are free" % (need / 1e6, free / 1e6),
            "free some space (`dfo cache prune`, `dfo releases --prune 2`), then run the command again",
        )


def look(root, name, request):
    """What is in the place now: `nothing`, this very cache (`there`), or another one (`other`), which is not lost."""
    place = store_path(root, name)
    if not os.path.lexists(place) or is_bare(place):
        return "nothing"
    here = {record["digest"]: record["created"] for record in records_in(place)}
    if request["digests"] and set(request["digests"]) <= set(here):
        return "there"
    if not request["replace"]:
        newest = max(here.values(), default=None)
        age = "" if newest is None else ", the newest made %s ago" % ago(time.time() - newest)
        raise Fail(
            "cache_exists",
            "the target has another cache `%s`" % name,
            "%d warm-ups are recorded in it%s" % (len(here), age),
            "`--replace` puts the saved one in its place and keeps the old one beside it",
        )
    refuse_runs(root, name, request["environment"])
    return "other"


def put(root, name, staged, lock):
    """Rename into place; a cache that was there stays as `NAME-replaced-TIME`. Returns that name, if any."""
    place, aside = store_path(root, name), None
    with contextlib.ExitStack() as stack:
        if os.path.lexists(place):
            stack.enter_context(nobody_fills(root, name))
        stack.enter_context(lock.sealed())
        stack.enter_context(uninterrupted())
        if os.path.lexists(place) and is_bare(place):
            shutil.rmtree(place)
        elif os.path.lexists(place):
            aside = "%s-replaced-%s" % (name, time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
            os.rename(place, store_path(root, aside))
        os.rename(staged, place)
    return aside


def work(request, payload):
    root, name, owner, home = request["root"], request["store"], request["owner"], cache_home(request["root"])
    with held_lock(root, owner, request["wait_s"]) as lock:
        found = look(root, name, request)
        if found == "there":
            return {"state": "there", "path": store_path(root, name), "aside": None}
        os.makedirs(home, exist_ok=True)
        staging = os.path.join(home, ".restore-%d" % os.getpid())
        try:
            os.mkdir(staging)
            check_space(home, request)
            archive = os.path.join(staging, "archive")
            receive(payload, request, archive)
            tell("step", name="unpack")
            store = os.path.join(staging, "store")
            unpack(archive, store, request)
            if sorted(record["digest"] for record in records_in(store)) != sorted(request["digests"]):
                raise damaged("the warm-ups recorded in it are not those that were announced")
            os.sync()
            aside = put(root, name, store, lock)
            audit(root, "cache_restore", by=who(owner), command=owner["command"], store=name, aside=aside)
            return {"state": "restored", "path": store_path(root, name), "aside": aside}
        finally:
            shutil.rmtree(staging, ignore_errors=True)


_main(work)
