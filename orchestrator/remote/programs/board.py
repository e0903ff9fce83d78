# uses: _runs _prctl
# Runs TensorBoard on the loopback of the target and carries the laptop's connections to it, all over our own streams:
# a line of JSON `{"c": connection, "n": bytes}` and the bytes come in, records `data` go out. No bytes mean the end.
# TensorBoard lives as long as our stdin.
import re
import socket

CHUNK = 32 * 1024
START_S = 90.0
BEAT = 4.0  # the laptop takes 15 s of silence for a dead link
SPEAKS = re.compile(r"TensorBoard (\S+) at http://[^:/]+:([0-9]+)/")


def work(request, payload):
    root = request["root"]
    folder = os.path.join(root, "runs") if request["run"] is None else find_run(root, request["run"])[1]
    process = start(folder)
    threading.Thread(target=beat, daemon=True).start()
    try:
        version, port = await_port(process)
        emit("ready", version=version, folder=folder)
        threading.Thread(target=stand_by, args=(process,), daemon=True).start()
        carry(payload, port)
    finally:
        process.terminate()
    return {}


def start(folder):
    return subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", "127.0.0.1", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGTERM),
    )


def await_port(process):
    """(version, port) as TensorBoard announces them. What it says later is read and dropped: it must not block."""
    patience = threading.Timer(START_S, process.kill)
    patience.daemon = True
    patience.start()
    said = []
    for line in iter(process.stderr.readline, b""):
        text = line.decode("utf-8", "replace").strip()
        found = SPEAKS.search(text)
        if found:
            patience.cancel()
            threading.Thread(target=drop, args=(process.stderr,), daemon=True).start()
            return found[1], int(found[2])
        said.append(text)
    raise no_board("; ".join(said[-2:]) or "it said nothing in %d s" % START_S)


def drop(lines):
    for _ in lines:
        pass


def no_board(why):
    missing = "No module named" in why
    return Fail(
        "remote_failed",
        "TensorBoard does not run on the target",
        why,
        "`%s -m pip install tensorboard` there; `dfo report` needs none" % sys.executable
        if missing
        else "start it there by hand to see more: `%s -m tensorboard.main --logdir RUN`" % sys.executable,
    )


def beat():
    while True:
        time.sleep(BEAT)
        emit("beat")


def stand_by(process):
    """End when TensorBoard does."""
    process.wait()
    emit("fail", **no_board("it ended with %s" % process.returncode).fields)
    os._exit(0)


def carry(stdin, port):
    connections = {}
    for line in iter(stdin.readline, b""):
        head = json.loads(line.decode())
        number, data = head["c"], stdin.read(head["n"])
        if number not in connections and data:
            connections[number] = connect(number, port)
        connection = connections.get(number)
        with contextlib.suppress(OSError):
            if data and connection:
                connection.sendall(data)
            elif connection:
                connections.pop(number).shutdown(socket.SHUT_RDWR)


def connect(number, port):
    """A connection to TensorBoard whose answers go to the laptop; None where it refuses."""
    try:
        connection = socket.create_connection(("127.0.0.1", port))
    except OSError:
        emit("data", c=number)
        return None
    threading.Thread(target=answer, args=(number, connection), daemon=True).start()
    return connection


def answer(number, connection):
    data = b"-"
    while data:
        try:
            data = connection.recv(CHUNK)
        except OSError:
            data = b""
        emit("data", data, c=number)
    connection.close()


_main(work)
