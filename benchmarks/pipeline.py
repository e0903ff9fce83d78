"""One whole pipeline on one GPU: target and drafter in threads, against the same two run one after the other.

    python benchmarks/pipeline.py --out benchmarks/results/step-pipeline-NAME.json

A run's own workers, queue, gate, reducer and optimizer, on random weights of the real shapes and packed rows of random
documents with the lengths of chats. `sequential` calls the very same parts in one thread, on one stream: features of a
row, its gradient, the sum, then update and publication. Both read the gradient norm on the host once a step.

`gpu_idle` is the share of the time in which no kernel and no copy runs: the gaps between the union of their intervals,
as CUPTI reports them for a few more steps after the timed ones (`profiled_slowdown` says what watching costs).
The result file is rewritten after each way of each shape.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, reduce
from itertools import count
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from dflash_core.attention import backend_name
from dflash_core.compile.environment import configure_thread
from dflash_core.compile.gate import Gate
from dflash_core.config import DataConfig, DrafterConfig, RunConfig, TargetConfig, TopologyConfig, TrainConfig
from dflash_core.data.packing import PackedBatch, StreamState
from dflash_core.drafter import DFlashDrafter, config_from_target
from dflash_core.objective import MetricSums
from dflash_core.optim import MasterAdamW
from dflash_core.pipeline.control import Control, Stopped
from dflash_core.pipeline.pipeline import Pipeline
from dflash_core.pipeline.reducer import GradientReducer, MicroResult
from dflash_core.session import Session, build_objective
from dflash_core.target import Target
from dflash_core.workforce import build_workforce

WARM_STEPS, PROFILED_STEPS = 3, 5
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A target, its drafter of 5 layers, and rows of `tokens` tokens in documents of at most `longest`."""

    target: Any
    tokens: int
    longest: int
    anchors: int
    rows_per_step: int
    steps: int


SHAPES = {
    "smollm2-135m": Shape(
        LlamaConfig(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        ),
        tokens=8192, longest=384, anchors=2048, rows_per_step=1, steps=60,
    ),
    "qwen3-8b": Shape(
        Qwen3Config(
            vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, rope_theta=1e6, tie_word_embeddings=False,
        ),
        tokens=3072, longest=1536, anchors=512, rows_per_step=2, steps=10,
    ),
}  # fmt: skip


class Bench:
    """Everything of one run but its data: roles, optimizer, buffers."""

    def __init__(self, shape: Shape, device: str, attention: str, gate: Gate) -> None:
        self.shape, self.device, self.gate = shape, device, gate
        config = RunConfig(
            version=1,
            target=TargetConfig(path="random"),
            drafter=DrafterConfig(mask_token_id=shape.target.vocab_size - 1),
            data=DataConfig(max_length=shape.longest, tokens_per_batch=shape.tokens),
            topology=TopologyConfig(targets=(device,), drafters=(device,), queue_size=4),
            train=TrainConfig(anchors_per_batch=shape.anchors, attention=attention),
        )
        torch.manual_seed(0)
        with torch.device(device):
            target = Target(AutoModelForCausalLM.from_config(shape.target, dtype=torch.bfloat16))
            drafter_config = config_from_target(target.config, config.drafter, None, dtype="bfloat16")
            drafter = DFlashDrafter(drafter_config)
        objective = build_objective(config, drafter_config)
        targets = {device: target}
        session = Session(
            config=config, tokenizer=None, targets=targets, drafter_config=drafter_config, objective=objective
        )
        self.packs_documents = target.packs_documents
        self.optimizer = MasterAdamW(drafter.named_parameters(), device=device)
        self.buffers = self.optimizer.gradient_buffers()
        self.workforce = build_workforce(session, drafter, gate, None)

    def update(self, results: list[MicroResult]) -> torch.Tensor:
        """What the trainer does between two steps; returns the gradient norm, on the device."""
        sums: MetricSums = reduce(add, [result.sums for result in results])
        norm = self.optimizer.step(self.buffers, divisor=sums.loss_den, lr=1e-4, clip=1.0)
        for replica in self.workforce.replicas:
            self.optimizer.publish(replica)
        return norm

    def sequential(self) -> Callable[[], list[PackedBatch]]:
        """A function that does one step in this thread."""
        rows = self.shape.rows_per_step
        reducer = GradientReducer(self.buffers, Control(), first=0, micro_batches=rows)
        stream = batches(self.shape)
        target, drafter = self.workforce.targets[0], self.workforce.drafters[0]

        def step() -> list[PackedBatch]:
            done = []
            for _ in range(rows):
                item = target.make_item(next(stream))
                sums = self.gate.run(item.shape_key, partial(drafter.micro_step, item))
                result = MicroResult(batch=item.batch, worker="all", sums=sums)
                reducer.add([parameter.grad for parameter in drafter.parameters], result)
                done.append(result)
                for parameter in drafter.parameters:
                    parameter.grad = None
            norm = self.update(done)
            reducer.open_next()
            assert np.isfinite(norm.item())
            return [result.batch for result in done]

        return step

    def pipeline(self, control: Control) -> tuple[Pipeline, Callable[[], list[PackedBatch]]]:
        """The pipeline, not started, and a function that does one step."""
        pipeline = Pipeline(
            control=control,
            gate=self.gate,
            batches=batches(self.shape),
            targets=self.workforce.targets,
            drafters=self.workforce.drafters,
            gradient_buffers=self.buffers,
            batches_per_step=self.shape.rows_per_step,
            queue_size=4,
            first=0,
            end=10**9,
            on_thread_start=configure_thread,
        )

        def step() -> list[PackedBatch]:
            results = pipeline.wait_step()
            norm = self.update(results)
            pipeline.open_next()
            assert np.isfinite(norm.item())
            return [result.batch for result in results]

        return pipeline, step


def batches(shape: Shape) -> Iterator[PackedBatch]:
    """Rows of random documents; the second half of each is supervised. Always the same ones."""
    rng = np.random.default_rng(0)
    for sequence in count():
        lengths: list[int] = []
        while True:
            length = int(np.clip(rng.lognormal(np.log(shape.longest / 2), 0.6), 16, shape.longest))
            if sum(lengths) + length > shape.tokens:
                break
            lengths.append(length)
        used = sum(lengths)
        position_ids = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(shape.tokens - used, dtype=np.int64)])
        document_ids = np.full(shape.tokens, -1, dtype=np.int64)
        document_ids[:used] = np.repeat(np.arange(len(lengths)), lengths)
        half = np.concatenate([np.repeat(np.array(lengths) // 2, lengths), np.zeros(shape.tokens - used)])
        yield PackedBatch(
            sequence=sequence,
            epoch=0,
            input_ids=rng.integers(0, shape.target.vocab_size - 1, shape.tokens),
            loss_mask=(document_ids >= 0) & (position_ids >= half),
            document_ids=document_ids,
            position_ids=position_ids,
            sample_ids=tuple(range(len(lengths))),
            next_state=StreamState(),
        )


def measure(step: Callable[[], list[PackedBatch]], steps: int, limit_s: float) -> dict[str, float]:
    """Rates over `steps` steps, or fewer (at least 2) within `limit_s`; and how long the GPU does nothing."""
    for _ in range(WARM_STEPS):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds, samples, tokens = [], 0, 0
    while len(seconds) < 2 or (len(seconds) < steps and sum(seconds) < limit_s):
        begin = time.perf_counter()
        done = step()
        seconds.append(time.perf_counter() - begin)
        samples += sum(len(batch.sample_ids) for batch in done)
        tokens += sum(batch.num_tokens for batch in done)
    peak = torch.cuda.max_memory_allocated() / GIB
    idle, profiled = idle_share(step)
    return {
        "steps": len(seconds),
        "step_ms": 1000 * statistics.mean(seconds),
        "step_ms_spread": 1000 * statistics.stdev(seconds),
        "samples_per_s": samples / sum(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "gpu_idle": idle,
        "profiled_slowdown": profiled / statistics.mean(seconds),
        "peak_gib": peak,
    }


def idle_share(step: Callable[[], object]) -> tuple[float, float]:
    """The share of `PROFILED_STEPS` steps without any kernel or copy, and the seconds of such a step."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        seconds = (time.perf_counter() - begin) / PROFILED_STEPS
        torch.cuda.synchronize()
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.device_type() == DeviceType.CUDA
    )
    first = reached = spans[0][0]
    busy = 0
    for start, end in spans:
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - first), seconds


def compare(shape: Shape, device: str, attention: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Both ways, one after the other, with the same models; yields what is known after each."""
    with Gate() as gate:
        bench = Bench(shape, device, attention, gate)
        found: dict[str, Any] = {
            "packs_documents": bench.packs_documents,
            "target_layers": shape.target.num_hidden_layers,
            "tokens_per_row": shape.tokens,
            "anchors_per_row": shape.anchors,
            "rows_per_step": shape.rows_per_step,
        }
        found["sequential"] = measure(bench.sequential(), shape.steps, limit_s)
        yield found
        found["pipeline"] = in_threads(bench, limit_s)
        found["speedup"] = found["pipeline"]["samples_per_s"] / found["sequential"]["samples_per_s"]
        yield found


def in_threads(bench: Bench, limit_s: float) -> dict[str, float]:
    """Raises what a worker raised."""
    control = Control()
    pipeline, step = bench.pipeline(control)
    try:
        pipeline.start(on_rehearsed=lambda entry: None)
        pipeline.wait_rehearsed()
        return measure(step, bench.shape.steps, limit_s)
    except Stopped:
        assert control.failure is not None
        raise control.failure.error from None
    finally:
        stuck = pipeline.close()
        assert not stuck, stuck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--limit", type=float, default=15, help="seconds of measuring for each way of each shape")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.cuda.set_device(arguments.device)
    result: dict[str, Any] = {
        "benchmark": "pipeline",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")},
        "attention": backend_name(arguments.attention, arguments.device),
        "shapes": {},
    }
    for name in arguments.shapes:
        for found in compare(SHAPES[name], arguments.device, arguments.attention, arguments.limit):
            result["shapes"][name] = found
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
