"""Following the logs of a real run: its supervisor, its script and the program that reads are all real processes."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.breaking import Breaking

from orchestrator.console import Console
from orchestrator.errors import ConnectError, DfoError, Interrupted
from orchestrator.remote.wire import source_of
from orchestrator.runs.follow import Back, Chunk, Ended, Event, Follower, LogRequest, Lost, Restarted, Started
from orchestrator.runs.reconnect import Backoff
from orchestrator.runs.run import EndReason
from orchestrator.runs.watch import conclude, watch
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

QUICK = (0.0, 0.05, 0.1)

#: What launch.sh offers its stages, in a few lines.
HEAD = """\
begin() { printf '{"stage":"%s","event":"begin","t":%s}\\n' "$1" "$(date +%s.%N)" >> stages.jsonl; }
end() { printf '{"stage":"%s","event":"end","t":%s,"exit_code":%s}\\n' "$1" "$(date +%s.%N)" "$2" >> stages.jsonl; }
"""


@dataclass
class RealRun:
    """`script` is bash; it runs in the run's folder, after `HEAD`."""

    root: Path
    number: int
    process: subprocess.Popen[bytes]

    @property
    def folder(self) -> Path:
        return self.root / "runs" / str(self.number)

    def log(self, stage: str) -> bytes:
        return (self.folder / "logs" / f"{stage}.log").read_bytes()

    def wait(self, seconds: float = 60) -> dict[str, object]:
        self.process.wait(seconds)
        state = json.loads((self.folder / "state.json").read_text())
        assert isinstance(state, dict)
        return state

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)


def _start_run(root: Path, script: str, number: int) -> RealRun:
    folder = root / "runs" / str(number)
    (folder / "logs").mkdir(parents=True)
    marker = uuid.uuid4().hex
    spec = {
        "run": number,
        "marker": marker,
        "release": "20261130-1612-9f3c1a",
        "devices": ["cpu"],
        "created": time.time(),
        "stop": {"signal": "TERM", "grace": 2},
        "limits": {},
    }
    (folder / "run.json").write_text(json.dumps(spec))
    (folder / "launch.sh").write_text(HEAD + script)
    (folder / "supervisor.py").write_bytes(source_of("supervisor"))
    process = subprocess.Popen(
        [sys.executable, "-I", str(folder / "supervisor.py"), str(folder)],
        env={"PATH": "/usr/bin:/bin", "DFO_RUN_ID": marker},
        start_new_session=True,
    )
    run = RealRun(root, number, process)
    while not (folder / "state.json").exists():
        time.sleep(0.01)
    return run


StartRun = Callable[..., RealRun]


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    """`start_run(script, number=1)`; whatever still runs is ended afterwards."""
    started: list[RealRun] = []

    def start(script: str, number: int = 1) -> RealRun:
        started.append(_start_run(tmp_path, script, number))
        return started[-1]

    yield start
    for run in started:
        run.end()


def follower(
    root: Path, *, transport: LocalTransport | None = None, silence: float = 15, **request: object
) -> Follower:
    session = Session("here", transport or LocalTransport(), str(root), sys.executable)
    return Follower(session, LogRequest(**request), backoff=Backoff(QUICK), silence=silence)  # type: ignore[arg-type]


def collect(events: Iterable[Event]) -> dict[str, bytes]:
    """Bytes by stage; asserts that they come without a gap or a repetition."""
    found: dict[str, bytearray] = {}
    for event in events:
        if isinstance(event, Chunk):
            got = found.setdefault(event.stage, bytearray())
            assert event.offset == len(got), f"{event.stage}: {event.offset} after {len(got)} bytes"
            got += event.data
    return {stage: bytes(data) for stage, data in found.items()}


def show(follow: Follower, *, json: bool = False) -> tuple[str, str]:
    """(stdout, stderr) of `dfo logs`."""
    console = Console(json=json, command="logs", out=io.StringIO(), err=io.StringIO())
    conclude(watch(follow, console), console, "here", like_run=False)
    return console.out.getvalue(), console.err.getvalue()  # type: ignore[attr-defined]


WRITER = """\
import os, random, sys, time
random.seed(7)
out = open(sys.argv[1], "ab", buffering=0)
left = int(sys.argv[2])
while left > 0:
    line = bytes(random.choices(range(256), k=random.randrange(200))) + b"\\n"
    block = (line * 40)[:left]
    out.write(block)
    left -= len(block)
    time.sleep(float(sys.argv[3]))
"""


def test_twenty_drops_while_twenty_megabytes_are_written(tmp_path: Path, start_run: StartRun) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    write = f"{sys.executable} {tmp_path / 'writer.py'}"
    run = start_run(
        f"begin warmup; {write} logs/warmup.log 5000000 0.0005; end warmup 0\n"
        f"begin train; {write} logs/train.log 15000000 0.0005; end train 0\n"
    )
    rng = random.Random(3)
    transport = Breaking([rng.randrange(1, 1_800_000) for _ in range(20)])
    follow = follower(tmp_path, transport=transport, follow=True)
    seen = list(follow.events())
    assert transport.drops == 20
    assert sum(isinstance(event, Back) for event in seen) >= 20
    got = collect(seen)
    assert len(got["warmup"]) == 5_000_000
    assert len(got["train"]) == 15_000_000
    assert got == {"warmup": run.log("warmup"), "train": run.log("train")}
    assert isinstance(seen[-1], Ended)
    assert seen[-1].status.reason is EndReason.FINISHED


def test_drops_in_the_middle_of_records_lose_nothing(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run("begin train; seq 1 200000 > logs/train.log; end train 0")
    transport = Breaking([1500, 0, 1, 700, 701, 66000, 66001, 131500, 200000, 300003])
    got = collect(follower(tmp_path, transport=transport, follow=True).events())
    assert got == {"train": run.log("train")}


def test_stages_come_in_order_and_the_end_is_told(tmp_path: Path, start_run: StartRun) -> None:
    start_run(
        "begin preflight; echo fit > logs/preflight.log; end preflight 0; sleep 0.3\n"
        "begin warmup; echo compiled > logs/warmup.log; end warmup 0\n"
        "begin train; echo step 1 > logs/train.log; printf 'no newline at the end' >> logs/train.log; exit 3",
        number=57,
    )
    out, err = show(follower(tmp_path, follow=True))
    assert out.splitlines() == [
        "[57 preflight] fit",
        "[57 warmup] compiled",
        "[57 train] step 1",
        "[57 train] no newline at the end",
    ]
    assert err.splitlines()[0] == "run 57 ended: train failed: exit code 3: no newline at the end"


def test_exit_like_run_fails_with_the_runs_code(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; exit 3")
    console = Console(err=io.StringIO(), out=io.StringIO())
    status = watch(follower(tmp_path, follow=True), console)
    with pytest.raises(DfoError, match="train failed") as caught:
        conclude(status, console, "here", like_run=True)
    assert (caught.value.exit_code, caught.value.kind) == (3, "run_failed")


def test_a_run_that_never_wrote_is_no_hang(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin preflight; sleep 4; exit 5", number=3)
    time.sleep(0.5)
    out, err = show(follower(tmp_path))
    assert out == ""
    assert err.startswith("run 3 wrote no log yet; it is in stage preflight since ")
    out, err = show(follower(tmp_path, follow=True))
    assert out == ""
    assert "run 3 wrote no log yet; it is in stage preflight since " in err
    assert "run 3 ended without writing a log" in err
    assert "preflight failed" in err


def test_a_dead_supervisor_is_no_hang(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run("begin train; echo step 1 > logs/train.log; sleep 60")
    threading.Timer(1, run.process.kill).start()
    out, err = show(follower(tmp_path, follow=True))
    assert out == "[1 train] step 1\n"
    assert "its supervisor died" in err


def test_a_stage_that_is_not_there_is_named(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; echo step 1 > logs/train.log").wait()
    out, err = show(follower(tmp_path, stage="trian"))
    assert (out, err.splitlines()[0]) == ("", "run 1 ended without writing a log of stage `trian`")
    assert show(follower(tmp_path, stage="train"))[0] == "[1 train] step 1\n"


def test_an_unknown_run_is_an_error(tmp_path: Path, start_run: StartRun) -> None:
    with pytest.raises(DfoError) as caught:
        list(follower(tmp_path).events())
    assert caught.value.kind == "unknown_run"
    start_run("true", number=4)
    with pytest.raises(DfoError, match="no run 9"):
        list(follower(tmp_path, run=9).events())


def test_the_newest_run_is_meant_and_kept_over_a_drop(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; sleep 0.5; seq 1 1000 > logs/train.log", number=9)
    transport = Breaking([1200])
    follow = follower(tmp_path, transport=transport, follow=True)
    events = follow.events()
    assert isinstance(next(events), Started)
    start_run("begin train; echo other > logs/train.log", number=10)
    assert collect(events) == {"train": b"".join(b"%d\n" % n for n in range(1, 1001))}
    assert (follow.run, transport.drops) == (9, 1)


# --- where to start ---------------------------------------------------------------------------------------------


@pytest.fixture
def three_stages(start_run: StartRun) -> RealRun:
    run = start_run(
        'for stage in preflight warmup train; do begin $stage; seq -f "$stage %g" 1 5 > logs/$stage.log; done', 1
    )
    run.wait()
    return run


@pytest.mark.parametrize(
    ("request_", "first", "lines"),
    [
        ({"tail": 0}, None, 0),
        ({"tail": 1}, "train 5", 1),
        ({"tail": 5}, "train 1", 5),
        ({"tail": 7}, "warmup 4", 7),
        ({"tail": 99}, "preflight 1", 15),
        ({"tail": 2, "stage": "warmup"}, "warmup 4", 2),
        ({"start": ("warmup", 9)}, "warmup 2", 9),
        ({"start": ("train", 40)}, None, 0),
        ({"start": ("warmup", 9), "tail": 6}, "warmup 5", 6),
        ({"since": {"ago": 3600}}, "preflight 1", 15),
    ],
)
def test_where_it_starts(
    tmp_path: Path, three_stages: RealRun, request_: dict[str, object], first: str | None, lines: int
) -> None:
    for follow in (False, True):
        got = b"".join(collect_from(follower(tmp_path, follow=follow, **request_))).decode().splitlines()
        assert len(got) == lines
        assert (got or [None])[0] == first


def collect_from(follow: Follower) -> list[bytes]:
    return [event.data for event in follow.events() if isinstance(event, Chunk)]


def test_from_a_byte_or_a_stage_that_is_not_there(tmp_path: Path, three_stages: RealRun) -> None:
    for start, words in ((("train", 41), "no byte 41"), (("export", 0), "no log of stage `export`")):
        with pytest.raises(DfoError, match=words) as caught:
            list(follower(tmp_path, start=start).events())
        assert caught.value.kind == "usage"


def test_since_means_what_was_written_after_that_moment(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run(
        "begin train; echo early > logs/train.log; printf 'half ' >> logs/train.log; sleep 2.5\n"
        "echo late >> logs/train.log; begin evaluate; echo tau > logs/evaluate.log; sleep 1.5"
    )
    time.sleep(1.8)
    moment = time.time()
    run.wait()
    assert b"".join(collect_from(follower(tmp_path, since={"at": moment}))) == b"half late\ntau\n"
    assert collect_from(follower(tmp_path, since={"ago": 0})) == []


def test_a_choice_of_start_survives_a_drop_before_the_first_byte(tmp_path: Path, three_stages: RealRun) -> None:
    """The choice is made once; a reconnect must not choose again or begin at 0."""
    plain = list(follower(tmp_path, tail=2).events())
    for cut in range(1, 1000, 90):
        transport = Breaking([cut])
        follow = follower(tmp_path, tail=2, follow=True, transport=transport)
        try:
            got = collect_from(follow)
        except ConnectError:
            assert follow.run is None
            continue
        assert b"".join(got) == b"train 4\ntrain 5\n"
    assert any(isinstance(event, Chunk) for event in plain)


# --- hostile and unlucky files ----------------------------------------------------------------------------------


def test_truncated_and_replaced_logs_are_noticed(tmp_path: Path, start_run: StartRun) -> None:
    start_run(
        "begin train; echo a long first version > logs/train.log; sleep 0.8\n"
        "echo short > logs/train.log; sleep 0.8\n"
        "echo of another file > logs/new; mv logs/new logs/train.log; sleep 0.8"
    )
    time.sleep(0.2)
    seen = [event for event in follower(tmp_path, follow=True).events() if isinstance(event, Chunk | Restarted)]
    assert seen == [
        Chunk("train", 0, b"a long first version\n"),
        Restarted("train", "truncated", 21),
        Chunk("train", 0, b"short\n"),
        Restarted("train", "replaced", 6),
        Chunk("train", 0, b"of another file\n"),
    ]


def test_a_log_replaced_while_the_line_was_down_is_noticed(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run("begin train; echo the first file > logs/train.log; sleep 60")
    follow = follower(tmp_path, follow=True, transport=Breaking([20_000]))
    events = follow.events()
    for event in events:
        if isinstance(event, Chunk):
            break
    log = run.folder / "logs" / "train.log"
    follow.session.transport.after.append(0)  # type: ignore[attr-defined]
    child = psutil.Process().children()
    for process in child:
        if process.pid != run.process.pid:
            process.kill()
    new = log.with_name("new")
    new.write_bytes(b"another file\n")
    new.replace(log)
    run.process.terminate()
    rest = [event for event in events if isinstance(event, Chunk | Restarted)]
    assert rest == [Restarted("train", "replaced", 15), Chunk("train", 0, b"another file\n")]


def test_links_and_pipes_in_the_place_of_logs_are_left_alone(tmp_path: Path, start_run: StartRun) -> None:
    (tmp_path / "secret.txt").write_text("secret\n")
    run = start_run("begin train; echo step 1 > logs/train.log; sleep 1")
    (run.folder / "logs" / "link.log").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(run.folder / "logs" / "pipe.log")
    assert collect(follower(tmp_path, follow=True).events()) == {"train": b"step 1\n"}


# --- the connection ---------------------------------------------------------------------------------------------


def test_a_silent_link_is_given_up_and_taken_up_again(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run("begin train; echo one > logs/train.log; sleep 6; echo two >> logs/train.log")
    follow = follower(tmp_path, follow=True, silence=2.5)
    frozen, seen = False, []
    for event in follow.events():
        seen.append(event)
        if isinstance(event, Chunk) and not frozen:
            frozen = True
            for process in psutil.Process().children():
                if process.pid != run.process.pid:
                    process.suspend()
    assert [type(event) for event in seen if isinstance(event, Chunk | Lost | Back)] == [Chunk, Lost, Back, Chunk]
    assert collect(seen) == {"train": b"one\ntwo\n"}


def test_what_a_person_sees_of_a_drop(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; seq 1 20000 > logs/train.log; sleep 0.5")
    _, err = show(follower(tmp_path, follow=True, transport=Breaking([80_000])))
    lost, back, end = err.splitlines()[:3]
    assert lost.startswith("-- connection lost ") and lost.endswith(", trying again (1, 2, 4 s …) --")
    assert back.startswith("-- back after 0 s, resuming at byte 65,536 of train: nothing lost --")
    assert end.startswith("run 1 finished")


def test_a_target_that_cannot_be_reached_at_first_is_an_error_at_once(tmp_path: Path) -> None:
    session = Session("here", LocalTransport(), str(tmp_path), "/nonexistent/python")
    with pytest.raises(DfoError):
        list(Follower(session, LogRequest(follow=True)).events())


def test_ctrl_c_leaves_within_a_second_and_says_how_to_go_on(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run("begin train; for i in $(seq 1 600); do echo step $i >> logs/train.log; sleep 0.1; done", 57)
    console = Console(out=io.StringIO(), err=io.StringIO())
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(Interrupted, match="run 57 goes on") as caught:
        watch(follower(tmp_path, follow=True), console, options=["-t", "lab"], clock=time.monotonic)
    printed = console.out.getvalue()  # type: ignore[attr-defined]
    offset = len(printed.replace("[57 train] ", ""))
    assert f"`dfo logs 57 -t lab -f --from train:{offset}`" in caught.value.fix
    assert run.process.poll() is None
    run.end()
    rest = b"".join(collect_from(follower(tmp_path, start=("train", offset))))
    assert (printed.replace("[57 train] ", "").encode() + rest) == run.log("train")


def test_leaving_is_quick_even_when_the_pipe_is_full(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; head -c 80000000 /dev/zero > logs/train.log; sleep 60")
    time.sleep(0.5)
    events = follower(tmp_path, follow=True).events()
    for event in events:
        if isinstance(event, Chunk):
            break
    time.sleep(0.5)
    started = time.monotonic()
    events.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 1.0


def test_a_line_arrives_within_300_ms_and_following_costs_nothing(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; for i in $(seq 1 20); do date +%s.%N >> logs/train.log; sleep 0.$((RANDOM % 4 + 1)); done")
    late: list[float] = []
    cpu, began = 0.0, time.monotonic()
    for event in follower(tmp_path, follow=True).events():
        if isinstance(event, Chunk):
            late += [time.time() - float(line) for line in event.data.split()]
            children = psutil.Process().children()
            times = [p.cpu_times() for p in children if "dfo-remote" in " ".join(p.cmdline())]
            cpu = max([cpu, *(t.user + t.system for t in times)])
    share = cpu / (time.monotonic() - began)
    print(f"latency median {statistics.median(late) * 1e3:.0f} ms, max {max(late) * 1e3:.0f} ms; cpu {share:.1%}")
    assert len(late) == 20
    assert statistics.median(late) < 0.3


def test_the_run_goes_on_when_the_laptop_is_killed_and_the_reader_ends(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run("begin train; for i in $(seq 1 200); do echo $i >> logs/train.log; sleep 0.1; done")
    program = (
        "import sys; from orchestrator.runs.follow import *; from orchestrator.transport.local import LocalTransport;"
        "from orchestrator.session import Session;"
        f"s = Session('here', LocalTransport(), {str(tmp_path)!r}, sys.executable);"
        "[print(e, flush=True) for e in Follower(s, LogRequest(follow=True)).events()]"
    )
    laptop = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert laptop.stdout is not None
    laptop.stdout.readline()
    (reader,) = psutil.Process(laptop.pid).children()
    laptop.kill()
    laptop.wait()
    assert reader.wait(8) is not None or not reader.is_running()
    assert run.process.poll() is None


# --- the command ------------------------------------------------------------------------------------------------


def dfo(root: Path, *words: str) -> subprocess.Popen[str]:
    (root / "inventory").mkdir(exist_ok=True)
    (root / "inventory" / "dfo.yaml").write_text(
        f"version: 1\ntargets: {{here: {{transport: local, deploy: {{root: {root}}}}}}}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_follows_and_exits_like_the_run(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; echo step 1 > logs/train.log; sleep 0.5; exit 3", number=57)
    command = dfo(tmp_path, "logs", "57", "-f", "--exit-like-run")
    out, err = command.communicate(timeout=30)
    assert (command.returncode, out) == (3, "[57 train] step 1\n")
    assert "error: run 57 ended: train failed\n  why: exit code 3: step 1\n  fix: `dfo logs 57 --stage train" in err


def test_the_command_speaks_json_to_the_end(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; echo step 1 > logs/train.log", number=57).wait()
    command = dfo(tmp_path, "logs", "--json")
    first, last = map(json.loads, command.communicate(timeout=30)[0].splitlines())
    assert (first["event"], first["stage"], first["text"]) == ("line", "train", "step 1")
    assert (last["ok"], last["exit_code"]) == (True, 0)
    assert last["result"] == {
        "target": "here",
        "run": 57,
        "state": "succeeded",
        "reason": "finished",
        "run_exit_code": 0,
        "run_signal": None,
        "positions": {"launch": 0, "train": 7},
    }


def test_ctrl_c_on_the_command(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run("begin train; for i in $(seq 1 600); do echo step $i >> logs/train.log; sleep 0.1; done", number=57)
    command = dfo(tmp_path, "logs", "-f", "-t", "here")
    assert command.stdout is not None
    command.stdout.readline()
    pressed = time.monotonic()
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=10)
    assert time.monotonic() - pressed < 1.0
    assert command.returncode == 130
    assert "\nStopped watching; run 57 goes on.\n  resume exactly here: `dfo logs 57 -t here -f --from train:" in err
    assert run.process.poll() is None


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, start_run: StartRun) -> None:
    start_run("begin train; seq 1 300000 > logs/train.log").wait()
    command = dfo(tmp_path, "logs", "-q")
    assert command.stdout is not None and command.stderr is not None
    assert command.stdout.readline() == "[1 train] 1\n"
    command.stdout.close()
    assert (command.stderr.read(), command.wait(10)) == ("", 141)
