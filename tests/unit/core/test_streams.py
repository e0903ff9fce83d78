"""The marks of the pipeline order everything that one stream writes and another reads, on any topology.

On a GPU a missing mark shows once in a while, as a wrong number. Here it shows always: every thread is a stream with
a vector clock, a mark carries the clock of its stream, and each access checks that it comes behind those it depends on.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_core.compile.gate import Gate
from dflash_core.pipeline import pipeline as pipeline_module
from dflash_core.pipeline import reducer as reducer_module
from dflash_core.pipeline import workers as workers_module
from dflash_core.pipeline.control import Control, Stopped
from dflash_core.pipeline.pipeline import Pipeline
from dflash_core.pipeline.roles import DrafterRole, TargetRole

STEPS, ROWS_PER_STEP = 6, 3


class Streams:
    """What each thread's stream is known to run behind, as clocks; memory is a name with its last accesses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[int, Counter[int]] = {}
        self._written: dict[str, Counter[int]] = {}
        self._read: dict[str, list[Counter[int]]] = {}

    def _mine(self) -> Counter[int]:
        return self._clocks.setdefault(threading.get_ident(), Counter())

    def now(self) -> Counter[int]:
        with self._lock:
            self._mine()[threading.get_ident()] += 1
            return self._mine().copy()

    def follow(self, clock: Counter[int]) -> None:
        with self._lock:
            self._clocks[threading.get_ident()] = self._mine() | clock

    def _check(self, earlier: Counter[int], what: str) -> None:
        assert all(self._mine()[stream] >= at for stream, at in earlier.items()), f"{what} without waiting"

    def read(self, memory: str) -> None:
        moment = self.now()
        with self._lock:
            self._check(self._written[memory], f"read {memory}")
            self._read.setdefault(memory, []).append(moment)

    def write(self, memory: str) -> None:
        moment = self.now()
        with self._lock:
            for access in (self._written.get(memory, Counter()), *self._read.pop(memory, [])):
                self._check(access, f"overwrote {memory}")
            self._written[memory] = moment


def mark_class(streams: Streams, *, waits: bool = True) -> type:
    class ClockMark:
        def __init__(self, *_devices: Any) -> None:
            self._at = streams.now()

        def wait(self) -> None:
            if waits:
                streams.follow(self._at)

    return ClockMark


def linger() -> None:
    time.sleep(random.random() * 0.002)


def run(
    monkeypatch: pytest.MonkeyPatch, topology: tuple[int, int], *, early: bool, careless: str | None = None
) -> Control:
    """A pipeline whose workers only touch memory; `careless`: the module whose marks do not wait."""
    streams = Streams()
    for module in (pipeline_module, reducer_module, workers_module):
        waits = careless is None or not module.__name__.endswith(careless)
        monkeypatch.setattr(module, "Mark", mark_class(streams, waits=waits))
    accumulate = reducer_module.GradientReducer._accumulate

    def noted(self: Any, gradients: Any, *, first: bool) -> None:
        streams.write("gradients")
        accumulate(self, gradients, first=first)

    monkeypatch.setattr(reducer_module.GradientReducer, "_accumulate", noted)

    def make_item(batch: Any) -> Any:
        linger()
        streams.write(f"item {batch.sequence}")
        return SimpleNamespace(batch=batch, taps=torch.zeros(1), tensors=(), shape_key="item")

    def micro_step(item: Any) -> Any:
        streams.read(f"item {item.batch.sequence}")
        streams.read("weights")
        linger()
        streams.write(f"sums {item.batch.sequence}")
        return SimpleNamespace(tensors=())

    def batches() -> Iterator[Any]:
        return (SimpleNamespace(sequence=sequence, num_tokens=1) for sequence in count())

    targets, drafters = topology
    control = Control()
    streams.write("weights")
    with Gate() as gate:
        pipeline = Pipeline(
            control=control,
            gate=gate,
            batches=batches(),
            targets=[TargetRole(device="cpu", make_item=make_item, rehearse=lambda: None)] * targets,
            drafters=[
                DrafterRole(
                    device="cpu",
                    parameters=[torch.nn.Parameter(torch.zeros(1))],
                    micro_step=micro_step,
                    undo=lambda: None,
                    rehearsal_item=lambda: None,  # type: ignore[arg-type, return-value]
                )
            ]
            * drafters,
            gradient_buffers=[torch.zeros(1)],
            batches_per_step=ROWS_PER_STEP,
            queue_size=4,
            first=0,
            end=STEPS * ROWS_PER_STEP,
        )
        # What is written before the threads start has been waited for on the host (`settle`).
        start = streams.now()
        for worker in pipeline.workers:
            monkeypatch.setattr(worker, "_on_start", lambda: streams.follow(start))
        try:
            pipeline.start()
            for _ in range(STEPS):
                for result in pipeline.wait_step():
                    streams.read(f"sums {result.batch.sequence}")
                streams.read("gradients")
                streams.write("weights")
                if early:
                    pipeline.open_next()
                linger()
                if not early:
                    pipeline.open_next()
        except Stopped:
            pass
        except AssertionError as error:
            control.fail("main", error, step=None)
        finally:
            pipeline.close()
    return control


@pytest.mark.parametrize("topology", [(1, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("early", [True, False])
def test_every_access_is_behind_those_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, topology: tuple[int, int], early: bool
) -> None:
    control = run(monkeypatch, topology, early=early)
    assert control.failure is None, control.failure


@pytest.mark.parametrize(("careless", "memory"), [("workers", "read item"), ("reducer", ""), ("pipeline", "")])
def test_a_mark_that_nobody_waits_for_is_noticed(monkeypatch: pytest.MonkeyPatch, careless: str, memory: str) -> None:
    control = run(monkeypatch, (2, 3), early=True, careless=careless)
    assert control.failure is not None
    assert "without waiting" in str(control.failure.error) and memory in str(control.failure.error)
