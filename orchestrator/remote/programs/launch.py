# uses: _lock _runs _devices _core _units
# Starts a run. `prepare` looks and changes nothing, `resume` reads an earlier run, `start` does it under the lock.
import re
import tempfile

CHECKPOINT = re.compile(r"step-[0-9]+")
CHECK_S = 60
STDIN = "/dev/stdin"
REPORT_S = 15.0  # how long a new supervisor may take to write its first state


def work(request, payload):
    return {"prepare": prepare, "resume": resume, "start": start}[request["op"]](request)


def deployed(request):
    root = request["root"]
    release = current_release(root)
    if release is None or not os.path.isdir(os.path.join(root, "releases", release)):
        raise Fail(
            "nothing_deployed",
            "nothing is deployed to `%s`" % request["target"],
            "`%s` points to no release" % os.path.join(root, "current"),
            "`dfo deploy %s`, then launch again" % request["target"],
        )
    return release


def prepare(request):
    try:
        release = deployed(request)
    except Fail as missing:
        if not request.get("dry_run"):
            raise
        passed = {"exit_code": 0, "stderr": ""}
        unknown = {"release": None, "plain_check": None, "gpus": [], "variables": None}
        return dict(unknown, check=passed, problem=missing.fields)
    folder = os.path.join(request["root"], "releases", release)
    environment = request["environment"]
    check = check_config(request["config"], folder, environment)
    # With overrides the text is not the user's file; if that fails alike, its line numbers are the useful ones.
    written = request.get("written")
    plain = check_config(written, folder, environment) if check["exit_code"] and written is not None else None
    table = gpu_table() if gpu_numbers(request["devices"]) else []
    problem = device_problem(request["root"], request["devices"], table)
    return {
        "release": release,
        "check": check,
        "plain_check": plain,
        "problem": problem.fields if problem else None,
        "gpus": table,
        "variables": json_from_core(folder, ["environment"], environment, CHECK_S),
    }


def check_config(text, release, environment):
    """What the release's own `check` says about a configuration: exit code and stderr."""
    with tempfile.TemporaryDirectory(prefix="dfo-check-") as folder:
        words = ["check", "--config", STDIN, "--run-dir", folder]
        answer = ask_core(release, words, environment, CHECK_S, text)
    return {"exit_code": answer["exit_code"], "stderr": answer["stderr"]}


def resume(request):
    """What is needed to go on from the newest checkpoint of a run."""
    number, folder = find_run(request["root"], request["run"])
    described = describe_run(request["root"], number, marked_processes())
    if described["state"] not in TERMINAL:
        raise cannot_resume(number, "it is still %s" % described["state"], "`dfo stop %d` first" % number)
    checkpoint = newest_checkpoint(os.path.join(folder, "checkpoints"))
    if checkpoint is None:
        why = "`%s` holds no checkpoint" % os.path.join(folder, "checkpoints")
        raise cannot_resume(number, why, "start from the beginning: `dfo launch %s`" % request["target"])
    with open(os.path.join(folder, "run.yaml")) as file:
        config = file.read()
    return {"run": number, "release": described["release"], "checkpoint": checkpoint, "config": config}


def newest_checkpoint(folder):
    """The one that `latest` names, else the newest whole one, else None."""
    try:
        with open(os.path.join(folder, "latest")) as file:
            names = [file.read().strip()]
    except OSError:
        names = sorted(os.listdir(folder), reverse=True) if os.path.isdir(folder) else []
    whole = [name for name in names if CHECKPOINT.fullmatch(name) and os.path.isdir(os.path.join(folder, name))]
    return os.path.join(folder, whole[0]) if whole else None


def take_checkpoint(source, staging):
    """Put an earlier run's checkpoint into this one's folder, by hard links: nobody writes to it any more."""
    folder = os.path.join(staging, "checkpoints")
    name = os.path.basename(source)
    os.makedirs(folder)
    try:
        shutil.copytree(source, os.path.join(folder, name), copy_function=link_or_copy)
    except (OSError, shutil.Error) as error:
        number = int(source.split(os.sep)[-3])
        why = "`%s` cannot be taken over: %s" % (source, error)
        raise cannot_resume(number, why, "run the command again") from error
    with open(os.path.join(folder, "latest"), "w") as file:
        file.write(name + "\n")


def take_answers(checkpoint, staging):
    """Copy the chats an earlier run generated: its checkpoint counts positions in exactly this data."""
    run = os.path.dirname(os.path.dirname(checkpoint))
    for name in sorted(os.listdir(run)):
        if name.endswith(".jsonl") and name not in ("events.jsonl", "stages.jsonl"):
            shutil.copy2(os.path.join(run, name), os.path.join(staging, name))


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def cannot_resume(number, why, fix):
    return Fail("resume_impossible", "run %d cannot be resumed" % number, why, fix, run=number)


def start(request):
    root = request["root"]
    with held_lock(root, request["owner"], request.get("wait_s", 0.0)) as lock:
        if deployed(request) != request["release"]:
            raise Fail(
                "plan_stale",
                "`%s` got another release in the meantime" % request["target"],
                "the launch was prepared for %s, current is %s" % (request["release"], deployed(request)),
                "run the command again; nothing was started",
            )
        problem = device_problem(root, request["spec"]["devices"], gpu_table())
        if problem and not request["force"]:
            raise problem
        staging = os.path.join(root, "runs", ".new-%d" % os.getpid())
        try:
            stage_folder(staging, request)
            # Between the two a signal would leave a run that nobody runs.
            with uninterrupted():
                with lock.sealed():
                    number = claim_number(root, staging, request["spec"])
                folder = os.path.join(root, "runs", str(number))
                start_supervisor(folder, request)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        owner = request["owner"]
        audit(root, "launch", by=who(owner), command=owner["command"], run=number, release=request["release"])
        return {"run": number, "folder": folder, "state": await_state(folder)}


def stage_folder(staging, request):
    """The run's folder with everything in it but its number, beside where it will be."""
    os.makedirs(os.path.join(staging, "logs"))
    for name, text in request["files"].items():
        with open(os.path.join(staging, name), "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    damaged = [name for name, sha in request["hashes"].items() if sha256_file(os.path.join(staging, name)) != sha]
    if damaged:
        raise Fail(
            "damaged",
            "%d of %d files of the run arrived damaged" % (len(damaged), len(request["files"])),
            "hashes differ for %s" % ", ".join(sorted(damaged)),
            "run the command again; nothing was started",
        )
    if request["spec"].get("resume_path"):
        take_checkpoint(request["spec"]["resume_path"], staging)
        take_answers(request["spec"]["resume_path"], staging)


def claim_number(root, staging, spec):
    """Give the folder the next number by one rename: a run's folder is complete from its first moment."""
    while True:
        number = (run_numbers(root) or [0])[-1] + 1
        full = dict(spec, run=number, created=time.time())
        write_atomic(os.path.join(staging, "run.json"), json.dumps(full, indent=1) + "\n")
        try:
            os.rename(staging, os.path.join(root, "runs", str(number)))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue
        return number


def start_supervisor(folder, request):
    """As a unit of systemd if that was asked for and can be had, else as a process of its own."""
    spec = request["spec"]
    environment = dict(os.environ, **request["secrets"])
    environment["DFO_RUN_ID"] = spec["marker"]
    if request["units"] and can_have_units():
        name = "dfo-%s-%s.service" % (os.path.basename(folder), spec["marker"])
        complaint = start_unit(name, folder, environment, spec["stop"]["grace"])
        if not complaint:
            return
        with open(os.path.join(folder, "logs", "launch.log"), "a") as log:
            log.write("systemd-run says: %s; the run goes on without a unit\n" % complaint)
    subprocess.run(
        [sys.executable, "-I", os.path.join(folder, "supervisor.py"), folder, "--detach"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # From its first instruction: who ends us because the laptop is gone ends our process group.
        start_new_session=True,
        timeout=REPORT_S,
    )


def await_state(folder):
    """The first state the supervisor reports: that it was started proves nothing."""
    limit = time.monotonic() + REPORT_S
    while time.monotonic() < limit:
        state = read_json(os.path.join(folder, "state.json"))
        if state is not None:
            return run_state(folder)
        time.sleep(0.02)
    number = os.path.basename(folder)
    raise Fail(
        "remote_failed",
        "run %s was created but does not report" % number,
        "no state after %d s; its last words: %s" % (REPORT_S, last_line(folder, "launch") or "none"),
        "read `%s`, then `dfo stop %s`" % (os.path.join(folder, "logs", "launch.log"), number),
        run=int(number),
    )


_main(work)
