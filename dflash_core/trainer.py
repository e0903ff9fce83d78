"""The training loop: begin reading at `Trainer._loop`.

Worker threads make features and gradients (`dflash_core.pipeline`); this thread owns the optimizer, the schedule and
everything that is written. A step is: wait for the summed gradient of its micro-batches, update the fp32 masters, copy
them to the replicas, let the drafters go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path

import torch

from dflash_core.compile.counting import cache_misses, count_kernels
from dflash_core.compile.environment import compile_home, configure_main, configure_thread, describe
from dflash_core.compile.gate import Gate
from dflash_core.config import RunConfig
from dflash_core.data.packing import PackedBatch, StreamState
from dflash_core.drafter import save_drafter
from dflash_core.errors import CoreError
from dflash_core.events import EventLog
from dflash_core.heldout import HeldOut
from dflash_core.optim import MasterAdamW, lr_at
from dflash_core.pipeline.control import Control, Stopped
from dflash_core.pipeline.failures import as_core_error, not_finite
from dflash_core.pipeline.pipeline import STALL_SECONDS, Pipeline
from dflash_core.pipeline.reducer import MicroResult
from dflash_core.pipeline.rehearsal import RehearsalEntry
from dflash_core.progress import Progress
from dflash_core.resume import open_state
from dflash_core.session import Session, open_session
from dflash_core.signals import StopRequested, StopSignals
from dflash_core.training_state import TrainState, generator_states, write_checkpoint
from dflash_core.warmth import Filling, filling, needs_rehearsal, refuse_cold
from dflash_core.workforce import build_workforce


def train(
    config: RunConfig,
    run_dir: Path,
    events: EventLog,
    *,
    resume: bool = False,
    require_warm: bool = False,
    signals: StopSignals | None = None,
    say: Callable[[str], None] = print,
) -> TrainState:
    """Train until the budget ends and leave a checkpoint in `run_dir`; returns the final state.

    `resume` continues from the newest checkpoint, or begins when there is none. `require_warm` refuses a cold compile
    cache, with WarmupError, instead of filling it. Raises CoreError (WorkerError for a failed worker), and
    StopRequested after a signal; both leave a checkpoint of the last finished step where possible.
    """
    configure_main()
    count_kernels()
    events.emit("environment", **describe(compile_home()))
    if require_warm:
        refuse_cold(config)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    session = open_session(config, config.topology.targets)
    with Gate(stall_seconds=2 * STALL_SECONDS) as gate:
        trainer = Trainer(session, gate, run_dir, events, resume=resume, say=say)
        return trainer.run(signals or StopSignals())


class Trainer:
    """One run in one process. `stall_s`: seconds without any result after which a worker counts as stalled."""

    def __init__(
        self,
        session: Session,
        gate: Gate,
        run_dir: Path,
        events: EventLog,
        *,
        resume: bool = False,
        say: Callable[[str], None] = print,
        stall_s: float = STALL_SECONDS,
    ) -> None:
        self.session = session
        self.settings = session.config.train
        self.control = Control()
        self._gate = gate
        self._run_dir = run_dir
        self._events = events
        self._say = say
        drafter = session.initial_drafter()
        devices = session.config.topology.drafters
        self.optimizer = MasterAdamW(
            drafter.named_parameters(),
            device=devices[0],
            compute_dtype=getattr(torch, self.settings.dtype),
            betas=self.settings.betas,
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
        )
        self._stream = stream = session.train_stream()
        self.state, self._budget = open_state(session, run_dir, stream, self.optimizer, events, resume=resume)
        self._saved_step = self.state.step
        self._measured_step = self.state.step if self.state.step > 0 else -1
        self._updating = False
        self._store = session.feature_store()
        self.workforce = build_workforce(session, drafter, gate, self._store)
        self._publish()
        self._gradients = self.optimizer.gradient_buffers()
        self.pipeline = self._build_pipeline(stream.start(StreamState.from_dict(self.state.stream)), stall_s)
        self._progress = Progress(self.pipeline, self._budget, events, say)

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self, signals: StopSignals) -> TrainState:
        """Train to the end of the budget; see `train`."""
        self._started = time.monotonic() - self.state.elapsed_s
        try:
            with signals.orderly(self.control.request_stop):
                self._start()
                self._loop()
        except Stopped:
            pass  # why is in the control, see _conclude
        except Exception as error:
            self.control.fail("trainer", error, step=self.state.step + 1)
        finally:
            if self.control.failure is not None:
                self._gate.abort("the run has failed")
            stuck = self.pipeline.close()
        self._progress.report_data(self._stream, self._store)
        self._progress.report_compiles(self._gate)
        return self._conclude(stuck)

    def _start(self) -> None:
        state = "nothing to compile"
        if needs_rehearsal(self.session.config):
            with filling(self.session.config, poll=self.control.check, say=self._say) as cache:
                state = cache.validity.state
                self.pipeline.start(on_rehearsed=partial(self._on_rehearsed, cache))
                self.pipeline.wait_rehearsed()
        else:
            self.pipeline.start()
        self._held_out = HeldOut.prepare(self.session, self._gate, self._store, check=self.control.check)
        if self._held_out is not None:
            self._held_out.rehearse(self.workforce.replicas[0], self.workforce.heads[0], self._gate)
        self._gate.mark_warm()
        self._events.emit("warm", state=state, compiles=self._gate.compiles, misses=cache_misses())
        if self.state.step == 0:
            self._measure()

    def _on_rehearsed(self, cache: Filling, entry: RehearsalEntry) -> None:
        noted = cache.note(entry)
        self._events.emit("warmup_step", **noted)
        self._say(
            f"warm-up of {entry.worker}: {entry.seconds:.1f} s, {entry.compiles} compiles, "
            f"{noted['misses']} not in the cache"
        )

    def _loop(self) -> None:
        state, settings = self.state, self.settings
        self._progress.begin()
        while self._budget.ended_by(state.step, began := self._elapsed()) is None:
            results = self.pipeline.wait_step()
            idle = any((state.step + 1) % every == 0 for every in (settings.eval_every, settings.checkpoint_every))
            self._update(results, self._budget.progress(state.step, began), then_idle=idle)
            if state.step == 1 or state.step % settings.log_every == 0:
                self._report()
            if state.step % settings.eval_every == 0:
                self._measure()
            if state.step % settings.checkpoint_every == 0:
                self._checkpoint()
            if idle:
                self.pipeline.open_next()
        self._report()
        self._measure()
        self._checkpoint()

    def _update(self, results: Sequence[MicroResult], progress: float, *, then_idle: bool) -> None:
        """One optimizer step, `progress` along the schedule, from the gradients that the drafters have summed.

        Unless they shall be idle, the drafters go on before this thread looks at the norm: on a GPU that is its only
        wait, and their next work then queues up behind the new weights, or behind the old ones that were left alone.
        """
        state, settings = self.state, self.settings
        sums = reduce(add, [result.sums.to(self._gradients[0].device) for result in results])
        lr = lr_at(progress, peak=settings.lr, warmup_ratio=settings.warmup_ratio, min_lr_ratio=settings.min_lr_ratio)
        step = partial(self.optimizer.step, self._gradients, divisor=sums.loss_den, lr=lr, clip=settings.clip)
        self._updating = True
        busy = self.pipeline.busy[self.session.config.topology.drafters[0]]
        norm = self._gate.run("optimizer", busy.timed(step))
        self._gate.run("publish", self._publish)
        if not then_idle:
            self.pipeline.open_next()
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            self._updating = False  # the optimizer has refused, so the state is that of the step before
            self.control.fail(*not_finite(results, fallback="trainer"), step=state.step + 1)
            raise Stopped
        state.step += 1
        state.progress = progress
        state.stream = results[-1].batch.next_state.to_dict()
        state.samples_seen += sum(len(result.batch.sample_ids) for result in results)
        state.tokens_seen += sum(result.batch.num_tokens for result in results)
        self._updating = False
        self._progress.add(results, sums, lr=lr, grad_norm=grad_norm)

    def _publish(self) -> None:
        for drafter in self.workforce.replicas:
            self.optimizer.publish(drafter)

    def _build_pipeline(self, batches: Iterator[PackedBatch], stall_s: float) -> Pipeline:
        state, per_step = self.state, self.settings.batches_per_step
        first = state.stream["sequence"]
        return Pipeline(
            control=self.control,
            gate=self._gate,
            batches=batches,
            targets=self.workforce.targets,
            drafters=self.workforce.drafters,
            gradient_buffers=self._gradients,
            batches_per_step=per_step,
            queue_size=self.session.config.topology.queue_size,
            first=first,
            end=first + max(0, self._budget.total_steps - state.step) * per_step,
            stall_s=stall_s,
            on_thread_start=configure_thread,
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _report(self) -> None:
        self._progress.report(self.state, self._elapsed(), compiles=self._gate.compiles_since_warm)

    def _measure(self) -> None:
        """Teacher-forced evaluation on the held-out blocks, once per step."""
        state = self.state
        if self._held_out is None or self._measured_step == state.step:
            return
        with self._progress.paused():
            sums = self._held_out.measure(self.workforce.replicas[0], self.workforce.heads[0], self._gate)
        self._measured_step = state.step
        self._progress.report_held_out(state.step, sums)

    def _checkpoint(self) -> None:
        """Write the state of the last finished step, once per step."""
        state = self.state
        if self._saved_step == state.step:
            return
        state.elapsed_s = self._elapsed()
        with self._progress.paused():
            path = write_checkpoint(
                self._run_dir,
                state,
                self.optimizer.state_tensors() | generator_states(),
                save_drafter=partial(save_drafter, self.workforce.replicas[0]),
                keep=self.settings.keep_checkpoints,
            )
        self._saved_step = state.step
        self._events.emit("checkpoint", step=state.step, path=path)

    # -- the end -----------------------------------------------------------------------------------------------

    def _conclude(self, stuck: list[str]) -> TrainState:
        control, state = self.control, self.state
        if control.failure is not None:
            raise as_core_error(control.failure, saved=self._rescue(), stuck=stuck) from control.failure.error
        if control.stop_signal is not None:
            raise StopRequested(control.stop_signal, f"; {self._rescue()}")
        return state

    def _rescue(self) -> str:
        """Save the last finished step if it can be saved; says in words what a resume will find."""
        if self._updating:
            return f"the failed update left no clean state, a resume begins at step {self._saved_step}"
        try:
            self._checkpoint()
        except (CoreError, RuntimeError) as error:
            return f"step {self.state.step} could not be saved ({error}), a resume begins at step {self._saved_step}"
        return f"a resume begins at step {self._saved_step}"
