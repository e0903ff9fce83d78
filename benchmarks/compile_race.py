"""Cold starts of a multi-threaded trainer on a GPU: with the gate, with a lock around first steps, with nothing.

    python benchmarks/compile_race.py --out benchmarks/results/race-NAME.json [--budget 240] [--gpus 4]

Each run is a fresh process with empty Inductor and Triton caches in which drafter threads share one GPU and train a
small drafter with flex attention (`race_worker.py`). Three phases: start-up times, alone on the machine, with caches
that are archived, deleted and restored for a warm run; the gate under stress; the weaker protections. A run that takes
longer than the limit of its phase is killed and counts as failed.

The result is written after every run. With `--budget` nothing starts that many seconds after the beginning; the same
command then goes on with what is missing. Needs the `train` extra and a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

WORKER = Path(__file__).with_name("race_worker.py")
OPTIONS = ("mode", "threads", "layout")
KIND = (*OPTIONS, "cache")
Run = dict[str, Any]
Kind = tuple[str, int, str, str]

THREE, ONE, RESTORED = ("gate", 3, "same", "cold"), ("gate", 1, "same", "cold"), ("gate", 3, "same", "restored")
GPUS, STRESS = ("gate", 3, "gpus", "cold"), ("gate", 3, "shapes", "cold")
WEAKER = (("first", 3, "shapes", "cold"), ("none", 3, "shapes", "cold"))


class Series:
    """The runs so far, in a file that is whole at any time."""

    def __init__(self, out: Path, plan: dict[Kind, int], budget_s: float, header: dict[str, Any]) -> None:
        self._out = out
        self._plan = plan
        self._ends = time.monotonic() + budget_s
        self._header = header
        self._lock = threading.Lock()
        earlier = json.loads(out.read_text()) if out.exists() else {}
        self.runs: list[Run] = earlier["runs"] if earlier.get("versions") == header["versions"] else []

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def missing(self, kind: Kind) -> int:
        """How many runs of this kind are still to be done; a restored cache needs a cold run before it."""
        missing = max(0, self._plan[kind] - sum(kind_of(run) == kind for run in self.runs))
        return max(missing, self.missing(RESTORED)) if kind == THREE else missing

    def add(self, run: Run) -> None:
        print(json.dumps(run), flush=True)
        with self._lock:
            self.runs.append(run)
            complete = not any(map(self.missing, self._plan))
            result = {**self._header, "complete": complete, "summary": summary(self.runs), "runs": self.runs}
            temporary = self._out.with_suffix(".partial")
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            temporary.replace(self._out)


def run_all(series: Series, kinds: Sequence[Kind], folder: Path, *, gpus: int, per_gpu: int, limit_s: float) -> None:
    """Do what is missing of `kinds`, at most `per_gpu` runs at a time on each GPU, each with a cache of its own."""
    slots: queue.Queue[int] = queue.Queue()
    for slot in range(gpus * per_gpu):
        slots.put(slot % gpus)

    def one(kind: Kind) -> None:
        gpu, cache = slots.get(), Path(tempfile.mkdtemp(dir=folder))
        try:
            run = run_once(kind, cache, gpu, series, limit_s)
            if kind == THREE and run is not None and "error" not in run and series.missing(RESTORED):
                restore(cache)
                run_once(RESTORED, cache, gpu, series, limit_s)
        finally:
            slots.put(gpu)
            shutil.rmtree(cache)

    with ThreadPoolExecutor(gpus * per_gpu) as pool:
        list(pool.map(one, (kind for kind in kinds for _ in range(series.missing(kind)))))


def run_once(kind: Kind, cache: Path, gpu: int, series: Series, limit_s: float) -> Run | None:
    """One worker process; None when the budget and not the limit has ended it, which says nothing."""
    if series.left_s <= 0:
        return None
    job = dict(zip(KIND, kind, strict=True))
    command = [sys.executable, str(WORKER), *itertools.chain(*((f"--{key}", str(job[key])) for key in OPTIONS))]
    began, patience = time.monotonic(), min(limit_s, series.left_s)
    process = subprocess.Popen(
        command + ["--steady"] * (kind == RESTORED),
        env=os.environ | environment(cache, None if kind == GPUS else gpu),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a kill reaches the compile subprocesses too
    )
    try:
        out, err = process.communicate(timeout=patience)
        result = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"error": error_line(err)}
    except subprocess.TimeoutExpired:
        stacks = kill(process)
        if patience < limit_s:
            return None
        result = {"error": f"killed after {limit_s:g} s", "stacks": stacks}
    run = job | {"seconds": round(time.monotonic() - began, 1)} | result
    series.add(run)
    return run


def kill(process: subprocess.Popen[str]) -> list[str]:
    """End a run; returns the innermost line of each of its threads."""
    process.send_signal(signal.SIGABRT)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    lines = process.communicate()[1].splitlines()
    return [lines[at + 1].strip() for at, line in enumerate(lines[:-1]) if "(most recent call first)" in line]


def environment(cache: Path, gpu: int | None) -> dict[str, str]:
    return {
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "OMP_NUM_THREADS": "2",
    }


def error_line(stderr: str) -> str:
    """The last `SomeError: text` of the tracebacks in `stderr`."""
    lines = [line for line in stderr.splitlines() if line and not line[0].isspace() and ": " in line]
    named = [line for line in lines if line.split(":")[0].rpartition(".")[2].endswith(("Error", "Exception"))]
    return named[-1][:160] if named else "no error was printed"


def restore(cache: Path) -> None:
    """Archive a cache, delete it, and put it back at the same path, as a new container would."""
    archive = shutil.make_archive(str(cache), "tar", cache)
    shutil.rmtree(cache)
    shutil.unpack_archive(archive, cache)
    Path(archive).unlink()


def kind_of(run: Run) -> Kind:
    mode, threads, layout, cache = (run[key] for key in KIND)
    return mode, threads, layout, cache


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Failures per protection, and ratios and extremes of the runs that passed; null where nothing was measured."""
    passed = [run for run in runs if "error" not in run]
    gated = [run for run in passed if run["mode"] == "gate"]

    def all_warm(kind: Kind) -> float | None:
        seconds = [max(run["warm_s"]) for run in passed if kind_of(run) == kind]
        return median(seconds) if seconds else None

    def ratio(kind: Kind, to: Kind) -> float | None:
        above, below = all_warm(kind), all_warm(to)
        return None if above is None or below is None else round(above / below, 3)

    def middle(key: str) -> float | None:
        values = [run[key] for run in gated if key in run]
        return median(values) if values else None

    return {
        "kinds": [
            _of_a_kind([run for run in runs if kind_of(run) == kind]) for kind in dict.fromkeys(map(kind_of, runs))
        ],
        "three_over_one": ratio(THREE, ONE),
        "restored_over_cold": ratio(RESTORED, THREE),
        "gate_share_of_a_step": middle("gate_share"),
        "step_ms": middle("step_ms"),
        "worst_loss_error": max((run["loss_error"] for run in gated), default=None),
        "compiles_since_warm": max((run["compiles_since_warm"] for run in gated), default=None),
        "refused": max((run["refused"] for run in gated), default=None),
    }


def _of_a_kind(runs: Sequence[Run]) -> dict[str, Any]:
    warm = [sorted(run["warm_s"]) for run in runs if "error" not in run]
    errors = Counter(run["error"] for run in runs if "error" in run)
    return {
        **dict(zip(KIND, kind_of(runs[0]), strict=True)),
        "runs": len(runs),
        "failed": errors.total(),
        "errors": dict(errors),
        "warm_s": [round(median(times), 2) for times in zip(*warm, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="cold runs with the gate under stress")
    parser.add_argument("--starts", type=int, default=2, help="start-ups of one thread, of three, and restored")
    parser.add_argument("--contrast", type=int, default=3, help="cold runs of each weaker protection")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread the runs over, one run on one GPU")
    parser.add_argument("--per-gpu", type=int, default=3, help="runs at a time on each GPU under stress")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for the whole call")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    import torch

    header = {
        "benchmark": "compile_race",
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{torch.cuda.get_device_name(0)}, {arguments.gpus} used, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "runs_at_a_time": {"start-up": 1, "stress": arguments.gpus * arguments.per_gpu},
    }
    plan: dict[Kind, int] = dict.fromkeys((THREE, RESTORED, ONE), arguments.starts)
    plan |= {GPUS: arguments.starts if arguments.gpus >= 3 else 0, STRESS: arguments.runs}
    plan |= dict.fromkeys(WEAKER, arguments.contrast)
    series = Series(arguments.out, plan, arguments.budget, header)
    with tempfile.TemporaryDirectory(prefix="race-") as name:
        folder, spread = Path(name), {"gpus": arguments.gpus, "per_gpu": arguments.per_gpu}
        run_all(series, (THREE, ONE, GPUS), folder, gpus=1, per_gpu=1, limit_s=150)
        run_all(series, (STRESS,), folder, limit_s=150, **spread)
        run_all(series, WEAKER, folder, limit_s=90, **spread)
    print(json.dumps(summary(series.runs), indent=1))


if __name__ == "__main__":
    main()
