# uses: _runs _devices
# Stops a run: asks its supervisor, waits, and makes sure that no process of it is left.
MARGIN = 20.0  # beyond the grace, for a supervisor that has to kill
KILL_S = 10.0


def work(request, payload):
    root = request["root"]
    number, folder = find_run(root, request.get("run"))
    spec = read_json(os.path.join(folder, "run.json")) or {}
    before = describe_run(root, number, marked_processes())
    if before["state"] in TERMINAL and not before["leftovers"]:
        return {"run": before, "already": True, "ended": [], "left": [], "busy": []}
    ended = sorted(members(spec.get("marker")))
    grace = spec.get("stop", {}).get("grace", 60.0) if request.get("grace") is None else request["grace"]
    if before["state"] not in TERMINAL:
        ask(folder, request["by"], grace)
        wait_for_end(folder, grace + MARGIN)
    left = clear(spec.get("marker"), grace)
    unit = run_state(folder).get("unit")
    if unit:
        end_unit(unit)  # also what shed the mark of its run
    audit(root, "stop", by=request["by"], command=request["command"], run=number)
    after = describe_run(root, number, marked_processes())
    mine = gpu_numbers(after["devices"])
    busy = [gpu for gpu in gpu_table() if gpu["index"] in mine and (gpu["used_mb"] or 0) > BUSY_MB] if mine else []
    return {"run": after, "already": False, "ended": ended, "left": left, "busy": busy}


def ask(folder, by, grace):
    # The file says who and how long; the signal only wakes the supervisor, which may be one that cannot be woken.
    write_atomic(os.path.join(folder, "stop"), json.dumps({"by": by, "grace": grace, "t": time.time()}) + "\n")
    supervisor = run_state(folder).get("supervisor")
    if is_alive(supervisor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor["pid"], signal.SIGTERM)


def wait_for_end(folder, patience):
    begun = time.monotonic()
    told = -1
    while time.monotonic() - begun < patience:
        state = run_state(folder)
        if state["state"] in TERMINAL and not is_alive(state.get("supervisor")):
            return
        waited = int(time.monotonic() - begun)
        if waited != told:
            told = waited
            emit("waiting", waited=waited, stage=state.get("stage"))
        time.sleep(0.05)


def clear(marker, grace):
    """End what is left without its supervisor's help; the pids that even SIGKILL did not end."""
    if end_processes(lambda: members(marker), signal.SIGTERM, grace):
        return end_processes(lambda: members(marker), signal.SIGKILL, KILL_S)
    return []


_main(work)
