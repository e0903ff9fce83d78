# uses: _runs _log_starts
# Sends the logs of one run by byte offset; with `follow`, until the run has ended and its files are read out.
import stat as st

BLOCK = 64 * 1024
BURST = 256  # blocks of one file before the others get their turn
BEAT = 4.0  # the laptop takes 15 s of silence for a dead link
POLLS = ((10.0, 0.1), (None, 0.2))  # (seconds since the last byte, pause)
USUAL = ("launch", "generate", "preflight", "warmup", "train", "evaluate", "export")


class Log:
    """The log of one stage, held open: only so a replaced file can be told from a grown one."""

    def __init__(self, stage, path):
        self.stage = stage
        self.path = path
        self.offset = 0
        # A pipe or a link in the place of a log must not make us wait, or show another file.
        self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not st.S_ISREG(os.fstat(self.fd).st_mode):
            os.close(self.fd)
            raise OSError(errno.EINVAL, "is not a regular file", path)

    @property
    def size(self):
        return os.fstat(self.fd).st_size

    @property
    def file(self):
        """Which file this is; changes when another one takes its place."""
        found = os.fstat(self.fd)
        return "%d:%d" % (found.st_dev, found.st_ino)

    def resume(self, position):
        """Go on where the laptop stopped printing, or at 0 when that place is no longer there."""
        self.offset = position["offset"]
        if position["file"] != self.file:
            self.restart("replaced")
        elif self.size < self.offset:
            self.restart("truncated")

    def restart(self, why):
        emit("restart", stage=self.stage, why=why, was=self.offset, size=self.size, file=self.file)
        self.offset = 0

    def send(self, end=None):
        """Send what is new, up to `end`; the number of bytes sent."""
        if self.size < self.offset:
            self.restart("truncated")
        sent = 0
        for _ in range(BURST):
            want = BLOCK if end is None else min(BLOCK, end - self.offset)
            block = os.pread(self.fd, want, self.offset) if want > 0 else b""
            if not block:
                break
            emit("data", block, stage=self.stage, offset=self.offset, file=self.file)
            self.offset += len(block)
            sent += len(block)
        return sent

    def follow_path(self):
        """After the held file is read out: whether another file has taken its place."""
        try:
            successor = Log(self.stage, self.path)
        except OSError:
            return False
        if successor.file == self.file:
            os.close(successor.fd)
            return False
        os.close(self.fd)
        self.fd = successor.fd
        self.restart("replaced")
        return True

    def replaced(self):
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return "%d:%d" % (found.st_dev, found.st_ino) != self.file


class Logs:
    """The logs of a run in the order of its stages."""

    def __init__(self, folder, only):
        self.folder = folder
        self.only = only
        self.logs = []

    def discover(self):
        """Open logs that are new; the ones known keep their place."""
        known = {log.stage for log in self.logs}
        try:
            names = os.listdir(os.path.join(self.folder, "logs"))
        except OSError:
            return
        stages = {name[:-4] for name in names if name.endswith(".log")} - known
        if self.only is not None:
            stages &= {self.only}
        begun = ["launch"]
        if stages:
            begun += [line.get("stage") for line in json_lines(os.path.join(self.folder, "stages.jsonl"))]
        for stage in sorted(stages, key=lambda stage: (_place(begun, stage), _place(USUAL, stage), stage)):
            with contextlib.suppress(OSError):
                self.logs.append(Log(stage, os.path.join(self.folder, "logs", stage + ".log")))

    def starts(self):
        return {log.stage: {"offset": log.offset, "file": log.file} for log in self.logs}

    def send(self):
        sent = 0
        for log in self.logs:
            sent += log.send()
            if log.replaced() and log.offset >= log.size and log.follow_path():
                sent += log.send()
        return sent

    def read_out(self):
        return all(log.offset >= log.size for log in self.logs)


def _place(order, name):
    return order.index(name) if name in order else len(order)


def standing(root, run):
    """What the laptop is told about the run: all of it, and since when it is in its stage."""
    described = describe_run(root, run, marked_processes())
    begun = [
        line.get("t")
        for line in json_lines(os.path.join(root, "runs", str(run), "stages.jsonl"))
        if line.get("stage") == described["stage"] and line.get("event") == "begin"
    ]
    return dict(described, stage_since=begun[-1] if begun else described["started"])


def told(state):
    """What about a state is worth a message; its heartbeat is not."""
    return [state.get(key) for key in ("state", "reason", "stage")]


def leave(number, frame):
    # Nothing to clean up, and a full pipe must not hold us back.
    os._exit(128 + number)


def work(request, payload):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    try:
        return follow(request)
    except BrokenPipeError:
        os._exit(0)  # the laptop is gone: nobody is left to tell


def follow(request):
    root = request["root"]
    run, folder = find_run(root, request.get("run"))
    state = run_state(folder)
    logs = Logs(folder, request.get("stage"))
    logs.discover()
    positions = request.get("positions")
    if positions is None:
        choose_starts(logs.logs, folder, request)
        # All at once: a link that breaks between two of them must not lose what was chosen here.
        emit("run", state=standing(root, run), starts=logs.starts())
    else:
        emit("run", state=standing(root, run), starts=positions)
        for log in logs.logs:
            if log.stage in positions:
                log.resume(positions[log.stage])
    if request.get("follow"):
        follow_on(logs, folder, run, root, told(state))
    else:
        for log in logs.logs:
            end = log.size
            while log.offset < end and log.send(end):
                pass
    return {"state": standing(root, run), "sizes": {log.stage: log.size for log in logs.logs}}


def follow_on(logs, folder, run, root, known):
    """Until the run has ended and, after that, a look found nothing new."""
    spoke = active = time.monotonic()
    while True:
        # The state is read before the files: what was written before the end is then seen after it.
        state = run_state(folder)
        logs.discover()
        sent = logs.send()
        now = time.monotonic()
        if sent:
            spoke = active = now
        if told(state) != known:
            emit("state", state=standing(root, run))
            known, spoke = told(state), now
        if state["state"] in TERMINAL and not sent and logs.read_out():
            return
        if now - spoke > BEAT:
            emit("beat", clock=time.time())
            spoke = now
        if not sent:
            time.sleep(next(pause for limit, pause in POLLS if limit is None or now - active < limit))


_main(work)
