# Shared head of every program that runs inside the target. Standard library only, Python 3.8 and later.
# `REQUEST` is the JSON request; `PAYLOAD` is what follows it on stdin.
import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time

_write_lock = threading.Lock()


def emit(type, data=b"", **fields):
    """Write one record to the laptop."""
    fields["t"] = type
    if type == "data":
        fields["n"] = len(data)
    line = b"\x1e" + json.dumps(fields).encode() + b"\n"
    with _write_lock:
        sys.stdout.buffer.write(line + data)
        sys.stdout.buffer.flush()


class Fail(Exception):
    """Ends the program with an error the laptop shows as it is."""

    def __init__(self, kind, what, why, fix, **details):
        super().__init__(what)
        self.fields = dict(details, kind=kind, what=what, why=why, fix=fix)


def process_identity(pid):
    """`{pid, start_ticks, boot_id}`: a recycled pid is not mistaken for the old process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return None
    ended = fields[0] in (b"Z", b"X")
    return None if ended else {"pid": pid, "start_ticks": int(fields[19]), "boot_id": boot}


def is_alive(identity):
    return bool(identity) and process_identity(identity["pid"]) == identity


def read_json(path):
    """The JSON object in a file, or None when it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_atomic(path, text, mode=0o644):
    """Write beside the file, flush to disk, rename."""
    temporary = "%s.tmp-%d" % (path, os.getpid())
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, mode)
    os.replace(temporary, path)


def sha256_file(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def audit(root, event, **fields):
    """Append one line to the target's audit file; O_APPEND keeps lines whole."""
    line = json.dumps(dict(fields, t=time.time(), event=event)) + "\n"
    with open(os.path.join(root, "audit.jsonl"), "a") as file:
        file.write(line)


def current_release(root):
    """The id that `current` points to, or None."""
    try:
        return os.path.basename(os.readlink(os.path.join(root, "current")))
    except OSError:
        return None


def _main(work):
    def interrupted(number, frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, interrupted)
    stdin = sys.stdin.buffer
    request = json.loads(stdin.read(int(stdin.readline())).decode())
    try:
        emit("done", result=work(request, stdin) or {})
    except Fail as failure:
        emit("fail", **failure.fields)
    except BrokenPipeError:
        # Nobody reads any more; leave as SIGPIPE would, without a last word into the same pipe.
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        emit("fail", **_os_failure(error, request.get("root", "")))


def _os_failure(error, root):
    name = error.filename or root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(root).free if os.path.isdir(root) else 0
        return {
            "kind": "disk_full",
            "what": "no space left under `%s`" % root,
            "why": "writing `%s` failed with %s; %.1f MB are free" % (name, os.strerror(error.errno), free / 1e6),
            "fix": "free some space (`dfo releases --prune 2`), then run the command again",
        }
    kind = {errno.EROFS: "read_only", errno.EACCES: "not_permitted", errno.EPERM: "not_permitted"}
    return {
        "kind": kind.get(error.errno, "remote_failed"),
        "what": "a file operation failed on the target",
        "why": "`%s`: %s" % (name, os.strerror(error.errno) if error.errno else error),
        "fix": "check that `%s` exists and is writable there" % root,
    }
