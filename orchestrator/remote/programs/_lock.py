# The target's lock: for every program that changes releases or `current`, or starts a run.
#
# `lock/` appears by one rename with its owner already inside, so it never exists without one. Taking, breaking and
# releasing happen under a short flock on `tmp/lock.guard`, so that two programs that both find a dead holder cannot
# both take over.
BEAT_S = 5.0
LEASE_S = 60.0


@contextlib.contextmanager
def uninterrupted():
    """Put off signals until the block is done: some pairs of actions must not be torn apart."""
    pending = []
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [(number, signal.signal(number, lambda n, frame: pending.append(n))) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        if pending:
            raise SystemExit(128 + pending[0])


def tell(type, **fields):
    """Report progress; a laptop that is gone is no reason to stop half-way."""
    with contextlib.suppress(BrokenPipeError):
        emit(type, **fields)


def prepare_root(root):
    # Whoever trains may be somebody else than who deploys.
    os.umask(0o022)
    for name in ("releases", "runs", "shared", "tmp"):
        os.makedirs(os.path.join(root, name), exist_ok=True)


@contextlib.contextmanager
def guard(root):
    """A few milliseconds in which nobody else takes, breaks or releases the lock."""
    descriptor = os.open(os.path.join(root, "tmp", "lock.guard"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def namespace():
    """Where a pid means what we think it means: this boot, this container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _holder_is_alive(owner, beat_age):
    if owner.get("manual"):
        return owner.get("expires") is None or time.time() < owner["expires"]
    if owner.get("namespace") and owner["namespace"] == namespace():
        return is_alive(owner.get("process"))
    # Another container on a shared folder, or an earlier boot: its pids say nothing here, its heartbeat does.
    return beat_age < owner.get("lease_s", LEASE_S)


def lock_state(root):
    """The owner's record with `age_s`, `beat_age_s` and `alive`; None when nobody holds the lock."""
    folder = os.path.join(root, "lock")
    try:
        made = os.stat(folder).st_mtime
    except OSError:
        return None
    try:
        beat = os.stat(os.path.join(folder, "beat")).st_mtime
    except OSError:
        beat = made
    owner = read_json(os.path.join(folder, "owner.json")) or {}
    now = time.time()
    beat_age = max(0.0, now - beat)
    return dict(
        owner,
        age_s=round(max(0.0, now - owner.get("started", made)), 1),
        beat_age_s=round(beat_age, 1),
        alive=_holder_is_alive(owner, beat_age),
    )


def ago(seconds):
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return "%d %s" % (seconds // size, unit)
    return "%d s" % seconds


def who(owner):
    return "%s@%s" % (owner.get("user", "somebody"), owner.get("host", "an unknown host"))


def held_error(held, owner):
    """The error for whoever wanted the lock (`owner`) and found it `held`."""
    target = owner.get("target", "the target")
    if held.get("manual"):
        expires = held.get("expires")
        until = "" if expires is None else ", for another %s" % ago(max(0, expires - time.time()))
        mine = who(held) == who(owner)
        return Fail(
            "lock_held",
            "`%s` is locked" % target,
            "%s, %s ago%s: %s" % (who(held), ago(held["age_s"]), until, held.get("message") or "no message"),
            "`dfo lock release %s`" % target if mine else "ask them; or `dfo lock break %s`" % target,
            holder=held,
        )
    command = held.get("command", "an unknown command")
    deploy = command == "dfo deploy"
    return Fail(
        "lock_held",
        "another deploy to `%s` is running" % target if deploy else "`%s` is at work on `%s`" % (command, target),
        "%s, `%s`, started %s ago, alive %s ago" % (who(held), command, ago(held["age_s"]), ago(held["beat_age_s"])),
        "wait with `--lock-wait 5m`; if it hangs, `dfo lock break %s`" % target,
        holder=held,
    )


def take_lock(root, owner, wait_s=0.0):
    """Take the lock or raise `lock_held`. Waits up to `wait_s` for a running command, never for a person.

    `owner`: user, host, pid, command, target; a lock taken by a person has `manual`, `message` and `for_s`.
    """
    limit = time.monotonic() + wait_s
    told = 0.0
    while True:
        held = _take_or_holder(root, owner)
        if held is None:
            return
        if held.get("manual") or time.monotonic() >= limit:
            raise held_error(held, owner)
        if time.monotonic() - told >= 10.0:
            told = time.monotonic()
            # Not `tell`: whoever waits for a laptop that is gone should stop waiting.
            emit("waiting", holder=held)
        time.sleep(0.5)


def _take_or_holder(root, owner):
    """None when the lock is ours now, else who has it."""
    with guard(root):
        held = lock_state(root)
        if held is not None and held["alive"]:
            return held
        if held is not None:
            discard_lock(root)
            if not held.get("manual"):
                tell("note", text="took over the lock of %s (`%s`), which died" % (who(held), held.get("command")))
        for name in sweep(root):
            tell("note", text="removed `%s`, left by a command that died" % name)
        _place_lock(root, owner)
    return None


def _place_lock(root, owner):
    now = time.time()
    lasts = owner.get("for_s")
    record = dict(owner, started=now, lease_s=LEASE_S, namespace=namespace())
    record["process"] = None if owner.get("manual") else process_identity(os.getpid())
    record["expires"] = None if lasts is None else now + lasts
    folder = os.path.join(root, "tmp", "lock-%d" % os.getpid())
    os.mkdir(folder)
    try:
        write_atomic(os.path.join(folder, "owner.json"), json.dumps(record) + "\n")
        open(os.path.join(folder, "beat"), "w").close()
        os.rename(folder, os.path.join(root, "lock"))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def discard_lock(root):
    """Remove the lock whoever holds it; call it under `guard`."""
    aside = os.path.join(root, "tmp", "lock-old-%d" % os.getpid())
    os.rename(os.path.join(root, "lock"), aside)
    shutil.rmtree(aside)


def leftovers(root):
    """What a program that was killed may have left; only its killer's next command may think so, under the lock."""
    found = []
    for folder, is_left in (
        ("releases", lambda name: name.endswith(".partial")),
        ("runs", lambda name: name.startswith(".new-")),
        ("tmp", lambda name: name.startswith(("lock-", "pushed-"))),
        ("shared/cache/compile", lambda name: name.startswith((".restore-", ".doomed-"))),
        ("", lambda name: name.startswith("current.new-")),
    ):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += [os.path.join(folder, n) for n in sorted(os.listdir(os.path.join(root, folder))) if is_left(n)]
    return found


def sweep(root):
    """Remove leftovers; returns their names. Safe only where nobody else holds the lock."""
    found = leftovers(root)
    for name in found:
        path = os.path.join(root, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)
    return found


class HeldLock:
    """The lock while this program holds it. The open folder keeps its inode from being given to another lock."""

    def __init__(self, root):
        self.root = root
        self.folder = os.path.join(root, "lock")
        self.descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)

    def is_ours(self):
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.folder))
        except OSError:
            return False

    def check(self):
        if not self.is_ours():
            raise Fail(
                "lock_not_held",
                "somebody broke this command's lock; the current release is untouched",
                "`lock/` on the target is not the one this command took",
                "`dfo audit` says who; then run the command again",
            )

    @contextlib.contextmanager
    def sealed(self):
        """For the steps that count: nobody can break the lock between the check and the end of the block."""
        with guard(self.root):
            self.check()
            yield


@contextlib.contextmanager
def held_lock(root, owner, wait_s=0.0):
    """Hold the lock for the block, with a heartbeat; leftovers of dead commands are gone when it begins."""
    prepare_root(root)
    take_lock(root, owner, wait_s)
    lock = HeldLock(root)
    done = threading.Event()
    threading.Thread(target=_beat, args=(lock, done), daemon=True).start()
    try:
        yield lock
    finally:
        done.set()
        with uninterrupted(), guard(root):
            if lock.is_ours():
                discard_lock(root)


def _beat(lock, done):
    while not done.wait(BEAT_S):
        try:
            os.utime(os.path.join(lock.folder, "beat"))
        except OSError:
            return
