# Which GPUs there are and who uses them; devices are named as in a run's configuration (`cpu`, `cuda:2`), with the
# numbers that nvidia-smi uses.
#
# A GPU with more than this in use and no process to name is busy all the same: a process of another container holds
# memory here but is invisible from inside ours.
BUSY_MB = 1024


def _smi(query):
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else []
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]


def _number(text):
    """nvidia-smi says `[N/A]` for what a device does not report."""
    try:
        return int(float(text))
    except ValueError:
        return None


def gpu_table():
    """Every GPU as {index, uuid, name, used_mb, total_mb, busy_percent}; [] without nvidia-smi."""
    rows = _smi("--query-gpu=index,uuid,name,memory.used,memory.total,utilization.gpu")
    return [
        {
            "index": int(row[0]),
            "uuid": row[1],
            "name": row[2],
            "used_mb": _number(row[3]),
            "total_mb": _number(row[4]),
            "busy_percent": _number(row[5]),
        }
        for row in rows
        if len(row) == 6 and row[0].isdigit()
    ]


def gpu_processes():
    """uuid → [{pid, name, used_mb}] of the processes that compute on it, as far as they can be seen from here."""
    found = {}
    for row in _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        if len(row) >= 4:
            process = {"pid": _number(row[1]), "name": ",".join(row[2:-1]), "used_mb": _number(row[-1])}
            found.setdefault(row[0], []).append(process)
    return found


def gpu_numbers(devices):
    return sorted(int(device[5:]) for device in set(devices) if device.startswith("cuda:"))


def device_problem(root, devices, table):
    """Why a run must not start on these devices now: the error that says so, or None. `table` is `gpu_table()`."""
    return (
        _run_problem(alive_runs(root), set(devices))
        or _missing_problem(devices, table)
        or _busy_problem(devices, table)
    )


def _run_problem(runs, devices):
    for run in runs:
        shared = sorted(devices & set(run["devices"]))
        if shared and run["state"] in TERMINAL:
            return Fail(
                "device_in_use",
                "processes of run %d are still there" % run["run"],
                "it has ended, but pid %s goes on, perhaps on %s" % (_listed_pids(run["leftovers"]), ", ".join(shared)),
                "`dfo stop %d` ends them; or start anyway with `--force`" % run["run"],
                run=run["run"],
                pids=run["leftovers"],
                devices=shared,
            )
        if shared:
            return Fail(
                "run_alive",
                "run %d is %s on %s" % (run["run"], run["state"], ", ".join(shared)),
                "release %s, stage %s; two runs on one device slow or break each other"
                % (run["release"], run["stage"] or "not begun"),
                "`dfo stop %d`, wait for it (`dfo logs %d -f`), or start anyway with `--force`"
                % (run["run"], run["run"]),
                run=run["run"],
                devices=shared,
            )
    return None


def _listed_pids(pids):
    return ", ".join(str(pid) for pid in pids[:5]) + (" and %d more" % (len(pids) - 5) if len(pids) > 5 else "")


def _missing_problem(devices, table):
    known = {gpu["index"] for gpu in table}
    missing = [number for number in gpu_numbers(devices) if number not in known]
    # Without nvidia-smi nothing is known; the preflight stage then asks torch.
    if not table or not missing:
        return None
    return Fail(
        "device_missing",
        "there is no GPU %s" % ", ".join(str(number) for number in missing),
        "nvidia-smi lists %d: %s" % (len(table), ", ".join("%d %s" % (gpu["index"], gpu["name"]) for gpu in table)),
        "correct `gpus` of the target or `topology` of the run configuration",
        devices=["cuda:%d" % number for number in missing],
    )


def _busy_problem(devices, table):
    wanted = [gpu for gpu in table if gpu["index"] in gpu_numbers(devices)]
    processes = gpu_processes() if wanted else {}
    for gpu in wanted:
        users = processes.get(gpu["uuid"], [])
        if users:
            named = ", ".join("pid %s (%s)" % (user["pid"], user["name"]) for user in users[:3])
            why = "%s; %s MB of it are used" % (named, gpu["used_mb"])
        elif (gpu["used_mb"] or 0) > BUSY_MB:
            why = "%d MB of it are used by a process that cannot be seen from here" % gpu["used_mb"]
        else:
            continue
        return Fail(
            "device_in_use",
            "GPU %d is in use" % gpu["index"],
            why,
            "end that process, choose other `gpus`, or start anyway with `--force`",
            devices=["cuda:%d" % gpu["index"]],
            processes=users,
        )
    return None
