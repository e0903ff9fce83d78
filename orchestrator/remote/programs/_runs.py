# uses: _units
# Finding a run and reading where it really stands; shared by the programs that look at runs.
TERMINAL = ("succeeded", "failed", "stopped")
# A run whose folder is older than this and that still has no state never came to life.
BIRTH = 60.0
# The wall clock may be corrected by so many seconds and still be of the same boot.
CLOCK_SLACK = 60.0
MARK = b"DFO_RUN_ID="
TAIL = 64 * 1024


def run_numbers(root):
    """All runs there are, oldest first."""
    try:
        names = os.listdir(os.path.join(root, "runs"))
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def find_run(root, run):
    """(number, folder) of a run, the newest when `run` is None."""
    known = run_numbers(root)
    if run is None and known:
        run = known[-1]
    if run not in known:
        raise Fail(
            "unknown_run",
            "there is no run %s" % run if run is not None else "nothing was launched yet",
            "`%s` has %s" % (os.path.join(root, "runs"), _listed(known)),
            "`dfo status` lists the runs" if known else "start one with `dfo launch --warmup-first`",
        )
    return run, os.path.join(root, "runs", str(run))


def _listed(known):
    shown = ", ".join(str(number) for number in known[-5:])
    return ("%d runs, the newest %s" % (len(known), shown)) if known else "no runs"


def run_state(folder):
    """The run's state as it is, not as it was last written: a dead supervisor can no longer report its own end."""
    state = _read_state(folder)
    if state is None:
        age = time.time() - os.stat(folder).st_mtime
        name, reason = ("failed", "never_started") if age > BIRTH else ("queued", None)
        return {"state": name, "reason": reason, "stage": None}
    if state.get("state") in TERMINAL or is_alive(state.get("supervisor")):
        return state
    # It may have written its end between our two looks.
    state = _read_state(folder) or state
    if state.get("state") in TERMINAL:
        return state
    return dict(state, state="failed", ended=state.get("updated"), **_found_dead(state))


def _found_dead(state):
    """Why a run ended whose supervisor could not say so: `reason`, and `details` with what was found out."""
    # When the first process of that time is gone, the container was restarted, and everything in it ended then.
    if not is_alive(state.get("init")):
        moved = abs(state.get("booted", kernel_booted()) - kernel_booted())
        return {"reason": "node_rebooted" if moved > CLOCK_SLACK else "container_restarted"}
    seen = unit_end(state["unit"]) if state.get("unit") else {}
    if seen.get("oom"):
        return {"reason": "out_of_memory", "signal": signal.SIGKILL}
    return {
        "reason": "supervisor_died",
        "details": dict(state.get("details") or {}, supervisor_signal=seen.get("signal")),
    }


def kernel_booted():
    """When the kernel started, in unix seconds: LXC gives each start of a container a boot_id, but not this clock."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _read_state(folder):
    path = os.path.join(folder, "state.json")
    for _ in range(3):
        state = read_json(path)
        if state is not None or not os.path.exists(path):
            break
        # On a full disk the supervisor writes in place, so a read may meet half of it.
        time.sleep(0.02)
    return state


def process_table():
    """pid → parent of every process that has not ended."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open("/proc/%s/stat" % name, "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    table[int(name)] = int(parent)
    return table


def marked_processes():
    """Marker → pids of everything that was started by a run, however it detached itself since."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/environ" % name, "rb") as file:
                variables = file.read()
        except OSError:
            continue
        if MARK in variables:
            for variable in variables.split(b"\0"):
                if variable.startswith(MARK):
                    found.setdefault(variable[len(MARK) :].decode("ascii", "replace"), []).append(int(name))
    return found


def members(marker, ancestor=None):
    """Pids of a run: those with its mark and their descendants, and those of `ancestor`. Never `ancestor`, never us."""
    table = process_table()
    found = set(marked_processes().get(marker, ())) | {ancestor}
    size = 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in table.items() if parent in found}
    return {pid for pid in found if pid in table and pid not in (ancestor, os.getpid())}


def end_processes(find, number, patience):
    """Signal what `find()` lists until it lists nothing; the pids left after `patience` seconds."""
    limit = time.monotonic() + patience
    told = set()
    while True:
        pids = find()
        # SIGKILL is repeated for what was born in between; a polite signal is said once to each.
        for pid in pids if number == signal.SIGKILL else pids - told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        told |= pids
        if not pids or time.monotonic() > limit:
            return sorted(pids)
        time.sleep(0.05)


def leftovers_of(spec, state, marked):
    """Pids that still belong to a run that has ended."""
    own = (state.get("supervisor") or {}).get("pid") if is_alive(state.get("supervisor")) else None
    return sorted(pid for pid in marked.get(spec.get("marker"), ()) if pid != own)


def describe_run(root, number, marked):
    """What the laptop needs to know about a run; `marked` is `marked_processes()`."""
    folder = os.path.join(root, "runs", str(number))
    spec = read_json(os.path.join(folder, "run.json")) or {}
    state = run_state(folder)
    ended = state["state"] in TERMINAL
    events = json_lines(os.path.join(folder, "events.jsonl"), TAIL)
    begun = newest(json_lines(os.path.join(folder, "stages.jsonl")), "begin") or {}
    # The supervisor looks once in a while; if it died before it looked, the script's own note is newer.
    stage = state.get("stage") or begun.get("stage")
    return {
        "run": number,
        "state": state["state"],
        "reason": state.get("reason"),
        "stage": stage,
        "exit_code": state.get("exit_code"),
        "signal": state.get("signal"),
        "unit": state.get("unit"),
        "release": spec.get("release", "unknown"),
        "devices": spec.get("devices", []),
        "gpus": spec.get("gpus", []),
        "now": time.time(),
        "started": state.get("started") or spec.get("created"),
        "ended": state.get("ended"),
        "updated": state.get("updated"),
        "resume_from": spec.get("resume_from"),
        "leftovers": leftovers_of(spec, state, marked) if ended else [],
        "last_line": last_line(folder, stage or "launch"),
        "step": newest(events, "step"),
        # An error of a stage that was allowed to fail explains nothing about a later one.
        "error": newest([event for event in events if event.get("t", 0) >= begun.get("t", 0)], "error"),
        "details": dict(spec.get("limits") or {}, **(state.get("details") or {})),
    }


def alive_runs(root):
    """Descriptions of the runs that still do something, or whose processes do."""
    marked = marked_processes()
    found = []
    for number in run_numbers(root):
        folder = os.path.join(root, "runs", str(number))
        spec = read_json(os.path.join(folder, "run.json")) or {}
        if run_state(folder)["state"] not in TERMINAL or spec.get("marker") in marked:
            described = describe_run(root, number, marked)
            if described["state"] not in TERMINAL or described["leftovers"]:
                found.append(described)
    return found


def last_line(folder, stage):
    """The last line with something on it in the log of a stage."""
    text = _end_of(os.path.join(folder, "logs", "%s.log" % stage), TAIL).decode("utf-8", "replace")
    lines = [line.rpartition("\r")[2].strip() for line in text.rstrip().split("\n")]
    return next((line[:500] for line in reversed(lines) if line), "")


def newest(events, name):
    return next((event for event in reversed(events) if event.get("event") == name), None)


def json_lines(path, last=None):
    """The objects of a JSON lines file, or of its last so many bytes; a line torn by a kill is skipped."""
    found = []
    for line in _end_of(path, last).splitlines():
        try:
            value = json.loads(line.decode())
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _end_of(path, size):
    try:
        with open(path, "rb") as file:
            if size is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read()
    except OSError:
        return b""
