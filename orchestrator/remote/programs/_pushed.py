# An archive that comes past us: the laptop lets Proxmox VE push it into a file that we keep for it.
#
# `pct push` reports success whatever becomes of the file, so we measure. It writes into the file that is there and
# keeps its owner and mode; if we are gone by then, so is the folder, and the push has nowhere to go.


@contextlib.contextmanager
def arriving(root, request, payload):
    """The archive, open for reading: what follows on stdin or, when `request` has `archive_sha256`, a pushed file."""
    if not request.get("archive_sha256"):
        yield payload
        return
    folder = os.path.join(root, "tmp", "pushed-%d" % os.getpid())
    os.mkdir(folder, 0o700)
    try:
        path = os.path.join(folder, "archive")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        emit("ready", path=path)
        with agreed(path, request, payload) as archive:
            yield archive
    finally:
        with uninterrupted(), contextlib.suppress(OSError):
            # Renamed before it goes: a file that a late push makes at that moment would keep it alive.
            os.rename(folder, folder + ".gone")
            shutil.rmtree(folder + ".gone", ignore_errors=True)


def agreed(path, request, payload):
    """What the laptop's words say: `pushed` when the file should be complete, `stream` when the archive follows."""
    word = payload.readline()
    if word == b"pushed\n":
        size, free = os.path.getsize(path), shutil.disk_usage(path).free
        if size == request["archive_size"] and sha256_file(path) == request["archive_sha256"]:
            return open(path, "rb")
        emit("refused", size=size, free=free)
        word = payload.readline()
    if word != b"stream\n":
        raise Fail("stage_failed", "the archive was not sent", "the laptop gave up", "run the command again")
    os.remove(path)
    return contextlib.nullcontext(payload)
