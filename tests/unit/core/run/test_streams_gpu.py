"""Workers on streams of their own, on a GPU: whoever is slow, everybody computes with finished numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_core.compile.gate import Gate
from dflash_core.events import EventLog
from dflash_core.session import open_session
from dflash_core.signals import StopSignals
from dflash_core.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SLEEP_CYCLES = 20_000_000  # about 10 ms
Prepare = Callable[[Trainer], None]


def masters(run: Any, name: str, prepare: Prepare = lambda trainer: None, **topology: Any) -> dict[str, torch.Tensor]:
    """The masters after 8 steps; `prepare` changes the trainer before it runs."""
    own = run.in_dir(name)
    own.change(
        target={"dtype": "float32"},
        train={"steps": 8, "dtype": "float32", "batches_per_step": 3, "attention": "reference", "eval_every": 4},
        topology={"targets": ["cuda:0"], "drafters": ["cuda:0"], "queue_size": 2, **topology},
    )
    session = open_session(own.config, own.config.topology.targets)
    with Gate() as gate:
        trainer = Trainer(session, gate, own.run_dir, EventLog(None), say=lambda line: None)
        prepare(trainer)
        trainer.run(StopSignals())
    return {name: master.detach().cpu() for name, master in trainer.optimizer.masters.items()}


def before(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` behind a pause of the stream it works on."""

    def slow(*arguments: Any) -> Any:
        torch.cuda._sleep(SLEEP_CYCLES)
        return function(*arguments)

    return slow


def behind(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, then a pause before anything is done with its result on that stream."""

    def slow(*arguments: Any) -> Any:
        result = function(*arguments)
        torch.cuda._sleep(SLEEP_CYCLES)
        return result

    return slow


def slow_targets(trainer: Trainer) -> None:
    for worker in trainer.pipeline.targets:
        worker._role = replace(worker._role, make_item=before(worker._role.make_item))


def slow_drafters(trainer: Trainer) -> None:
    for worker in trainer.pipeline.drafters:
        worker._role = replace(worker._role, micro_step=behind(before(worker._role.micro_step)))


def slow_update(trainer: Trainer) -> None:
    trainer.optimizer.step = before(trainer.optimizer.step)  # type: ignore[method-assign]
    trainer.optimizer.publish = before(trainer.optimizer.publish)  # type: ignore[method-assign]


@pytest.mark.parametrize("slow", [slow_targets, slow_drafters, slow_update])
def test_nobody_reads_what_is_not_finished(tiny_run: Any, slow: Prepare) -> None:
    several = {"targets": ["cuda:0"] * 2, "drafters": ["cuda:0"] * 3}
    plain = masters(tiny_run, "plain")
    for name, topology in (("one", {}), ("several", several)):
        late = masters(tiny_run, name, slow, **topology)
        for key, master in plain.items():
            assert (late[key] - master).norm() <= 1e-5 * master.norm(), (name, key)


def test_features_and_gradients_wait_for_nothing(tiny_run: Any) -> None:
    run = tiny_run.change(
        target={"dtype": "bfloat16"},
        train={"dtype": "bfloat16", "attention": "auto"},
        topology={"targets": ["cuda:0"], "drafters": ["cuda:0"]},
    )
    session = open_session(run.config, run.config.topology.targets)
    with Gate() as gate:
        trainer = Trainer(session, gate, run.run_dir, EventLog(None), say=lambda line: None)
        batches = session.train_stream().start()
        target, drafter = trainer.workforce.targets[0], trainer.workforce.drafters[0]
        drafter.micro_step(target.make_item(next(batches)))
        batch = next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            drafter.micro_step(target.make_item(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
