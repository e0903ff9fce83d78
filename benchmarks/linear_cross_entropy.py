"""The frozen head's loss, forward and backward, beside what others do: time, memory, and the same numbers.

    python benchmarks/linear_cross_entropy.py --out benchmarks/results/step-head-NAME.json

On one CUDA device. Contenders, all on the same random bf16 rows and labels:

* `ours-decay`, `ours-dpace`: `block_loss`; `ours-evaluate`: without gradients;
* `torch`: all logits, cross-entropy of their fp32 copy, autograd;
* `specforge`: the objective of the `specforge` wheel (`pip install --no-deps specforge==0.2.0`), its default chunks,
  with its accuracy; it recomputes the logits, and scores offset 0 with weight 0 like every other row;
* `liger-weighted`, `liger-plain`: `liger-kernel`'s fused linear cross-entropy. With a weight per row
  (`reduction="none"`) it recomputes the logits; `sum` is one pass, without weights.

`products` is the floor: the two matrix products alone, in our chunks. Wheels that are not installed are left out.
Errors are ‖out - ref‖ / ‖ref‖ against plain autograd in fp32 from the same bf16 numbers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_core.objective import block_loss, decay_weights
from dflash_core.objective.loss import CHUNK_ROWS_GPU

GAMMA, BLOCK = 7.0, 16
SHAPES = {"8B": (4096, 151_936), "27B": (5120, 248_320)}
CHUNKS = (512, 1024, 2048, 4096, 8192)
GIB = 2**30


class Problem:
    """512 blocks of 16 rows, all supervised: ``hidden [T, H]``, ``head [V, H]``, ``labels [N, B]``."""

    def __init__(self, width: int, vocab: int, blocks: int) -> None:
        rng = torch.Generator("cuda").manual_seed(0)
        self.hidden = torch.randn(blocks * BLOCK, width, generator=rng, device="cuda").bfloat16().requires_grad_()
        self.head = torch.randn(vocab, width, generator=rng, device="cuda").mul_(0.03).bfloat16()
        self.labels = torch.randint(0, vocab, (blocks, BLOCK), generator=torch.Generator().manual_seed(0))
        self.supervised = torch.arange(BLOCK).expand(blocks, BLOCK) >= 1
        # What the others get, ready on the device: the rows to score, their labels and weights.
        self.rows = torch.arange(blocks * BLOCK).view(blocks, BLOCK)[:, 1:].flatten().cuda()
        self.row_labels = self.labels[:, 1:].flatten().cuda()
        self.row_weights = decay_weights(BLOCK, GAMMA).float().repeat(blocks).cuda()

    @property
    def flops(self) -> int:
        return 4 * len(self.rows) * self.head.numel()

    def ours(self, **options: Any) -> Tensor:
        return block_loss(self.hidden, self.head, self.labels, self.supervised, gamma=GAMMA, **options).num

    @torch.no_grad()
    def evaluated(self) -> Tensor:
        return self.ours()

    def full_logits(self, hidden: Tensor, head: Tensor, weights: Tensor) -> Tensor:
        logits = (hidden[self.rows] @ head.T).float()
        return (F.cross_entropy(logits, self.row_labels, reduction="none") * weights).sum()

    def liger(self, function: Any, reduction: str) -> Tensor:
        options = (None, None, -100, 0.0, 0.0, reduction)
        loss = function.apply(self.hidden[self.rows], self.head, self.row_labels, *options)[0]
        return (loss * self.row_weights).sum() if reduction == "none" else loss

    def specforge(self, model: Any, reduce: Any) -> Tensor:
        this = SimpleNamespace(
            lm_head=partial(F.linear, weight=self.head),
            loss_type="dflash",
            loss_decay_gamma=GAMMA,
            block_size=BLOCK,
        )
        blocks = self.hidden.view(1, -1, BLOCK, self.hidden.shape[1])
        mask = self.supervised.float()[None].cuda()
        terms = partial(model._dflash_objective_chunk_terms, this)
        return reduce(terms, blocks, self.labels[None].cuda(), mask, chunk_size=128, dim=1)[0]

    def products(self) -> None:
        rows = self.hidden.detach()[self.rows].split(CHUNK_ROWS_GPU)
        logits = self.head.new_empty(len(rows[0]), len(self.head))
        for chunk in rows:
            torch.mm(chunk, self.head.T, out=logits[: len(chunk)])
            torch.mm(logits[: len(chunk)], self.head)


def contenders(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    known: dict[str, Callable[[], Tensor]] = {
        "ours-decay": problem.ours,
        "ours-dpace": partial(problem.ours, kind="dpace"),
        "torch": lambda: problem.full_logits(problem.hidden, problem.head, problem.row_weights),
    }
    try:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.core.chunking import checkpointed_chunk_reduce

        known["specforge"] = partial(problem.specforge, OnlineDFlashModel, checkpointed_chunk_reduce)
    except ImportError as missing:
        print(f"specforge is left out: {missing}")
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        known["liger-weighted"] = partial(problem.liger, Liger, "none")
        known["liger-plain"] = partial(problem.liger, Liger, "sum")
    except ImportError as missing:
        print(f"liger-kernel is left out: {missing}")
    return known


def backward(problem: Problem, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    value = loss()
    return value, torch.autograd.grad(value, problem.hidden)[0]


def measure(jobs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of the median run and the spread; the peak of memory above what was there before.

    The jobs take turns, so that all of them meet the same clocks.
    """
    peaks: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for name, job in jobs.items():
        job()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        job()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / GIB
    for _ in range(repeats):
        for name, job in jobs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            job()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {
        name: {
            "ms": round(statistics.median(taken), 3),
            "ms_min": round(min(taken), 3),
            "ms_max": round(max(taken), 3),
            "peak_gib": round(peaks[name], 3),
        }
        for name, taken in times.items()
    }


def errors(problem: Problem, loss: Callable[[], Tensor], expected: tuple[Tensor, Tensor]) -> dict[str, float]:
    value, gradient = backward(problem, loss)
    value_error = float((value - expected[0]).abs() / expected[0].abs())
    gradient_error = float((gradient.float() - expected[1]).norm() / expected[1].norm())
    return {"loss_error": value_error, "gradient_error": gradient_error}


def fp32(problem: Problem, weights: Tensor) -> tuple[Tensor, Tensor]:
    hidden = problem.hidden.detach().float().requires_grad_()
    value = problem.full_logits(hidden, problem.head.float(), weights)
    return value.detach(), torch.autograd.grad(value, hidden)[0]


def compare(problem: Problem, repeats: int) -> dict[str, dict[str, float]]:
    losses = contenders(problem)
    jobs: dict[str, Callable[[], object]] = {"products": problem.products, "ours-evaluate": problem.evaluated}
    jobs |= {name: partial(backward, problem, loss) for name, loss in losses.items()}
    results = measure(jobs, repeats)
    for name in ("products", *losses):
        results[name]["tflops"] = round(problem.flops / results[name]["ms"] / 1e9, 1)
    expected = fp32(problem, problem.row_weights)
    plain = fp32(problem, torch.ones_like(problem.row_weights))
    for name, loss in losses.items():
        if name != "ours-dpace":  # other weights: its numbers are checked by the tests
            results[name] |= errors(problem, loss, plain if name == "liger-plain" else expected)
    return results


def sweep(problem: Problem, repeats: int) -> dict[str, dict[str, float]]:
    jobs = {f"chunk {rows}": partial(backward, problem, partial(problem.ours, chunk_rows=rows)) for rows in CHUNKS}
    return measure(jobs, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=512)
    arguments = parser.parse_args()
    shapes: dict[str, Any] = {}
    for name, (width, vocab) in SHAPES.items():
        problem = Problem(width, vocab, arguments.blocks)
        results, chunks = compare(problem, arguments.repeats), sweep(problem, arguments.repeats)
        shape = {"rows": len(problem.rows), "hidden": width, "vocab": vocab}
        shapes[name] = shape | {"results": results, "chunks": chunks}
        for contender, row in (results | chunks).items():
            print(f"{name:4} {contender:16}", *(f"{key} {value:.4g}" for key, value in row.items()))
        del problem
        torch.cuda.empty_cache()
    versions = {
        module: importlib.metadata.version(module)
        for module in ("torch", "triton", "specforge", "liger-kernel")
        if next(iter(importlib.metadata.distributions(name=module)), None)
    }
    report = {
        "benchmark": "linear_cross_entropy",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": versions,
        "repeats": arguments.repeats,
        "shapes": shapes,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
