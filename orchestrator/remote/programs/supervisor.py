# uses: _runs _prctl
# Stands beside one run until its last process is gone, and alone writes its state.json.
#
#     python -I supervisor.py RUN_DIR [--detach | --unit NAME]
#
# With --detach it leaves its caller, else it stays in the foreground. As the unit NAME of systemd it reads the run's
# environment, a line of JSON, from its stdin; the secrets are in it.
# It knows the run from run.json, starts launch.sh beside it, and is asked to stop by SIGTERM; a file `stop` in the
# folder says who asked and how long the grace is.
TICK = 0.25
HEARTBEAT = 3.0
INDEX_EVERY = 1.0
LEFTOVER_GRACE = 5.0  # for what a stage left behind when it ended by itself
KILL_PATIENCE = 10.0
FULL = 1 << 20  # a file system with less than this free counts as full
# state.json is padded to this size: on a full disk it can then still be written, in place.
STATE_SIZE = 1024
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCHED = (*ASKED, signal.SIGCHLD)

STATE_OF_STAGE = {"generate": "preparing", "preflight": "preparing", "warmup": "warming"}
STATE_OF_REASON = {
    "finished": "succeeded",
    "exit_code": "failed",
    "signal": "failed",
    "out_of_memory": "failed",
    "disk_full": "failed",
    "preflight_failed": "failed",
    "warmup_failed": "failed",
    "warmup_deadline": "failed",
    "deadline": "stopped",
    "stopped_by_user": "stopped",
    "terminated": "stopped",
}
WARMUP_EXIT = 10


def out_of_memory_kills():
    """How many processes of our memory cgroup the kernel has killed so far; None when it cannot be known."""
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        groups = []
    candidates = ["/proc/vmstat"]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            candidates[:0] = ["/sys/fs/cgroup/memory%s/memory.oom_control" % place for place in (path, "")]
        elif not controllers:
            candidates[:0] = ["/sys/fs/cgroup%s/memory.events" % place for place in (path, "")]
    for candidate in candidates:
        with contextlib.suppress(OSError, ValueError), open(candidate) as file:
            for line in file:
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


class Lines:
    """New whole lines of a file that somebody else appends to."""

    def __init__(self, path):
        self.path = path
        self.offset = 0

    def read(self):
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                block = file.read()
        except OSError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.splitlines()


class StateFile:
    """state.json: replaced atomically; rewritten in place only where a full disk leaves no other way."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "state.json")

    def write(self, state, durable):
        body = (json.dumps(state).ljust(STATE_SIZE - 1) + "\n").encode()
        temporary = self.path + ".new"
        try:
            with open(temporary, "wb") as file:
                file.write(body)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError:
            return self._in_place(body)
        return True

    def _in_place(self, body):
        try:
            descriptor = os.open(self.path, os.O_WRONLY)
        except OSError:
            return False
        try:
            return os.pwrite(descriptor, body, 0) == len(body)
        except OSError:
            return False
        finally:
            os.close(descriptor)


class Supervisor:
    def __init__(self, folder, unit=None):
        self.folder = folder
        self.spec = read_json(os.path.join(folder, "run.json"))
        self.file = StateFile(folder)
        self.stages = Lines(os.path.join(folder, "stages.jsonl"))
        self.sizes = {}
        self.indexed = self.beaten = 0.0
        self.stage_since = time.monotonic()
        self.script = None
        self.status = None  # of launch.sh, as waitpid gives it
        self.asked = None  # the reason, once the run has been asked to end
        self.heeded = None  # the last content of `stop`
        self.kill_at = None
        self.oom_before = out_of_memory_kills()
        now = time.time()
        self.state = {
            "v": 1,
            "run": self.spec["run"],
            "state": "preparing",
            "reason": None,
            "stage": None,
            "exit_code": None,
            "signal": None,
            "supervisor": process_identity(os.getpid()),
            "init": process_identity(1),
            "booted": kernel_booted(),
            "unit": unit,
            "started": now,
            "ended": None,
            "updated": now,
            "details": {},
        }

    # --- the script ---------------------------------------------------------------------------------------------

    def start(self):
        log = open(os.path.join(self.folder, "logs", "launch.log"), "ab")
        try:
            process = subprocess.Popen(
                ["bash", os.path.join(self.folder, "launch.sh")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=self._become_script,
            )
        except OSError as error:
            log.write(("cannot start bash: %s\n" % error).encode())
            self.status = 127 << 8
            return
        finally:
            log.close()
        # Children are reaped by `reap` alone, whoever they are; Popen must not wait for this one too.
        process.returncode = 0
        self.script = process.pid

    def _become_script(self):
        for number in (*WATCHED, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Without us nobody would stop it or report its end: it gets the chance to write a checkpoint and goes.
        prctl(SET_PDEATHSIG, signal.SIGTERM)

    def reap(self):
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.script:
                    self.status = status

    def family(self):
        self.reap()
        return members(self.spec["marker"], os.getpid())

    # --- asking it to end ---------------------------------------------------------------------------------------

    def ask(self, reason, grace):
        """Ask the script once; a later call can only shorten the grace."""
        now = time.monotonic()
        if self.asked is None:
            self.asked = reason
            if self.script is not None and self.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.script, getattr(signal, "SIG" + self.spec["stop"]["signal"]))
            self.save()
        self.kill_at = min(now + grace, self.kill_at if self.kill_at is not None else now + grace)

    def heed(self, received):
        usual = self.spec["stop"]
        stop = read_json(os.path.join(self.folder, "stop"))
        if stop is not None and stop != self.heeded:
            self.heeded = stop
            self.state["details"].setdefault("stopped_by", stop.get("by", "somebody"))
            self.ask("stopped_by_user", stop.get("grace", usual["grace"]))
        elif stop is None and received in ASKED:
            self.ask("terminated", usual["grace"])
        elif self.asked is None:
            self._heed_deadlines(usual["grace"])

    def _heed_deadlines(self, grace):
        limits = self.spec.get("limits") or {}
        total, warmup = limits.get("max_runtime"), limits.get("warmup_timeout")
        if total and time.time() - self.state["started"] > total:
            self.ask("deadline", grace)
        elif warmup and self.state["stage"] == "warmup" and time.monotonic() - self.stage_since > warmup:
            self.ask("warmup_deadline", grace)

    # --- looking ------------------------------------------------------------------------------------------------

    def follow_stages(self):
        for line in self.stages.read():
            try:
                event = json.loads(line.decode())
            except ValueError:
                continue
            if event.get("event") == "begin":
                self.state["stage"] = event.get("stage")
                self.state["state"] = STATE_OF_STAGE.get(event.get("stage"), "running")
                self.stage_since = time.monotonic()
                self.save()

    def index_logs(self):
        """Note how long each log is now, so that a moment can be turned into an offset."""
        self.indexed = time.monotonic()
        folder = os.path.join(self.folder, "logs")
        sizes = {}
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)):
                if name.endswith(".log"):
                    sizes[name[:-4]] = os.stat(os.path.join(folder, name)).st_size
            if sizes != self.sizes:
                with open(os.path.join(folder, "index.jsonl"), "a") as file:
                    file.write(json.dumps({"t": round(time.time(), 3), "sizes": sizes}) + "\n")
                self.sizes = sizes

    def save(self, durable=True):
        self.beaten = time.monotonic()
        self.state["updated"] = time.time()
        return self.file.write(self.state, durable)

    # --- the life of a run --------------------------------------------------------------------------------------

    def watch(self):
        while self.status is None:
            received = signal.sigtimedwait(WATCHED, TICK)
            self.tick(received.si_signo if received else None)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                end_processes(self.family, signal.SIGKILL, KILL_PATIENCE)

    def tick(self, received):
        self.reap()
        self.follow_stages()
        if self.status is None:
            self.heed(received)
        now = time.monotonic()
        if now - self.indexed > INDEX_EVERY:
            self.index_logs()
        if now - self.beaten > HEARTBEAT:
            self.save(durable=False)

    def clear(self):
        """End what the script left behind; the run is over only when nothing of it holds a device any more."""
        if self.family():
            end_processes(self.family, signal.SIGTERM, LEFTOVER_GRACE)
            left = end_processes(self.family, signal.SIGKILL, KILL_PATIENCE)
            if left:
                self.state["details"]["left"] = left

    def conclude(self):
        self.follow_stages()
        self.index_logs()
        died = os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0
        code = 128 + died if died else os.WEXITSTATUS(self.status)
        reason = self.reason(code)
        self.state.update(
            state=STATE_OF_REASON[reason],
            reason=reason,
            exit_code=code,
            # bash reports the signal of its child as 128 + number, as a shell does.
            signal=code - 128 if 128 < code <= 128 + signal.SIGRTMAX else None,
            ended=time.time(),
        )

    def reason(self, code):
        if code == 0:
            return "finished"
        if self.asked is not None:
            return self.asked
        after = out_of_memory_kills()
        kills = after - self.oom_before if None not in (after, self.oom_before) else 0
        if kills > 0:
            self.state["details"]["oom_kills"] = kills
        if kills > 0 and code == 128 + signal.SIGKILL:
            return "out_of_memory"
        disk = os.statvfs(self.folder)
        free = (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize
        if free < FULL:
            self.state["details"]["disk_free"] = free
            return "disk_full"
        if self.state["stage"] == "warmup" or code == WARMUP_EXIT:
            return "warmup_failed"
        if self.state["stage"] == "preflight":
            return "preflight_failed"
        return "signal" if code > 128 else "exit_code"

    def live(self):
        self.save()
        self.start()
        self.watch()
        self.clear()
        self.conclude()
        # A full disk may be freed soon; an end that nobody can read is no end.
        for _ in range(120):
            if self.save():
                return
            time.sleep(0.5)


def detach(folder):
    """Leave the caller's session and streams for good."""
    for lead in (True, False):
        if os.fork():
            os._exit(0)
        if lead:
            os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(os.path.join(folder, "logs", "launch.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 256)


def take_environment():
    """What the launch wants the run to see, and nothing of systemd's."""
    wanted = json.loads(sys.stdin.readline())
    os.environ.clear()
    os.environ.update(wanted)


def supervise(folder, words):
    unit = None
    if "--detach" in words:
        detach(folder)
    elif "--unit" in words:
        unit = words[words.index("--unit") + 1]
        take_environment()
    # Blocked, so that they wait for `sigtimedwait` instead of interrupting a write.
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    prctl(SET_CHILD_SUBREAPER, 1)
    Supervisor(folder, unit).live()


if __name__ == "__main__":
    supervise(os.path.abspath(sys.argv[1]), sys.argv[2:])
