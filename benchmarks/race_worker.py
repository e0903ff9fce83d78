"""One run of `compile_race.py`, in a process of its own: threads that train a small drafter with flex attention.

With `--layout shapes` every thread has a row length of its own, so that each compiles graphs of its own, as threads on
different GPUs do (the device index is part of torch's cache key). With `--layout same` the second and third thread find
the graphs of the first in the disk cache. With `--layout gpus` every thread has a GPU of its own.

Prints one JSON object: seconds until each thread had finished its first step, losses beside those of the dense
reference, compiles and cache hits, and with `--steady` what the gate costs once all threads are warm. Exits with 1 and
the first error when a thread fails; SIGABRT prints where every thread is. The cache folders come from the environment.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._dynamo.utils import counters

from dflash_core.attention import AttentionBackend, make_backend
from dflash_core.compile.environment import configure_main, configure_thread
from dflash_core.compile.gate import Gate
from dflash_core.config import DataConfig, RunConfig, TargetConfig, TrainConfig
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.optim import MasterAdamW
from dflash_core.pipeline.rehearsal import synthetic_batch
from dflash_core.pipeline.roles import drafter_role
from dflash_core.pipeline.streams import settle, use_own_stream
from dflash_core.session import build_objective, replica

DTYPE, ROWS = "bfloat16", 4096
STEADY_STEPS, STEADY_ROUNDS = 20, 4
Door = Callable[[str, Callable[[], object]], Any]

SHAPE = DFlashConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=8192,
    num_target_layers=8,
    target_layer_ids=(1, 5),
    mask_token_id=8191,
    block_size=16,
    dtype=DTYPE,
)
SETTINGS = RunConfig(
    version=1,
    target=TargetConfig(path="synthetic"),
    data=DataConfig(tokens_per_batch=ROWS, max_length=512),
    train=TrainConfig(anchors_per_batch=256, dtype=DTYPE),
)


class Trainer:
    """One thread's replica, data and optimizer."""

    def __init__(self, number: int, device: str, attention: AttentionBackend, *, rows: int) -> None:
        settings = replace(SETTINGS, data=replace(SETTINGS.data, tokens_per_batch=rows))
        self.device = device
        start = DFlashDrafter(SHAPE, generator=torch.Generator().manual_seed(number))
        rng = torch.Generator().manual_seed(100 + number)
        head = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=rng) / 8
        self.replica = replica(start, device, DTYPE)
        self.role = drafter_role(
            device,
            self.replica,
            head.to(device, getattr(torch, DTYPE)),
            build_objective(settings, SHAPE),
            attention,
            partial(synthetic_batch, settings, SHAPE.vocab_size),
        )
        self.optimizer = MasterAdamW(start.named_parameters(), device=device, compute_dtype=getattr(torch, DTYPE))
        self.buffers = self.optimizer.gradient_buffers()
        self.item = self.role.rehearsal_item()

    def step(self) -> float:
        """Forward, loss, backward and update; returns the loss."""
        sums = self.role.micro_step(self.item)
        for buffer, parameter in zip(self.buffers, self.role.parameters, strict=True):
            if parameter.grad is None:
                buffer.zero_()
            else:
                buffer.copy_(parameter.grad)
            parameter.grad = None
        self.optimizer.step(self.buffers, divisor=sums.loss_den, lr=1e-3, clip=1.0)
        self.optimizer.publish(self.replica)
        return sums.loss


def train_in_threads(trainers: list[Trainer], door: Door, steps: int) -> tuple[list[list[float]], list[float]]:
    """Every thread steps until all have done `steps`; returns losses and seconds to the first finished step."""
    losses: list[list[float]] = [[] for _ in trainers]
    warm_s = [0.0] * len(trainers)
    errors: list[BaseException] = []
    began = time.perf_counter()

    def work(number: int) -> None:
        seen = losses[number]
        try:
            while not errors and min(map(len, losses)) < steps:
                seen.append(door("first" if not seen else "later", trainers[number].step))
                warm_s[number] = warm_s[number] or time.perf_counter() - began
        except BaseException as error:
            errors.append(error)

    in_threads(work, trainers)
    if errors:
        raise errors[0]
    return losses, warm_s


def in_threads(work: Callable[[int], None], trainers: list[Trainer]) -> None:
    """Call `work` with each trainer's number, in threads set up like the workers of a run."""

    def start(number: int, device: str) -> None:
        use_own_stream(device, priority=0)
        configure_thread()
        work(number)

    devices = [trainer.device for trainer in trainers]
    settle(devices)
    threads = [threading.Thread(target=start, args=pair) for pair in enumerate(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(devices)


def steady_state(trainers: list[Trainer], gate: Gate) -> dict[str, float]:
    """Milliseconds of a warm step with the gate and without it, in turns, and the share spent in the gate itself."""
    spent = {"gated": [0.0] * len(trainers), "bare": [0.0] * len(trainers), "inside": [0.0] * len(trainers)}
    barrier = threading.Barrier(len(trainers))

    def work(number: int) -> None:
        def timed() -> None:
            began = time.perf_counter()
            trainers[number].step()
            spent["inside"][number] += time.perf_counter() - began

        gate.run("train", trainers[number].step)
        for _ in range(STEADY_ROUNDS):
            for way, step in (("gated", partial(gate.run, "train", timed)), ("bare", trainers[number].step)):
                barrier.wait()
                began = time.perf_counter()
                for _ in range(STEADY_STEPS):
                    step()
                spent[way][number] += time.perf_counter() - began

    in_threads(work, trainers)
    total = {name: sum(seconds) for name, seconds in spent.items()}
    steps = STEADY_STEPS * STEADY_ROUNDS * len(trainers)
    return {
        "step_ms": total["gated"] / steps * 1e3,
        "bare_step_ms": total["bare"] / steps * 1e3,
        "gate_share": 1 - total["inside"] / total["gated"],
    }


def run(mode: str, threads: int, layout: str, steps: int, steady: bool) -> dict[str, Any]:
    configure_main()

    def trainer(number: int, attention: str) -> Trainer:
        device = f"cuda:{number if layout == 'gpus' else 0}"
        rows = ROWS + 512 * number * (layout == "shapes")
        return Trainer(number, device, make_backend(attention, device), rows=rows)

    trainers, dense = ([trainer(number, name) for number in range(threads)] for name in ("flex", "reference"))
    if mode != "gate":
        lock = threading.Lock()

        def door(which: str, step: Callable[[], object]) -> Any:
            with lock if mode == "first" and which == "first" else nullcontext():
                return step()

        losses, warm_s = train_in_threads(trainers, door, steps)
        return {"warm_s": warm_s, "steps": sum(map(len, losses))}
    with Gate(stall_seconds=120) as gate:
        losses, warm_s = train_in_threads(trainers, lambda _, step: gate.run("train", step), steps)
        gate.mark_warm()
        caches = {group: dict(counters[group]) for group in ("aot_autograd", "inductor")}
        expected = [[trainer.step() for _ in seen] for trainer, seen in zip(dense, losses, strict=True)]
        pairs = [pair for two in zip(losses, expected, strict=True) for pair in zip(*two, strict=True)]
        return {
            "warm_s": warm_s,
            "steps": sum(map(len, losses)),
            "loss_error": max(abs(flex - reference) / reference for flex, reference in pairs),
            "first_losses": [seen[0] for seen in losses],
            "first_dense_losses": [seen[0] for seen in expected],
            "compiles": gate.compiles_at_barrier,
            "compiles_since_warm": gate.compiles_since_warm,
            "refused": gate.refused,
            "caches": caches,
            **(steady_state(trainers, gate) if steady else {}),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("gate", "first", "none"), required=True)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--layout", choices=("same", "shapes", "gpus"), default="shapes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--steady", action="store_true")
    arguments = parser.parse_args()
    faulthandler.enable()
    print(json.dumps(run(**vars(arguments))))


if __name__ == "__main__":
    main()
