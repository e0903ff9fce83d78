"""The warm-up stage: every worker's step once, in order, before a run pays for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash_core.compile.counting import count_kernels
from dflash_core.compile.environment import compile_home, configure_main, configure_thread, describe
from dflash_core.compile.gate import Gate
from dflash_core.compile.warmup import write_json
from dflash_core.config import RunConfig
from dflash_core.errors import WarmupError
from dflash_core.events import EventLog
from dflash_core.heldout import HeldOut
from dflash_core.pipeline.control import Control, Stopped
from dflash_core.pipeline.failures import as_core_error
from dflash_core.pipeline.pipeline import Pipeline
from dflash_core.pipeline.rehearsal import RehearsalEntry, timed_entry
from dflash_core.session import open_session
from dflash_core.signals import StopRequested, StopSignals
from dflash_core.warmth import Filling, filling
from dflash_core.workforce import build_workforce

WARMUP_FILE = "warmup.json"


def warm_up(
    config: RunConfig,
    run_dir: Path,
    events: EventLog,
    *,
    signals: StopSignals | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Warm the compile cache for `config` and write `warmup.json`; does nothing when the cache is warm already.

    Raises WarmupError that names the worker, CoreError when the run cannot be built, StopRequested after a signal.
    """
    configure_main()
    count_kernels()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    events.emit("environment", **describe(compile_home()))
    with filling(config, say=say) as cache:
        if not cache.is_warm:
            _rehearse_all(config, events, cache, signals or StopSignals(), say)
    assert cache.record is not None
    record = dict(cache.record)
    steps, seconds = len(record["entries"]), record["seconds"]
    made = f"{steps} steps took {seconds:.1f} s"
    say(f"already warm: {made} when it was made" if cache.is_warm else f"warm: {made}")
    write_json(run_dir / WARMUP_FILE, record)
    events.emit(
        "warmup",
        digest=record["digest"],
        seconds=seconds,
        steps=steps,
        state=cache.validity.state,
        changes=cache.validity.changes,
    )
    return record


def _rehearse_all(
    config: RunConfig, events: EventLog, cache: Filling, signals: StopSignals, say: Callable[[str], None]
) -> None:
    session = open_session(config, config.topology.targets)
    control = Control()
    held_out = f"held-out ({config.topology.drafters[0]})"

    def note(entry: RehearsalEntry) -> None:
        noted = cache.note(entry)
        events.emit("warmup_step", **noted)
        say(f"{entry.worker}  {entry.seconds:.2f} s  {entry.compiles} compiles, {noted['misses']} not in the cache")

    with Gate() as gate:
        workforce = build_workforce(session, session.initial_drafter(), gate, None)
        pipeline = Pipeline(
            control=control,
            gate=gate,
            batches=iter(()),
            targets=workforce.targets,
            drafters=workforce.drafters,
            gradient_buffers=[],
            batches_per_step=1,
            queue_size=1,
            first=0,
            end=0,
            on_thread_start=configure_thread,
        )
        try:
            with signals.orderly(control.request_stop):
                pipeline.start(on_rehearsed=note)
                pipeline.wait_rehearsed()
                if config.data.heldout:
                    rehearse = partial(HeldOut.synthetic(session).rehearse, workforce.replicas[0], workforce.heads[0])
                    note(timed_entry(held_out, gate, partial(rehearse, gate)))
        except Stopped:
            gate.abort("the warm-up has ended")
        except Exception as failure:
            control.fail(held_out, failure, step=None)
        finally:
            stuck = pipeline.close()
    if control.stop_signal is not None:
        raise StopRequested(control.stop_signal)
    if control.failure is not None:
        failed = as_core_error(control.failure, saved="training was not started", stuck=stuck)
        raise WarmupError(failed.what, failed.why, failed.fix) from control.failure.error
