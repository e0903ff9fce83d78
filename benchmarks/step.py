"""Time and memory of one drafter step, beside the published trainers in the same run.

    python benchmarks/step.py --out benchmarks/results/step-NAME.json
    python benchmarks/step.py --shape 27b --seq 4096
    python benchmarks/step.py --contenders ours --anchors 512 128 2048 --seq 3072 1024 32768 --threads 1 2 3

Forward, loss and backward of one micro-batch on one CUDA device, with random weights, features and tokens: draw
anchors, embed the blocks, draft, score, differentiate; no optimizer. Every contender gets the same shapes, features,
embedding and head, and draws as many anchors over all of the row. The first value of every option is the base case,
where peers run too; every further value changes that option alone.

TFLOP/s count the operations that a step cannot avoid (`Case.flops`), whatever a contender really computes; MFU divides
by the 8192-cubed bf16 product measured in the same run. Peak memory holds everything: weights, gradients, features,
embedding and head.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.attention import make_backend
from dflash_core.compile.gate import Gate
from dflash_core.data.packing import PackedBatch, StreamState
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.pipeline.microstep import Objective, TrainItem, block_terms, plan_blocks

Step = Callable[[], Tensor]
GAMMA = {16: 7.0, 8: 4.0}
WARM = 3
GIB = 2**30
PACKAGES = ("torch", "triton", "transformers", "specforge", "speculators", "liger-kernel")
Build = Callable[["Case", "Inputs"], Step]
PEERS: dict[str, Build] = {
    "specforge": peers.specforge,
    "specforge-liger": partial(peers.specforge, liger=True),
    "speculators": peers.speculators,
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A drafter of five layers with five taps, and the target it belongs to."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    target_layers: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 5

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(round(1 + i * (self.target_layers - 4) / 4) for i in range(5))


SHAPES = {
    "4b": Shape(hidden_size=2560, intermediate_size=9728, vocab_size=151_936, target_layers=36),
    "8b": Shape(hidden_size=4096, intermediate_size=12_288, vocab_size=151_936, target_layers=36),
    "27b": Shape(hidden_size=5120, intermediate_size=17_408, vocab_size=248_320, target_layers=64),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination of the options."""

    name: str
    seq: int
    anchors: int
    block: int
    threads: int

    @property
    def shape(self) -> Shape:
        return SHAPES[self.name]

    @property
    def gamma(self) -> float:
        return GAMMA[self.block]

    @property
    def flops(self) -> float:
        """Operations of one step that no implementation can avoid, 2·m·n·k for a product; anchors uniform over the row.

        A block row sees half of the context on average, and its block. Backward is twice the forward, except: nothing
        flows into the embedding, the features or the frozen head's weight, and attention recomputes its scores (2.5).
        Offset 0 is not scored.
        """
        s, rows = self.shape, self.anchors * self.block
        q_width, kv_width = s.heads * s.head_dim, 2 * s.kv_heads * s.head_dim
        inputs = 2 * rows * s.hidden_size * (q_width + kv_width)
        layer = inputs + 2 * rows * s.hidden_size * (q_width + 3 * s.intermediate_size)
        context = s.layers * 2 * self.seq * s.hidden_size * kv_width
        fc = 2 * self.seq * len(s.taps) * s.hidden_size**2
        attention = s.layers * 4 * rows * q_width * (self.seq / 2 + self.block)
        head = 2 * self.anchors * (self.block - 1) * s.hidden_size * s.vocab_size
        forward = s.layers * layer + context + fc + attention + head
        return forward + (2 * s.layers * layer - inputs) + 2 * context + fc + 2.5 * attention + head


@dataclass(frozen=True)
class Inputs:
    """What every contender gets: one row of tokens with features, the target's embedding and head."""

    input_ids: Tensor
    taps: Tensor
    last_hidden: Tensor
    embed: Tensor
    head: Tensor
    mask_token_id: int

    @staticmethod
    def random(case: Case) -> Inputs:
        rng, s = torch.Generator("cuda").manual_seed(0), case.shape

        def normal(*size: int, std: float = 1.0) -> Tensor:
            return torch.empty(*size, dtype=torch.bfloat16, device="cuda").normal_(std=std, generator=rng)

        return Inputs(
            input_ids=torch.randint(0, s.vocab_size - 1, (case.seq,), device="cuda", generator=rng),
            taps=normal(case.seq, len(s.taps) * s.hidden_size),
            last_hidden=normal(case.seq, s.hidden_size),
            embed=normal(s.vocab_size, s.hidden_size, std=0.02),
            head=normal(s.vocab_size, s.hidden_size, std=0.02),
            mask_token_id=s.vocab_size - 1,
        )


def ours(case: Case, inputs: Inputs) -> Step:
    """What a drafter worker does with one micro-batch, from drawing its anchors on."""
    s = case.shape
    config = DFlashConfig(
        hidden_size=s.hidden_size,
        intermediate_size=s.intermediate_size,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocab_size,
        num_target_layers=s.target_layers,
        target_layer_ids=s.taps,
        mask_token_id=inputs.mask_token_id,
        block_size=case.block,
    )
    with torch.device("cuda"):
        drafter = DFlashDrafter(config, generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    attention = make_backend("auto", "cuda")
    objective = Objective(
        seed=0,
        block_size=case.block,
        mask_token_id=inputs.mask_token_id,
        anchors_per_batch=case.anchors,
        gamma=case.gamma,
    )
    ids, positions = inputs.input_ids.cpu().numpy(), np.arange(case.seq)
    epochs = itertools.count()  # fresh anchors every step

    def step() -> Tensor:
        batch = PackedBatch(
            sequence=0,
            epoch=next(epochs),
            input_ids=ids,
            loss_mask=np.ones(case.seq, dtype=bool),
            document_ids=np.zeros(case.seq, dtype=np.int64),
            position_ids=positions,
            sample_ids=(0,),
            next_state=StreamState(),
        )
        plan = plan_blocks(batch, objective)
        item = TrainItem(
            batch=batch,
            taps=inputs.taps,
            context_positions=torch.from_numpy(positions),
            block_embeds=F.embedding(plan.ids.to("cuda", non_blocking=True), inputs.embed),
            layout=plan.layout,
            labels=plan.labels,
            supervised=plan.supervised,
        ).to("cuda", torch.bfloat16)
        for parameter in drafter.parameters():
            parameter.grad = None
        terms = block_terms(drafter, inputs.head, item, objective, attention)
        terms.num.backward()
        return terms.num.detach() / terms.den

    return step


def measure(build: Build, case: Case, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Milliseconds per step from events on the stream, peak memory, and the first and last loss as a sign of life."""
    begin = time.perf_counter()
    step = build(case, inputs)
    first = float(step())
    ready = time.perf_counter() - begin
    for _ in range(WARM):
        step()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    peak = torch.cuda.max_memory_allocated() / GIB
    return summary(case, times) | {"peak_gib": round(peak, 2), "ready_s": round(ready, 1), "loss": [first, float(loss)]}


def measure_threads(case: Case, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Drafter threads on one GPU, each with a replica and a stream of its own, stepping through one gate."""
    gate, errors = Gate(), list[BaseException]()
    barrier = threading.Barrier(case.threads + 1)

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                step = gate.run(("build",), partial(ours, case, inputs))
                for _ in range(WARM):
                    gate.run(("step",), step)
                torch.cuda.current_stream().synchronize()
                barrier.wait()
                for _ in range(repeats):
                    gate.run(("step",), step)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, name=f"drafter-{n}") for n in range(case.threads)]
    torch.cuda.reset_peak_memory_stats()
    with gate:
        for thread in threads:
            thread.start()
        barrier.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
    assert not errors
    elapsed = (time.perf_counter() - begin) * 1e3 / (repeats * case.threads)
    return summary(case, [elapsed]) | {"peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)}


def summary(case: Case, times: list[float]) -> dict[str, Any]:
    median = statistics.median(times)
    return {
        "ms": round(median, 2),
        "ms_min": round(min(times), 2),
        "ms_max": round(max(times), 2),
        "tflops": round(case.flops / median / 1e9, 1),
    }


def ceilings() -> dict[str, float]:
    """bf16 products in TFLOP/s and a device copy in TB/s (read plus written), on random numbers."""

    def best(fn: Callable[[], Any], work: float) -> float:
        for _ in range(WARM):
            fn()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        marks[0].record()
        for mark in marks[1:]:
            fn()
            mark.record()
        torch.cuda.synchronize()
        return work / statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e9

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    large = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(large)
    return {
        "matmul_8192_tflops": round(best(lambda: a @ b, 2 * 8192**3), 1),
        "copy_tb_s": round(best(lambda: target.copy_(large), 2 * large.nbytes), 2),
    }


def plan(arguments: argparse.Namespace) -> Iterator[tuple[str, Case, Build | None]]:
    """Name, case and builder (None: drafter threads); then the peers, slow to compile, on the base case."""
    axes = {
        "name": arguments.shape,
        "seq": arguments.seq,
        "anchors": arguments.anchors,
        "block": arguments.block,
        "threads": arguments.threads,
    }
    base = Case(**{axis: values[0] for axis, values in axes.items()})
    cases = [base, *(replace(base, **{axis: value}) for axis, values in axes.items() for value in values[1:])]
    if "ours" in arguments.contenders:
        yield from (("ours", case, ours if case.threads == 1 else None) for case in cases)
    yield from ((name, base, PEERS[name]) for name in arguments.contenders if name != "ours")


def main() -> None:
    arguments = parser().parse_args()
    assert torch.cuda.is_available(), "this benchmark needs a CUDA device"
    result: dict[str, Any] = {
        "benchmark": "step",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "ceilings": ceilings(),
        "rows": [],
    }
    print(json.dumps(result["ceilings"]), flush=True)
    for name, case, build in plan(arguments):
        gc.collect()
        torch.cuda.empty_cache()
        row = {"contender": name, **vars(case)}
        try:
            inputs = Inputs.random(case)
            run = partial(measure, build) if build else measure_threads
            row |= run(case, inputs, arguments.repeats)
        except Exception as error:  # whatever a peer raises must not cost the rows of the others
            if name == "ours" and not isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        inputs = None
        if "tflops" in row:
            row["mfu"] = round(row["tflops"] / result["ceilings"]["matmul_8192_tflops"], 3)
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", nargs="+", choices=SHAPES, default=["8b"])
    options.add_argument("--seq", nargs="+", type=int, default=[3072], help="context rows")
    options.add_argument("--anchors", nargs="+", type=int, default=[512], help="blocks per row")
    options.add_argument("--block", nargs="+", type=int, choices=GAMMA, default=[16], help="tokens per block")
    options.add_argument("--threads", nargs="+", type=int, default=[1], help="drafter threads on the one GPU")
    options.add_argument("--contenders", nargs="+", choices=["ours", *PEERS], default=["ours", *PEERS])
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--out", type=Path)
    return options


if __name__ == "__main__":
    main()
