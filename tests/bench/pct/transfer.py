"""`pct push` and `pct pull`, with the lie that matters: once the copy has begun, they exit 0 whatever happens.

A worker process copies, in the container's mount and user namespaces on its side. What it says goes to stderr and
into the task list; its status is never looked at, and neither is the result of a write.
"""

import errno
import os
import sys

from . import world
from .world import Lock, PctError

CHUNK = 1 << 20
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


class Failed(Exception):
    """What the worker says before it gives up."""


def pct_push(vmid, args):
    if not world.running(vmid):
        raise PctError("can only push files to a running CT")
    with Lock(vmid):
        _as_task("push_file", vmid, lambda: _push(vmid, args))


def pct_pull(vmid, args):
    if not world.running(vmid):
        raise PctError("can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct.pm line 664.")
    with Lock(vmid):
        _as_task("pull_file", vmid, lambda: _pull(vmid, args))


def _as_task(kind, vmid, work):
    read, write = os.pipe()
    sys.stderr.flush()
    if os.fork() == 0:
        _worker(work, write)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    os.wait()
    os.write(2, said)
    world.record_task(kind, vmid, os.fsdecode(said).strip() or "OK")


def _worker(work, report):
    status = 0
    try:
        os.umask(0o022)
        work()
    except Failed as failure:
        os.write(report, os.fsencode(f"{failure}\n"))
        status = 1
    finally:
        os._exit(status)


def _push(vmid, args):
    mode = _mode(args.get("perms"))
    source = args["file"]
    try:
        reader = os.open(source, os.O_RDONLY)
    except OSError:
        raise Failed(f"failed to open {source} for reading") from None
    limit = world.switch("push-truncated")
    _enter(vmid)
    uid, gid = _identity(args.get("user"), "uid", "passwd"), _identity(args.get("group"), "gid", "group")
    writer = _create(args["destination"], mode, uid, gid)
    _copy(reader, writer, sys.maxsize if limit is None else int(limit))


def _pull(vmid, args):
    mode = _mode(args.get("perms"))
    uid, gid = _identity(args.get("user"), "uid", "passwd"), _identity(args.get("group"), "gid", "group")
    writer = _create(args["destination"], mode, uid, gid)
    _enter(vmid)
    try:
        reader = os.open(args["path"], os.O_RDONLY)
    except OSError as error:
        raise Failed(f"failed to open {args['path']}: {os.strerror(error.errno)}") from None
    _copy(reader, writer, sys.maxsize)


def _create(path, mode, uid, gid):
    """Opens in place: an existing file keeps its inode, owner and mode, and has lost its content already."""
    try:
        writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as error:
        raise Failed(f"failed to create file: {path}: {os.strerror(error.errno)}") from None
    try:
        if uid is not None or gid is not None:
            os.fchown(writer, -1 if uid is None else uid, -1 if gid is None else gid)
    except OSError as error:
        raise Failed(f"failed to change file owner: {os.strerror(error.errno)}") from None
    if mode is not None:
        os.fchmod(writer, mode)
    return writer


def _copy(reader, writer, left):
    """At most `left` bytes. What cannot be read or written is dropped without a word: a folder, a full disk."""
    try:
        while left and (chunk := os.read(reader, min(CHUNK, left))):
            left -= len(chunk)
            while chunk:
                chunk = chunk[os.write(writer, chunk) :]
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise


def _mode(perms):
    """Octal, or hexadecimal with 0x; anything else is refused by the worker, so the call still exits 0."""
    if perms is None:
        return None
    try:
        return int(perms, 16) if perms.lower().startswith("0x") else int(perms, 8)
    except ValueError:
        raise Failed(f"invalid mode: '0{perms}'") from None


def _identity(name, what, database):
    """A number as it is, a name from the `/etc` that the process sees now."""
    if name is None or name.isdigit():
        return None if name is None else int(name)
    with open(f"/etc/{database}") as file:
        found = [line.split(":")[2] for line in file if line.startswith(f"{name}:")]
    if not found:
        raise Failed(f"failed to get {what} for: {name}")
    return int(found[0])


def _enter(vmid):
    """Become root inside the container's namespaces, with its `/` as root and current folder."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    pid = world.init_pid(vmid)
    theirs, ours = f"/proc/{pid}/ns", "/proc/self/ns"
    own_users = os.readlink(f"{theirs}/user") != os.readlink(f"{ours}/user")
    kinds = [*([("user", CLONE_NEWUSER)] if own_users else []), ("mnt", CLONE_NEWNS)]
    for file, kind in [(os.open(f"{theirs}/{name}", os.O_RDONLY), kind) for name, kind in kinds]:
        if libc.setns(file, kind):
            raise OSError(ctypes.get_errno(), "setns")
    if own_users:
        os.setgroups([])
        os.setgid(0)
        os.setuid(0)
