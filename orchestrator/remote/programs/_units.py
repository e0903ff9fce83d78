# A run as a transient unit of systemd: its cgroup, the memory counted there and the end of everything in it are then
# systemd's business. Where that is not to be had, a run is a process of its own (`supervisor.py --detach`).
#
# Never with `--collect`: a unit that is forgotten at once reads like one that ended well.
UNIT_S = 15.0
SHOWN = "LoadState,ActiveState,Result,ExecMainCode,ExecMainStatus"
F_SETPIPE_SZ = 1031  # a name of `fcntl` since Python 3.10
KILLED = ("2", "3")  # CLD_KILLED and CLD_DUMPED, as ExecMainCode has them


def can_have_units():
    """Whether PID 1 is a systemd that takes units from us."""
    ours = os.geteuid() == 0 and os.path.isdir("/run/systemd/system")
    return ours and shutil.which("systemd-run") is not None


def start_unit(name, folder, environment, grace):
    """Let systemd run the supervisor of a run; its complaint if it does not, else "".

    The environment goes through a pipe that only root can open: a command line and the properties of a unit are for
    everybody to read, and a file would stay on a disk.
    """
    try:
        with _pipe_with(json.dumps(environment).encode() + b"\n", "/run/%s.env" % name) as pipe:
            complaint = _said(_systemd_run(name, folder, environment["DFO_RUN_ID"], grace, pipe))
    except OSError as error:
        return str(error)
    if complaint:
        end_unit(name)  # it may have been late, and we shall not wait for it; without its pipe it cannot begin
    return complaint


def _systemd_run(name, folder, marker, grace, pipe):
    log = "append:" + os.path.join(folder, "logs", "launch.log")
    properties = {
        "Type": "exec",  # else nobody would have opened the pipe yet when systemd-run returns
        "KillMode": "mixed",  # the supervisor is asked, and what is left after it is killed
        "TimeoutStopSec": "%d" % (grace + 30),
        "OOMPolicy": "continue",  # the supervisor finds out and says so
        "TasksMax": "infinity",
        "LimitNOFILE": "1048576",
        "LimitMEMLOCK": "infinity",
        "WorkingDirectory": folder,
        "StandardInput": "file:" + pipe,
        "StandardOutput": log,
        "StandardError": log,
    }
    options = [word for item in properties.items() for word in ("-p", "%s=%s" % item)]
    command = ["systemd-run", "--quiet", "--unit", name, "--setenv", "DFO_RUN_ID=" + marker, *options, "--"]
    # systemd replaces `$` in arguments, so none of these has one.
    return [*command, sys.executable, "-I", "supervisor.py", ".", "--unit", name]


@contextlib.contextmanager
def _pipe_with(data, path):
    """A named pipe that holds `data`, for whoever opens it before the block ends."""
    os.mkfifo(path, 0o600)
    try:
        end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(end, F_SETPIPE_SZ, 1 << 20)
            if os.write(end, data) != len(data):
                raise OSError(errno.E2BIG, "the environment is too large for a pipe")
            yield path
        finally:
            os.close(end)
    finally:
        os.unlink(path)


def end_unit(name):
    """Kill whatever is left in the cgroup of a unit, and let systemd forget it."""
    _said(["systemctl", "kill", "--signal=SIGKILL", name])
    _said(["systemctl", "stop", name])
    _said(["systemctl", "reset-failed", name])


def unit_end(name):
    """How systemd saw a unit end that can no longer tell by itself: `{}`, or `oom` and the `signal` of its process."""
    try:
        done = _ran(["systemctl", "show", name, "--property", SHOWN])
    except (OSError, subprocess.TimeoutExpired):
        return {}
    shown = dict(line.partition("=")[::2] for line in done.stdout.decode("utf-8", "replace").splitlines())
    if shown.get("LoadState") != "loaded":
        return {}
    killed = shown.get("ExecMainCode") in KILLED
    return {"oom": shown.get("Result") == "oom-kill", "signal": int(shown["ExecMainStatus"]) if killed else None}


def _said(command):
    try:
        done = _ran(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return done.stderr.decode("utf-8", "replace").strip() or "exit code %d" % done.returncode


def _ran(command):
    pipe = subprocess.PIPE
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, timeout=UNIT_S)
