"""The gate's promises, each forced by events instead of timing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.callback import CallbackTrigger, callback_handler

from dflash_core.compile.environment import clone_code
from dflash_core.compile.gate import (
    REFUSED_MARK,
    CompileRefused,
    Gate,
    GateAborted,
    GateError,
    is_refusal,
)
from dflash_core.compile.rollback import Rollback

LIMIT = 30.0
ROOT = Path(__file__).parents[3]


class Worker:
    """A thread whose result or exception is collected by `result`."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.value: Any = None
        self._fn = fn
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.value = self._fn()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.thread.join(LIMIT)
        assert not self.thread.is_alive(), "the thread hangs"
        if self.error is not None:
            raise self.error
        return self.value


class Parked:
    """A step that says when it is inside and stays there until told to go."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> None:
        self.inside.set()
        assert self.go.wait(LIMIT)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "the expected state never came"
        time.sleep(0.001)


def waiting(gate: Gate, count: int) -> Callable[[], bool]:
    return lambda: gate.status()["waiting"] == count


def nothing() -> None:
    return None


def sum_of_sines(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).sin().sum()


def fresh_compiled(backend: str = "eager") -> Callable[[torch.Tensor], torch.Tensor]:
    """A compiled function with a code object of its own, so nothing is compiled yet."""
    return torch.compile(clone_code(sum_of_sines), backend=backend, dynamic=False)


def on_engine_thread(action: Callable[[], None]) -> str:
    """Run `action` on a real autograd engine thread: nested backwards move there below a certain depth."""
    ran_on: list[str] = []

    class Nest(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.depth == 0:
                ran_on.append(threading.current_thread().name)
                action()
            else:
                with torch.enable_grad():
                    Nest.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
            return grad, None

    Nest.apply(torch.ones(1, requires_grad=True), 70).backward()
    assert ran_on[0] != threading.current_thread().name
    return ran_on[0]


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate(stall_seconds=LIMIT) as gate:
        yield gate


# -- who is inside with whom ------------------------------------------------------------------------------------


def test_steps_overlap_without_the_gate() -> None:
    meet = threading.Barrier(2, timeout=LIMIT)
    for worker in [Worker(meet.wait), Worker(meet.wait)]:
        worker.result()


def test_first_steps_do_not_overlap(gate: Gate) -> None:
    first, second = Parked(), Parked()
    one = Worker(lambda: gate.run("shape", first))
    assert first.inside.wait(LIMIT)
    two = Worker(lambda: gate.run("shape", second))
    until(waiting(gate, 1))

    assert gate.status()["exclusive"]
    assert not second.inside.is_set()
    second.go.set()
    first.go.set()
    one.result(), two.result()
    assert second.inside.is_set()


def test_readers_share(gate: Gate) -> None:
    warm, meet = threading.Barrier(3, timeout=LIMIT), threading.Barrier(3, timeout=LIMIT)

    def work() -> None:
        gate.run("shape", nothing)
        warm.wait()
        gate.run("shape", meet.wait)

    for worker in [Worker(work) for _ in range(3)]:
        worker.result()


def test_a_warm_step_keeps_the_first_step_of_another_thread_out(gate: Gate) -> None:
    """What a lock around first steps does not do."""
    warm, cold = Parked(), Parked()
    cold.go.set()

    def warm_thread() -> None:
        gate.run("shape", nothing)
        gate.run("shape", warm)

    reader = Worker(warm_thread)
    assert warm.inside.wait(LIMIT)
    writer = Worker(lambda: gate.run("shape", cold))
    until(waiting(gate, 1))
    assert not cold.inside.is_set()
    warm.go.set()
    reader.result(), writer.result()


def test_writers_are_not_starved(gate: Gate) -> None:
    order: list[str] = []
    staying = Parked()

    def reader(name: str, step: Callable[[], None], start: threading.Event) -> None:
        gate.run("shape", nothing)
        ready.release()
        assert start.wait(LIMIT)
        gate.run("shape", step)

    ready, early, late = threading.Semaphore(0), threading.Event(), threading.Event()
    first = Worker(lambda: reader("first", staying, early))
    second = Worker(lambda: reader("second", lambda: order.append("reader"), late))
    assert ready.acquire(timeout=LIMIT) and ready.acquire(timeout=LIMIT)
    early.set()
    assert staying.inside.wait(LIMIT)
    writer = Worker(lambda: gate.run("shape", lambda: order.append("writer")))
    until(waiting(gate, 1))
    late.set()
    until(waiting(gate, 2))
    staying.go.set()
    first.result(), second.result(), writer.result()
    assert order == ["writer", "reader"]


@settings(max_examples=20)
@given(st.lists(st.lists(st.sampled_from("abc"), max_size=8), min_size=2, max_size=4))
def test_nobody_is_beside_a_thread_that_meets_a_key_for_the_first_time(plans: list[list[str]]) -> None:
    active: list[bool] = []  # of every step that is inside: is the key new to its thread?
    lock = threading.Lock()

    def step(new: bool) -> None:
        with lock:
            active.append(new)
            alone = len(active) == 1
            assert alone or not any(active), active
        time.sleep(0.0002)
        with lock:
            active.remove(new)

    def work(gate: Gate, plan: list[str]) -> None:
        seen: set[str] = set()
        for key in plan:
            new = key not in seen
            gate.run(key, lambda new=new: step(new))  # type: ignore[misc]
            seen.add(key)

    with Gate(stall_seconds=LIMIT) as gate:
        for worker in [Worker(lambda plan=plan: work(gate, plan)) for plan in plans]:  # type: ignore[misc]
            worker.result()
        assert gate.status() == {"exclusive": False, "inside": {}, "waiting": 0, "aborted": None}


# -- when a key is warm -----------------------------------------------------------------------------------------


def test_a_failed_first_step_is_not_warm(gate: Gate) -> None:
    def fail() -> None:
        raise ValueError("no batch")

    exclusive: list[bool] = []
    with pytest.raises(ValueError, match="no batch"):
        gate.run("shape", fail)
    for _ in range(2):
        gate.run("shape", lambda: exclusive.append(gate.status()["exclusive"]))
    assert exclusive == [True, False]


def test_a_failed_repeat_is_not_warm(gate: Gate) -> None:
    compiled = fresh_compiled()
    exclusive: list[bool] = []

    def step(size: int) -> None:
        exclusive.append(gate.status()["exclusive"])
        compiled(torch.ones(size))
        if exclusive[-1] and size == 5:
            raise ValueError("out of memory")

    gate.run("shape", lambda: step(3))
    with pytest.raises(ValueError, match="out of memory"):
        gate.run("shape", lambda: step(5))
    gate.run("shape", lambda: step(3))
    assert exclusive == [True, False, True, True]


def test_warmth_belongs_to_one_thread_and_one_key(gate: Gate) -> None:
    def exclusive(key: str) -> bool:
        return gate.run(key, lambda: bool(gate.status()["exclusive"]))

    assert [exclusive("a"), exclusive("a"), exclusive("b")] == [True, False, True]
    assert Worker(lambda: exclusive("a")).result()


# -- refused compiles -------------------------------------------------------------------------------------------


def test_a_late_compile_is_refused_before_it_traces_and_repeated_alone(gate: Gate) -> None:
    compiled = fresh_compiled("aot_eager")
    errors: list[Exception] = []
    exclusive: list[bool] = []

    def step(size: int) -> float:
        exclusive.append(gate.status()["exclusive"])
        try:
            return compiled(torch.ones(size)).item()
        except Exception as error:
            errors.append(error)
            assert not torch.compiler.is_compiling()
            assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
            assert torch.nn.Module.__call__ is torch.fx._symbolic_trace._orig_module_call
            assert compiled(torch.ones(3)).item() == small, "compiled code must still run after a refusal"
            raise

    small = gate.run("shape", lambda: step(3))
    assert (gate.compiles, gate.refused) == (1, 0)
    assert gate.run("shape", lambda: step(5)) == pytest.approx(5 * small / 3)

    assert (gate.compiles, gate.refused) == (2, 1)
    assert exclusive == [True, False, True]
    assert len(errors) == 1 and is_refusal(errors[0]) and "gate.run" in str(errors[0])
    gate.run("shape", lambda: step(5))
    assert (gate.compiles, gate.refused, exclusive[-1]) == (2, 1, False)


def test_a_refusal_that_the_step_swallows_is_repeated_too(gate: Gate) -> None:
    compiled = fresh_compiled()

    def step(size: int) -> float | None:
        try:
            return compiled(torch.ones(size)).item()
        except Exception:
            return None

    gate.run("shape", lambda: step(3))
    assert gate.run("shape", lambda: step(5)) is not None
    assert gate.refused == 1


class MicroStep:
    """Dropout from an own generator, an eager branch and a compiled branch into gradients that exist already."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        self.bias = torch.nn.Parameter(torch.full((6,), 0.5))
        self.weight.grad = torch.full((6,), 2.0)
        self.generator = torch.Generator().manual_seed(7)
        self.rollback = Rollback([self.weight, self.bias], [self.generator])
        self.compiled = fresh_compiled("aot_eager")

    def forward(self, size: int) -> torch.Tensor:
        self.rollback.note()
        keep = torch.rand(6, generator=self.generator) > 0.4
        compiled = self.compiled((self.weight * keep)[:size])
        return compiled + (self.bias * keep).square().sum()  # later in forward: its backward runs first

    def train(self, size: int = 6) -> torch.Tensor:
        loss = self.forward(size)
        loss.backward()
        return loss.detach()

    def state(self) -> tuple[torch.Tensor, ...]:
        assert self.weight.grad is not None and self.bias.grad is not None
        return self.weight.grad, self.bias.grad, self.generator.get_state()


@pytest.mark.parametrize("late", ["forward", "backward"])
def test_a_repeated_step_equals_one_that_was_never_refused(gate: Gate, late: str) -> None:
    plain, refused = MicroStep(), MicroStep()
    for micro in (plain, refused):  # the forward graph is compiled, its backward not yet
        gate.run(micro, lambda micro=micro: micro.forward(6 if late == "backward" else 5))  # type: ignore[misc]
    dirty: list[torch.Tensor | None] = []

    def undo() -> None:
        dirty.append(refused.bias.grad)
        refused.rollback.restore()

    loss = gate.run("a key of its own", plain.train)
    assert gate.refused == 0
    repeated = gate.run(refused, refused.train, on_refused=undo)

    assert gate.refused == 1
    assert len(dirty) == 1 and (dirty[0] is not None) == (late == "backward")
    assert torch.equal(repeated, loss)
    for left, right in zip(refused.state(), plain.state(), strict=True):
        assert torch.equal(left, right)


def test_rollback_keeps_the_storage_of_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    grad = parameter.grad = torch.full((3,), 2.0)
    rollback = Rollback([parameter])
    rollback.note()
    parameter.sum().backward()
    assert torch.equal(grad, torch.full((3,), 3.0))
    rollback.restore()
    assert parameter.grad is grad and torch.equal(grad, torch.full((3,), 2.0))


def test_strict_aborts_instead_of_repeating() -> None:
    compiled = fresh_compiled()
    with Gate(strict=True) as gate:
        gate.run("shape", lambda: compiled(torch.ones(3)))
        with pytest.raises(GateAborted, match="DYNAMO compile started on thread 'MainThread'"):
            gate.run("shape", lambda: compiled(torch.ones(5)))
        with pytest.raises(GateAborted):
            gate.run("other", nothing)


def test_a_compile_outside_the_gate_is_refused(gate: Gate) -> None:
    gate.run("shape", nothing)
    with pytest.raises(Exception, match="outside an exclusive step") as caught:
        fresh_compiled()(torch.ones(3))
    assert is_refusal(caught.value)


def test_a_foreign_thread_may_not_compile_during_an_exclusive_step(gate: Gate) -> None:
    compiled = fresh_compiled()
    holder = Parked()
    exclusive = Worker(lambda: gate.run("shape", holder))
    assert holder.inside.wait(LIMIT)
    with pytest.raises(Exception, match="outside an exclusive step"):
        compiled(torch.ones(3))
    holder.go.set()
    exclusive.result()


@pytest.mark.parametrize("known", [False, True])
def test_a_compile_on_an_engine_thread_belongs_to_the_step_that_runs(gate: Gate, known: bool) -> None:
    """As lazy backward compiles on CUDA do: legal in an exclusive step, refused in a shared one."""
    compiled = fresh_compiled()
    if known:
        gate.run("shape", nothing)
    gate.run("shape", lambda: on_engine_thread(lambda: compiled(torch.ones(3))))
    assert (gate.compiles, gate.refused) == (1, int(known))


def test_the_sentinel_survives_a_dynamo_reset(gate: Gate) -> None:
    compiled = fresh_compiled()
    gate.run("shape", lambda: compiled(torch.ones(3)))
    torch._dynamo.reset()
    gate.run("shape", lambda: compiled(torch.ones(3)))
    assert (gate.compiles, gate.refused) == (2, 1)


def test_compiles_after_the_barrier_are_counted(gate: Gate) -> None:
    compiled = fresh_compiled()
    gate.run("shape", lambda: compiled(torch.ones(3)))
    assert gate.compiles_since_warm == 0
    gate.mark_warm()
    gate.run("shape", lambda: compiled(torch.ones(3)))
    assert (gate.compiles_at_barrier, gate.compiles_since_warm) == (1, 0)
    gate.run("late shape", lambda: compiled(torch.ones(5)))
    assert gate.compiles_since_warm == 1


def test_cuda_graph_recording_is_turned_down_in_words(gate: Gate) -> None:
    def record() -> None:
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"):
            pytest.fail("the recording began")

    with pytest.raises(GateError, match="max-autotune-no-cudagraphs"):
        gate.run("shape", record)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_real_recording_never_begins(gate: Gate) -> None:
    compiled = torch.compile(clone_code(sum_of_sines), mode="reduce-overhead", dynamic=False)

    def steps() -> None:
        for _ in range(3):  # torch records after a first call
            compiled(torch.ones(64, device="cuda"))

    with pytest.raises(GateError, match="max-autotune-no-cudagraphs"):
        gate.run("shape", steps)


def chained(how: str) -> Exception:
    refusal = CompileRefused("no")
    if how == "text":
        return RuntimeError(f"CompileRefused: {REFUSED_MARK} a DYNAMO compile")
    try:
        try:
            raise refusal
        except CompileRefused as error:
            if how == "context":
                raise ValueError("while handling") from None
            raise ValueError("because") from error
    except ValueError as error:
        outer = RuntimeError("outer")
        outer.__cause__ = error
        return outer


@pytest.mark.parametrize("how", ["text", "context", "cause"])
def test_a_refusal_is_recognised_through_what_wraps_it(how: str) -> None:
    assert is_refusal(chained(how))


def test_other_errors_are_not_refusals() -> None:
    loop, other = RuntimeError("a"), RuntimeError("b")
    loop.__cause__, other.__cause__ = other, loop
    assert not is_refusal(loop)


# -- failure and misuse -----------------------------------------------------------------------------------------


def test_abort_wakes_every_waiter(gate: Gate) -> None:
    holder, start, warm = Parked(), threading.Event(), threading.Semaphore(0)

    def reader() -> None:
        gate.run("shape", nothing)
        warm.release()
        assert start.wait(LIMIT)
        gate.run("shape", nothing)

    reading = Worker(reader)
    assert warm.acquire(timeout=LIMIT)
    holding = Worker(lambda: gate.run("shape", holder))
    assert holder.inside.wait(LIMIT)
    writing = Worker(lambda: gate.run("shape", nothing))
    start.set()
    until(waiting(gate, 2))
    gate.abort("worker 2 died")
    gate.abort("a later reason")
    for worker in (reading, writing):
        with pytest.raises(GateAborted, match="worker 2 died"):
            worker.result()
    with pytest.raises(GateAborted, match="worker 2 died"):
        gate.run("shape", nothing)
    holder.go.set()
    holding.result()  # a running step ends as it would have


def test_no_wait_is_unbounded() -> None:
    holder = Parked()
    with Gate(stall_seconds=0.2) as gate:
        holding = Worker(lambda: gate.run("a very long step", holder))
        assert holder.inside.wait(LIMIT)
        with pytest.raises(GateAborted, match="a very long step"):
            gate.run("shape", nothing)
        holder.go.set()
        holding.result()


def test_nested_use_raises_and_leaves_the_gate_usable(gate: Gate) -> None:
    for key in ("shape", "shape"):  # exclusive, then shared
        with pytest.raises(GateError, match="inside a step"):
            gate.run("shape", lambda: gate.run(key, nothing))  # noqa: B023
        gate.run("shape", nothing)
    assert gate.status()["inside"] == {}


def test_use_on_an_engine_thread_raises(gate: Gate) -> None:
    with pytest.raises(GateError, match="backward pass"):
        on_engine_thread(lambda: gate.run("shape", nothing))


def test_use_in_a_backward_hook_raises(gate: Gate) -> None:
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: gate.run("shape", nothing))
    with pytest.raises(GateError, match="backward pass"):
        leaf.sum().backward()


def test_two_gates_in_one_process_are_refused(gate: Gate) -> None:
    with pytest.raises(GateError, match="another gate"):
        Gate().run("shape", nothing)
    gate.uninstall()
    with Gate() as second:
        second.run("shape", nothing)


def test_a_straggler_does_not_arm_an_aborted_gate(gate: Gate) -> None:
    gate.abort("a worker died")
    gate.uninstall()
    with pytest.raises(GateAborted, match="a worker died"):
        gate.run("shape", nothing)
    with Gate() as second:
        second.run("shape", nothing)


def test_importing_the_module_does_not_import_torch() -> None:
    modules = "dflash_core.compile.gate, dflash_core.compile.environment, dflash_core.compile.rollback"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
