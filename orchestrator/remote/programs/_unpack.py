# Taking an archive from stdin, which may have been cut off, damaged or made to hurt.


class Counted(io.RawIOBase):
    """The payload, counting what came, to tell a broken transfer from a damaged one."""

    def __init__(self, raw):
        self.raw, self.count = raw, 0

    def read(self, size=-1):
        block = self.raw.read(size)
        self.count += len(block)
        return block


def create(folder, path, mode):
    """A new file below the staging folder, open for writing."""
    full = os.path.join(folder, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, mode)
    return open(descriptor, "wb")


def is_safe(path):
    """Relative, normal, and below the folder it is joined to."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not any(part in ("", ".", "..") for part in parts)
