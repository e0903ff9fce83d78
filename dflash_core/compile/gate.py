"""A read/write gate around whole training steps, so that nothing runs while torch compiles.

`torch.compile` is not thread-safe: while one thread traces, process-wide state of torch is changed, and
every other thread that merely *calls* compiled (or some eager) code can fail. A lock around the compiling
call cannot help, because the victim does not compile. The gate separates steps instead:

* a step for a key which this thread has not finished yet runs alone, since it may compile;
* steps for known keys run side by side;
* a compile that starts while no step runs alone is refused before it traces, and that step is repeated alone.

`docs/compile-race.md` explains the mechanism. torch is imported on first use, not with this module.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

REFUSED_MARK = "[compile refused by the gate]"


class GateError(RuntimeError):
    """The gate was used in a way that could deadlock or let a compile slip through."""


class GateAborted(RuntimeError):
    """The gate was shut; the message is the reason given to `Gate.abort`."""


class CompileRefused(RuntimeError):
    """Raised inside torch's compile entry when a compile starts outside an exclusive step."""


class _ThreadState(threading.local):
    """What one thread knows about itself; `threading.local` calls `__init__` once per thread."""

    def __init__(self) -> None:
        self.warm: set[Hashable] = set()
        self.inside = False
        self.refused = False


class Gate:
    """Readers/writer gate with queued writers first, and a sentinel on torch's compile entry.

    One gate per process. Every thread that runs torch code does so through `run`, on the outermost level.
    Waiting for another worker (queues, barriers, gradient exchange) belongs outside a step.

    Args:
        strict: a refused compile aborts the gate instead of being repeated.
        stall_seconds: no thread waits longer than this without any step entering or leaving; then the gate
            aborts and names the threads inside. Longer than the longest single step including its compile.

    Attributes:
        compiles: compiles that started inside an exclusive step.
        refused: compiles that were refused.
        compiles_at_barrier: value of `compiles` at `mark_warm`, None before.
    """

    def __init__(self, strict: bool = False, *, stall_seconds: float = 1800.0) -> None:
        self.strict = strict
        self.stall_seconds = stall_seconds
        self.compiles = 0
        self.refused = 0
        self.compiles_at_barrier: int | None = None
        self._condition = threading.Condition()
        self._inside: dict[int, Hashable] = {}
        self._exclusive = False
        self._writers: deque[int] = deque()
        self._waiting = 0
        self._moved = 0.0
        self._reason: str | None = None
        self._state = _ThreadState()
        self._handler: Any = None
        self._graph_task_id: Callable[[], int] = lambda: -1
        self._sentinel = self._on_compile_start  # one bound method, so that it is found again by identity

    # -- steps ---------------------------------------------------------------------------------------------

    def run(self, key: Hashable, fn: Callable[[], T], *, on_refused: Callable[[], None] | None = None) -> T:
        """Run `fn` as one step and return its result.

        The step is exclusive until this thread has finished one step for `key`, shared afterwards. `key` is
        everything that compiled code is specialised on: shapes, dtype, train or eval, options. If a compile
        is refused, what the step returned or raised is dropped, and `on_refused` and `fn` run in an
        exclusive step.

        Args:
            on_refused: undoes what the dropped attempt did (see `rollback.Rollback`). Without it `fn` must
                be safe to run twice.

        Raises:
            GateAborted: the gate was aborted before or while waiting, or strict mode refused a compile.
            GateError: called inside a step, or from a backward pass (hook, custom backward, recompute).
        """
        state = self._state
        self._check_caller(state)
        repeat = key in state.warm
        if repeat:
            self._enter(key, exclusive=False)
            state.inside, state.refused = True, False
            try:
                result = fn()
                if not state.refused:  # a refusal that `fn` swallowed is still one
                    return result
            except Exception as error:
                if not (state.refused or is_refusal(error)):
                    raise
            finally:
                state.inside = False
                self._leave()
            state.warm.discard(key)
        return self._run_exclusive(state, key, fn, on_refused if repeat else None)

    def _run_exclusive(
        self, state: _ThreadState, key: Hashable, fn: Callable[[], T], undo: Callable[[], None] | None
    ) -> T:
        self._enter(key, exclusive=True)
        state.inside = True
        try:
            if undo is not None:
                undo()
            result = fn()
            state.warm.add(key)  # only after a whole step, so that its backward has been compiled too
            return result
        finally:
            state.inside = False
            self._leave()

    def abort(self, reason: str) -> None:
        """Shut the gate for good: every waiting and every later `run` raises `GateAborted`.

        The first `reason` wins. Steps that are running end as they would have.
        """
        with self._condition:
            if self._reason is None:
                self._reason = reason
            self._condition.notify_all()

    def mark_warm(self) -> None:
        """Note the barrier after warm-up; from here on `compiles_since_warm` must stay 0."""
        self.compiles_at_barrier = self.compiles

    @property
    def compiles_since_warm(self) -> int:
        """Compiles after `mark_warm`; 0 before it."""
        return 0 if self.compiles_at_barrier is None else self.compiles - self.compiles_at_barrier

    def status(self) -> dict[str, Any]:
        """Who is in a step and who waits: `exclusive`, `inside` (thread name: key), `waiting`, `aborted`."""
        with self._condition:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            return {
                "exclusive": self._exclusive,
                "inside": {names.get(ident, str(ident)): key for ident, key in self._inside.items()},
                "waiting": self._waiting,
                "aborted": self._reason,
            }

    # -- the lock ------------------------------------------------------------------------------------------

    def _check_caller(self, state: _ThreadState) -> None:
        if self._handler is None:
            self.install()
        if state.inside:
            raise GateError("gate.run was called inside a step of this thread; take it once, outermost")
        if self._graph_task_id() != -1:
            raise GateError(
                "gate.run was called from a backward pass (hook, custom backward or recompute); on an engine "
                "thread it would wait for the very step that waits for that backward"
            )

    def _enter(self, key: Hashable, *, exclusive: bool) -> None:
        me = threading.get_ident()
        with self._condition:
            self._arm()
            if exclusive:
                self._writers.append(me)
                try:
                    self._wait_until(lambda: self._writers[0] == me and not self._inside)
                finally:
                    self._writers.remove(me)
                    self._condition.notify_all()
            elif self._reason is not None or self._exclusive or self._writers:
                self._wait_until(lambda: not self._exclusive and not self._writers)
            self._exclusive = exclusive
            self._inside[me] = key
            self._moved = time.monotonic()

    def _leave(self) -> None:
        with self._condition:
            del self._inside[threading.get_ident()]
            self._exclusive = False
            self._moved = time.monotonic()
            if self._waiting:
                self._condition.notify_all()

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        self._waiting += 1
        try:
            while self._reason is None and not ready():
                left = self._moved + self.stall_seconds - time.monotonic()
                if left <= 0:
                    self.abort(f"no step entered or left for {self.stall_seconds:g} s: {self.status()}")
                else:
                    self._condition.wait(left)
        finally:
            self._waiting -= 1
        if self._reason is not None:
            raise GateAborted(self._reason)

    # -- the sentinel --------------------------------------------------------------------------------------

    def install(self) -> None:
        """Arm the sentinel.

        `run` does so by itself, and again at every step, because `torch._dynamo.reset` disarms it.

        Raises:
            GateError: another gate is armed in this process.
            GateAborted: the gate was aborted.
        """
        import torch
        from torch._dynamo.callback import callback_handler

        with self._condition:
            if self._reason is not None:  # a straggler must not arm a gate that others have left behind
                raise GateAborted(self._reason)
            self._handler = callback_handler
            self._graph_task_id = torch._C._current_graph_task_id
            self._arm()

    def _arm(self) -> None:
        armed = self._handler.start_callbacks
        if self._sentinel in armed:
            return
        if any(isinstance(getattr(callback, "__self__", None), Gate) for callback in armed):
            self._handler = None
            raise GateError("another gate is armed in this process, and two gates exclude nobody")
        self._handler.register_start_callback(self._sentinel)

    def uninstall(self) -> None:
        """Disarm the sentinel. The threads that use the gate have been joined by now."""
        with self._condition:
            if self._handler is not None and self._sentinel in self._handler.start_callbacks:
                self._handler.remove_start_callback(self._sentinel)
            self._handler = None

    def __enter__(self) -> Gate:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _on_compile_start(self, args: Any) -> None:
        """Called by torch before a compile or a CUDA graph recording begins, on the thread that does it."""
        trigger = args.callback_trigger.name
        state = self._state
        # On CUDA the backward compiles on an engine thread, which is not the one that entered the step.
        ours = state.inside or self._graph_task_id() != -1
        with self._condition:
            if trigger == "CUDAGRAPH_RECORDING":
                raise GateError(
                    "a step tried to record a CUDA graph; its pools and capture state belong to one thread. "
                    "Use mode='max-autotune-no-cudagraphs' or no mode in worker threads"
                )
            if self._exclusive and ours:
                self.compiles += 1
                return
            self.refused += 1
            state.refused = True
        where = f"thread {threading.current_thread().name!r}"
        message = f"{REFUSED_MARK} a {trigger} compile started on {where} outside an exclusive step"
        if self.strict:
            self.abort(message)
        raise CompileRefused(f"{message}; warm this shape up first, or call it through gate.run")


def is_refusal(error: BaseException) -> bool:
    """Whether `error` is, or was caused by, a refused compile.

    Dynamo wraps what its callbacks raise and drops the cause, so the text counts as well as the chain.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        if isinstance(link, CompileRefused) or REFUSED_MARK in str(link):
            return True
        seen.add(id(link))
        pending += [link.__cause__, link.__context__]
    return False
