"""What the gate costs when nothing compiles: microseconds per warm, empty step, best of five.

python tests/race/gate_cost.py
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_core.compile.gate import Gate

STEPS = 100_000


def nothing() -> None:
    return None


def microseconds(threads: int) -> float:
    """Time of one step as the slowest of `threads` threads sees it."""
    start = threading.Barrier(threads)
    seconds = [0.0] * threads
    with Gate() as gate:

        def work(number: int) -> None:
            gate.run("step", nothing)
            start.wait()
            began = time.perf_counter()
            for _ in range(STEPS):
                gate.run("step", nothing)
            seconds[number] = time.perf_counter() - began

        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    return max(seconds) / STEPS * 1e6


if __name__ == "__main__":
    print(
        json.dumps({f"{threads} threads": round(min(microseconds(threads) for _ in range(5)), 2) for threads in (1, 3)})
    )
