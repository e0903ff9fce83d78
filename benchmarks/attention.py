"""Block attention alone, forward and backward, beside torch's compiled flex_attention with its compiled block mask.

    python benchmarks/attention.py --out benchmarks/results/attention-NAME.json

On one CUDA device, bf16. flex gets its best case: context and block rows concatenated beforehand, heads first and
contiguous, and the simplest mask for one document; `flex_with_mask` adds the making of the mask, which a training step
pays once per batch. `ours` computes scores again for the queries' gradients; `ours_kept_MB` keeps gradients of scores
in at most that much memory (`KEPT_BYTES`). TFLOP/s count what no implementation can avoid: two products forward and
five backward, over the context rows and block rows that each row sees. Errors are ‖out - ref‖ / ‖ref‖ against the
reference in fp32.

Contenders of a case take turns, so that all meet the same clocks. The file is written after every case, and no case is
begun later than --seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_core.attention import BlockLayout, reference_attention
from dflash_core.attention.triton import TritonAttention
from dflash_core.kernels import block_attention as kernels

MB = 2**20
Job = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """By default Qwen3-8B's drafter: 512 sorted anchors in one document of ``rows`` tokens."""

    rows: int
    anchors: int = 512
    block_size: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


class Problem:
    """Random bf16 tensors of a case, and the anchors."""

    def __init__(self, case: Case) -> None:
        rng = torch.Generator("cuda").manual_seed(0)
        self.case, tokens = case, case.anchors * case.block_size
        shapes = [(tokens, case.heads), *[(case.rows, case.kv_heads)] * 2, *[(tokens, case.kv_heads)] * 2]
        self.rows = [self._random(rng, *shape).requires_grad_() for shape in shapes]
        self.d_out = self._random(rng, *shapes[0])
        hi = torch.randperm(case.rows, generator=rng, device="cuda")[: case.anchors].sort().values
        self.layout = BlockLayout(torch.zeros_like(hi), hi, case.block_size, torch.ones_like(hi, dtype=torch.bool))
        self.scale = case.head_dim**-0.5

    def _random(self, rng: torch.Generator, rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, self.case.head_dim, generator=rng, device="cuda").bfloat16()

    @property
    def flops(self) -> int:
        """Of the forward pass; the backward pass has 2.5 times as many."""
        case = self.case
        seen = int(self.layout.hi.sum()) * case.block_size + case.anchors * case.block_size**2
        return 4 * seen * case.heads * case.head_dim

    def attend(self, backend: Any, rows: list[Tensor]) -> Tensor:
        out: Tensor = backend(*rows, self.layout, scale=self.scale, sliding_window=None, causal=False)
        return out

    def forward(self, backend: Any) -> tuple[Tensor, ...]:
        return (self.attend(backend, self.rows),)

    def both(self, backend: Any) -> tuple[Tensor, ...]:
        out = self.attend(backend, self.rows)
        return out, *torch.autograd.grad(out, self.rows, self.d_out)

    def kept(self, backend: Any, megabytes: int) -> tuple[Tensor, ...]:
        before, kernels.KEPT_BYTES = kernels.KEPT_BYTES, megabytes * MB
        try:
            return self.both(backend)
        finally:
            kernels.KEPT_BYTES = before

    def reference(self) -> tuple[Tensor, ...]:
        rows = [tensor.detach().float().requires_grad_() for tensor in self.rows]
        out = self.attend(reference_attention, rows)
        return out.detach(), *torch.autograd.grad(out, rows, self.d_out.float())


class Flex:
    """torch's own: compiled for the static shapes of one problem."""

    def __init__(self, problem: Problem) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.attention: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
        self.create: Callable[..., Any] = torch.compile(create_block_mask, dynamic=False)
        self.problem, (q, k_ctx, v_ctx, k_blk, v_blk) = problem, problem.rows
        self.inputs = [self._heads_first(q), *(self._joined(*pair) for pair in ((k_ctx, k_blk), (v_ctx, v_blk)))]
        self.d_out = problem.d_out.transpose(0, 1)[None].contiguous()
        self.block_mask = self.mask()[0]

    def _heads_first(self, rows: Tensor) -> Tensor:
        return rows.detach().transpose(0, 1)[None].contiguous().requires_grad_()

    def _joined(self, context: Tensor, block: Tensor) -> Tensor:
        return self._heads_first(torch.cat([context.detach(), block.detach()]))

    def mask(self) -> tuple[Any]:
        anchors, size, context_rows = self.problem.layout.hi, self.problem.case.block_size, self.problem.case.rows

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            own = (key >= context_rows) & ((key - context_rows) // size == row // size)
            return (key < anchors[row // size]) | own

        tokens = self.problem.case.anchors * size
        return (self.create(sees, 1, 1, tokens, context_rows + tokens, device="cuda"),)

    def forward(self) -> tuple[Tensor, ...]:
        mask, scale = self.block_mask, self.problem.scale
        q, keys, values = self.inputs
        return (self.attention(q, keys, values, block_mask=mask, scale=scale, enable_gqa=True),)

    def both(self) -> tuple[Tensor, ...]:
        (out,) = self.forward()
        return out, *torch.autograd.grad(out, self.inputs, self.d_out)

    def both_with_mask(self) -> tuple[Tensor, ...]:
        self.block_mask = self.mask()[0]
        return self.both()

    def as_ours(self) -> tuple[Tensor, ...]:
        """Forward and gradients in our layout: the keys' come as context rows, then block rows."""
        out, d_q, d_k, d_v = (tensor[0].transpose(0, 1) for tensor in self.both())
        rows = self.problem.case.rows
        return out, d_q, d_k[:rows], d_v[:rows], d_k[rows:], d_v[rows:]


def errors(result: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> dict[str, float]:
    names = ("out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk")
    pairs = zip(names, result, expected, strict=True)
    return {name: float((mine.float() - true).norm() / true.norm()) for name, mine, true in pairs}


def take_turns(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            job()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end))
    return {
        name: {"ms": round(statistics.median(taken), 3), "ms_min": round(min(taken), 3), "ms_max": round(max(taken), 3)}
        for name, taken in times.items()
    }


def compare(case: Case, kept: list[int], repeats: int, *, flex: bool) -> dict[str, Any]:
    problem, backend = Problem(case), TritonAttention()
    expected = problem.reference()
    ours: dict[str, Job] = {"ours": partial(problem.both, backend)}
    ours |= {f"ours_kept_{size}": partial(problem.kept, backend, size) for size in kept}
    jobs: dict[str, Callable[[], object]] = {"ours_forward": partial(problem.forward, backend), **ours}
    wrong = {name: errors(job(), expected) for name, job in ours.items()}
    if flex:
        torch.compiler.reset()  # every shape is compiled for itself, as far from the recompile limit as the first
        begin, theirs = time.perf_counter(), Flex(problem)
        wrong["flex"] = errors(theirs.as_ours(), expected)
        print(f"  flex compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        jobs |= {"flex_forward": theirs.forward, "flex": theirs.both, "flex_with_mask": theirs.both_with_mask}
    del expected
    results: dict[str, Any] = take_turns(jobs, repeats)
    for name, entry in results.items():
        entry["tflops"] = round(problem.flops * (1 if name.endswith("forward") else 3.5) / entry["ms"] / 1e9, 1)
        entry |= {"errors": wrong[name]} if name in wrong else {}
    best = min(entry["ms"] for name, entry in results.items() if name in ours)
    speedup = {name: round(results[name]["ms"] / best, 3) for name in ("flex", "flex_with_mask") if name in results}
    return {"case": asdict(case), "results": results, "speedup_of_the_best_of_ours": speedup}


def cases(rows: list[int]) -> Iterator[Case]:
    yield from (Case(size) for size in rows)
    yield Case(3072, block_size=8)
    yield Case(3072, head_dim=64)
    yield replace(Case(3072, head_dim=256), heads=16, kv_heads=4)


def main() -> None:
    arguments = parser().parse_args()
    begin = time.monotonic()
    report: dict[str, Any] = {
        "benchmark": "attention",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "dtype": "bfloat16",
        "repeats": arguments.repeats,
        "cases": [],
    }
    for case in cases(arguments.rows):
        if time.monotonic() - begin > arguments.seconds:
            print(f"no time left for {case}", flush=True)
            continue
        print(case, flush=True)
        entry = compare(case, arguments.kept, arguments.repeats, flex=not arguments.no_flex)
        report["cases"].append(entry)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        times = {name: result["ms"] for name, result in entry["results"].items()}
        print(f"  {times} {entry['speedup_of_the_best_of_ours']} at {time.monotonic() - begin:.0f} s", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    # The two ends and the usual length first, in case time runs out.
    made.add_argument("--rows", type=int, nargs="*", default=[3072, 32768, 1024, 8192, 16384, 2048, 4096])
    made.add_argument("--kept", type=int, nargs="*", default=[512, 4096], help="sizes of the buffer to try, in MB")
    made.add_argument("--no-flex", action="store_true", help="only ours: nothing is compiled by torch")
    made.add_argument("--repeats", type=int, default=10)
    made.add_argument("--seconds", type=float, default=110)
    return made


if __name__ == "__main__":
    # flex is a handful of kernels: compiling them here is faster than starting a pool of processes first.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    main()
