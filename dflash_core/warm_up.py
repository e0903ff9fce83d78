"""The warm-up stage: every worker's step once, in order, before a run pays for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dflash_core.compile.environment import configure_main, configure_thread
from dflash_core.compile.gate import Gate
from dflash_core.compile.warmup import alone, fingerprint, read_record, write_json, write_record
from dflash_core.config import RunConfig
from dflash_core.errors import WarmupError
from dflash_core.events import EventLog
from dflash_core.pipeline.control import Control, Stopped
from dflash_core.pipeline.failures import as_core_error
from dflash_core.pipeline.pipeline import Pipeline
from dflash_core.pipeline.rehearsal import RehearsalEntry
from dflash_core.session import open_session
from dflash_core.signals import StopRequested, StopSignals
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
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    found = fingerprint(compile_settings(config), [*config.topology.targets, *config.topology.drafters])
    with alone():
        record = read_record(found)
        if record is not None:
            say(f"already warm: {len(record['entries'])} steps took {record['seconds']:.1f} s when it was made")
        else:
            entries = _rehearse_all(config, events, signals or StopSignals(), say)
            record = write_record(found, [asdict(entry) for entry in entries])
            say(f"warm: {len(entries)} steps, {record['seconds']:.1f} s")
    write_json(run_dir / WARMUP_FILE, record)
    events.emit("warmup", digest=record["digest"], seconds=record["seconds"], steps=len(record["entries"]))
    return record


def needs_rehearsal(config: RunConfig) -> bool:
    """Whether anything is compiled at all: the reference attention on a CPU is not."""
    devices = [*config.topology.targets, *config.topology.drafters]
    return config.train.attention != "reference" or any(device != "cpu" for device in devices)


def compile_settings(config: RunConfig) -> dict[str, Any]:
    """The shapes and options that compiled code is specialised on."""
    settings = config.to_dict()
    settings["drafter"].pop("init_from")
    train = ("anchors_per_batch", "loss", "gamma", "dpace_alpha", "dtype", "attention")
    return {
        "target": settings["target"],
        "drafter": settings["drafter"],
        "topology": {name: settings["topology"][name] for name in ("targets", "drafters")},
        "tokens_per_batch": settings["data"]["tokens_per_batch"],
        "max_length": settings["data"]["max_length"],
        "train": {name: settings["train"][name] for name in train},
    }


def _rehearse_all(
    config: RunConfig, events: EventLog, signals: StopSignals, say: Callable[[str], None]
) -> list[RehearsalEntry]:
    session = open_session(config, config.topology.targets)
    control = Control()
    entries: list[RehearsalEntry] = []

    def note(entry: RehearsalEntry) -> None:
        entries.append(entry)
        events.emit("warmup_step", **asdict(entry))
        say(f"{entry.worker}  {entry.seconds:.2f} s  {entry.compiles} compiles")

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
        except Stopped:
            gate.abort("the warm-up has ended")
        finally:
            stuck = pipeline.close()
    if control.stop_signal is not None:
        raise StopRequested(control.stop_signal)
    if control.failure is not None:
        error = as_core_error(control.failure, saved="training was not started", stuck=stuck)
        raise WarmupError(error.what, error.why, error.fix) from control.failure.error
    return entries
