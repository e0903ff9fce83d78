"""Statistical stress of compiled and eager code in threads, each run a fresh process with fresh caches.

    python tests/race/stress.py --mode gate --runs 20 [--jobs 2] [--threads 3] [--steps 6] [--busy 2] [--reshape]

Every thread trains a small attention model: the flex operator (traced jointly with its backward), compiled and
eager `create_block_mask`, and a chunked loss under gradient checkpointing, with and without `use_reentrant`.
A thread has a sequence length of its own, as threads on devices of their own have guards of their own, and goes on
stepping until all threads have done their steps. The first loss of every thread is compared with dense attention.

Modes: `none` no protection, `attention` a lock around each thread's first attention call, `first` a lock around
each thread's first whole step, `gate` every step through the gate. `--reshape` changes the shape after warm-up
without a new key, so that the gate has to refuse and repeat. `--busy` starts processes that load the machine,
`--jobs` does so many runs at a time.
Prints one JSON object: runs, failed, error texts with counts, and the compiles and refusals of passed runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODES = ("none", "attention", "first", "gate")
RUN_SECONDS = 240.0
WIDTH, HEADS, VOCABULARY, CHUNK = 32, 2, 64, 64


# -- one run, in a process of its own ---------------------------------------------------------------------------


class Worker:
    """One thread's model, data and compiled functions."""

    def __init__(self, number: int, attention_lock: threading.Lock | None) -> None:
        import torch
        from torch.nn.attention import flex_attention as flex

        from dflash_core.compile.environment import clone_code

        generator = torch.Generator().manual_seed(number)
        self.lengths = [128 * (number + 2), 128 * (number + 6)]
        self.use_reentrant = bool(number % 2)
        self.hidden = torch.randn(1, max(self.lengths), WIDTH, generator=generator)
        self.labels = torch.randint(VOCABULARY, (max(self.lengths),), generator=generator)
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator)
        with torch.no_grad():
            self.project.weight.copy_(torch.randn(3 * WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.optimizer = torch.optim.SGD(self.project.parameters(), lr=1e-2)
        self.create_mask = flex.create_block_mask
        self.compiled_mask = torch.compile(clone_code(flex.create_block_mask), backend="aot_eager", dynamic=False)
        self.flex = torch.compile(clone_code(flex.flex_attention), backend="aot_eager", dynamic=False)
        self.attention_lock = attention_lock

    def heads(self, length: int) -> Any:
        """q, k, v as `[3, 1, HEADS, length, D]`."""
        return self.project(self.hidden[:, :length]).view(1, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)

    def attend(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        lock, self.attention_lock = self.attention_lock, None  # only the first call
        with lock or nullcontext():
            return self.flex(q, k, v, block_mask=mask)

    def loss(self, context: Any, length: int) -> Any:
        from torch.utils.checkpoint import checkpoint

        rows = context.transpose(1, 2).reshape(length, WIDTH)
        total = rows.new_zeros(())
        for start in range(0, length, CHUNK):
            chunk, labels = rows[start : start + CHUNK], self.labels[start : start + CHUNK]
            total = total + checkpoint(self.chunk_loss, chunk, labels, use_reentrant=self.use_reentrant)
        return total / length

    def chunk_loss(self, rows: Any, labels: Any) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(rows @ self.head.T, labels, reduction="sum")

    def step(self, number: int, reshape: bool) -> float:
        length = self.lengths[int(reshape and number >= 3)]
        make_mask = self.compiled_mask if number % 2 == 0 else self.create_mask
        mask = make_mask(causal, 1, 1, length, length, device="cpu")
        loss = self.loss(self.attend(*self.heads(length), mask), length)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def dense_loss(self) -> float:
        """The loss of the first step with ordinary attention."""
        import torch

        length = self.lengths[0]
        with torch.no_grad():
            context = torch.nn.functional.scaled_dot_product_attention(*self.heads(length), is_causal=True)
            return float(self.loss(context, length))


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def run_once(mode: str, threads: int, steps: int, reshape: bool) -> dict[str, Any]:
    """Train in threads; raises what the first failing thread raised."""
    import torch
    from torch.nn.attention import flex_attention as flex

    from dflash_core.compile.environment import configure_main, configure_thread
    from dflash_core.compile.gate import Gate

    configure_main()
    flex._validate_device = lambda *_: None  # the operator's backward works on CPU; only the check forbids it
    lock = threading.Lock()
    workers = [Worker(number, lock if mode == "attention" else None) for number in range(threads)]
    expected = [worker.dense_loss() for worker in workers]
    losses: list[list[float]] = [[] for _ in workers]
    errors: list[BaseException] = []
    with ExitStack() as stack:
        gate = stack.enter_context(Gate(stall_seconds=RUN_SECONDS / 2)) if mode == "gate" else None

        def door(number: int, step: Callable[[], float]) -> float:
            if gate is not None:
                return gate.run("train", step)
            with lock if mode == "first" and number == 0 else nullcontext():
                return step()

        def work(worker: Worker, seen: list[float]) -> None:
            configure_thread()
            try:
                while not errors and min(map(len, losses)) < steps:
                    number = len(seen)
                    seen.append(door(number, lambda: worker.step(number, reshape)))  # noqa: B023
            except BaseException as error:
                errors.append(error)

        running = [threading.Thread(target=work, args=pair) for pair in zip(workers, losses, strict=True)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    if errors:
        raise errors[0]
    for seen, dense in zip(losses, expected, strict=True):
        torch.testing.assert_close(seen[0], dense, rtol=1e-5, atol=1e-6)
    counts = {"compiles": gate.compiles, "refused": gate.refused} if gate else {}
    return {"steps": sum(map(len, losses)), **counts}


# -- many runs --------------------------------------------------------------------------------------------------


def fresh_process(options: list[str]) -> dict[str, Any]:
    """One run with caches of its own: its result, or `{"error": text}`."""
    with tempfile.TemporaryDirectory(prefix="race-") as cache:
        environ = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--once", *options]
        try:
            done = subprocess.run(
                command, env=environ, cwd=cache, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"killed after {RUN_SECONDS:g} s"}
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    return {"error": error_line(done.stderr) or f"exit code {done.returncode}"}


def error_line(stderr: str) -> str:
    """The last `SomeError: text` of a traceback, without the addresses and hints around it."""
    lines = [line for line in stderr.splitlines() if line and not line[0].isspace() and ": " in line]
    named = [line for line in lines if line.split(":")[0].rpartition(".")[2].endswith(("Error", "Exception"))]
    return named[-1][:160] if named else ""


def stress(arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--mode", arguments.mode, "--threads", str(arguments.threads), "--steps", str(arguments.steps)]
    options += ["--reshape"] if arguments.reshape else []
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(lambda _: fresh_process(options), range(arguments.runs)))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    errors = Counter(result["error"] for result in results if "error" in result)
    passed = [result for result in results if "error" not in result]
    return {
        "mode": arguments.mode,
        "reshape": arguments.reshape,
        "busy": arguments.busy,
        "jobs": arguments.jobs,
        "runs": arguments.runs,
        "failed": errors.total(),
        "errors": dict(errors),
        "compiles": sorted({result["compiles"] for result in passed if "compiles" in result}),
        "refused": sorted({result["refused"] for result in passed if "refused" in result}),
        "seconds_per_run": round((time.monotonic() - began) / arguments.runs, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="gate")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--busy", type=int, default=0, help="processes that load the machine meanwhile")
    parser.add_argument("--reshape", action="store_true", help="change the shape after warm-up, same key")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(run_once(arguments.mode, arguments.threads, arguments.steps, arguments.reshape)))
    else:
        print(json.dumps(stress(arguments), indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
