"""Deterministic interleavings of two threads around a trace: no timing, so each either always fails or never.

    python interleavings.py none|first|gate|globals

Every scenario has a tracer, which stops inside a trace, and a victim, which has done the same step before.
While the tracer stands there, the victim takes its next step. Modes: `none` no protection, `first` a lock around
each thread's first step, `gate` every step through the gate. `globals` reports which state of torch other
threads can see. Prints one JSON object. Start it with fresh compile cache folders.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.fx.traceback
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

from dflash_core.compile.environment import configure_main, configure_thread
from dflash_core.compile.gate import Gate

LIMIT = 60.0
Step = Callable[[], object]
Door = Callable[[str, Step], object]


class Park:
    """A place inside a step where a thread can be made to stand still."""

    def __init__(self) -> None:
        self.armed = False
        self.reached = threading.Event()
        self.go = threading.Event()

    def stop(self) -> None:
        if self.armed and not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(LIMIT), "nobody said go"


class ParkAtArgsort(TorchFunctionMode):
    """Stops the thread that entered this mode in the middle of eager `create_block_mask`."""

    def __init__(self, park: Park) -> None:
        super().__init__()
        self.park = park

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.argsort:
            self.park.stop()
        return func(*args, **(kwargs or {}))


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def block_mask() -> object:
    return create_block_mask(causal, 1, 1, 128, 128, device="cpu")


# -- tracers: each gives a step that stops inside a trace -------------------------------------------------------


def plain_trace(park: Park) -> Step:
    """fx.symbolic_trace outside a compile, as an export or a quantiser does."""

    def traced(x: Any) -> Any:
        park.stop()
        return x + 1

    return lambda: torch.fx.symbolic_trace(traced)


def compile_with_plain_trace(park: Park) -> Step:
    """A compile whose backend runs fx.symbolic_trace, as Inductor's bounds analysis does once per process."""
    trace = plain_trace(park)

    def backend(graph: Any, example_inputs: Any) -> Any:
        trace()
        return graph

    compiled = torch.compile(lambda x: x * 3, backend=backend, dynamic=False)
    return lambda: compiled(torch.ones(3))


def compile_joint(park: Park) -> Step:
    """A training compile that stops in the joint trace of forward and backward."""
    operator = _parking_operator(park)
    compiled = torch.compile(lambda x: operator(x * 3).sum(), backend="aot_eager", dynamic=False)
    return lambda: compiled(torch.ones(3, requires_grad=True)).backward()


def _inside_fx_trace() -> bool:
    trace = inspect.unwrap(torch.fx.Tracer.trace).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not trace:
        frame = frame.f_back
    return frame is not None


def _parking_operator(park: Park) -> Any:
    @torch.library.custom_op(f"race::park_{id(park)}", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def fake(x: torch.Tensor) -> torch.Tensor:
        if _inside_fx_trace():  # this is also called by Dynamo and while collecting metadata
            park.stop()
        return torch.empty_like(x)

    operator.register_fake(fake)
    operator.register_autograd(lambda ctx, grad: grad)
    return operator


# -- victims ----------------------------------------------------------------------------------------------------


def compiled_call(park: Park) -> Step:
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    return lambda: compiled(torch.ones(3))


def eager_linear(park: Park) -> Step:
    layer = torch.nn.Linear(4, 4)
    return lambda: layer(torch.ones(1, 4))


def eager_block_mask(park: Park) -> Step:
    def step() -> None:
        with ParkAtArgsort(park):
            block_mask()

    return step


SCENARIOS: dict[str, tuple[Callable[[Park], Step], Callable[[Park], Step]]] = {
    "compiled call during a plain trace": (plain_trace, compiled_call),
    "compiled call during a compile": (compile_joint, compiled_call),
    "eager nn.Linear during a compile": (compile_with_plain_trace, eager_linear),
    "eager create_block_mask during a compile": (compile_joint, eager_block_mask),
    # Last, because unprotected it leaves nn.Module patched for the rest of the process.
    "a second trace during a plain trace": (plain_trace, plain_trace),
}


# -- protection -------------------------------------------------------------------------------------------------


def unprotected(name: str, step: Step) -> object:
    return step()


def first_step_lock() -> Door:
    lock = threading.Lock()
    known = threading.local()

    def door(name: str, step: Step) -> object:
        if hasattr(known, "warm"):
            return step()
        with lock:
            result = step()
        known.warm = True
        return result

    return door


def interleave(scenario: str, door: Door, waiting: Callable[[], int]) -> dict[str, Any]:
    """Run one scenario; `waiting()` is the number of threads that stand before the door."""
    make_tracer, make_victim = SCENARIOS[scenario]
    trace_park, victim_park = Park(), Park()
    outcome: dict[str, Any] = {}
    warmed, second = threading.Event(), threading.Event()

    def attempt(role: str, step: Step) -> None:
        try:
            door(role, step)
            outcome[role] = "ok"
        except Exception as error:
            outcome[role] = f"{type(error).__name__}: {error}"

    def victim_thread() -> None:
        configure_thread()
        step = make_victim(victim_park)
        door("victim", step)
        warmed.set()
        assert second.wait(LIMIT)
        victim_park.armed = True
        attempt("victim", step)

    def tracer_thread() -> None:
        configure_thread()
        trace_park.armed = True
        attempt("tracer", make_tracer(trace_park))

    victim, tracer = threading.Thread(target=victim_thread), threading.Thread(target=tracer_thread)
    victim.start()
    assert warmed.wait(LIMIT), "the victim's first step failed"
    tracer.start()
    assert trace_park.reached.wait(LIMIT), f"the tracer never reached its trace: {outcome}"
    second.set()
    deadline = time.monotonic() + LIMIT
    while not ("victim" in outcome or victim_park.reached.is_set() or waiting()):
        assert time.monotonic() < deadline, "the victim neither ran nor waits"
        time.sleep(0.002)
    outcome["met"] = not waiting()
    trace_park.go.set()
    tracer.join(LIMIT)
    victim_park.go.set()
    victim.join(LIMIT)
    assert not tracer.is_alive() and not victim.is_alive()
    return outcome


# -- which state do other threads see -----------------------------------------------------------------------------


@contextmanager
def parked_elsewhere(make_step: Callable[[Park], Step]) -> Iterator[None]:
    """The body runs while another thread stands still inside its step."""
    park = Park()
    park.armed = True
    thread = threading.Thread(target=lambda: make_step(park)())
    thread.start()
    assert park.reached.wait(LIMIT)
    try:
        yield
    finally:
        park.go.set()
        thread.join(LIMIT)


def compile_in_backend(park: Park) -> Step:
    def backend(graph: Any, example_inputs: Any) -> Any:
        park.stop()
        return graph

    return lambda: torch.compile(lambda x: x * 5, backend=backend, dynamic=False)(torch.ones(3))


def annotated(park: Park) -> Step:
    def step() -> None:
        with torch.fx.traceback.annotate({"probe": 1}):
            park.stop()

    return step


def stance(park: Park) -> Step:
    def step() -> None:
        with torch.compiler.set_stance("force_eager"):
            park.stop()

    return step


def configured(config: Any, option: str, value: object) -> Callable[[Park], Step]:
    def make(park: Park) -> Step:
        def step() -> None:
            with config.patch({option: value}):
                park.stop()

        return step

    return make


def probe_globals() -> dict[str, bool]:
    """Name of a piece of torch's state -> whether a thread sees what another thread has set."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._dynamo.callback import callback_handler
    from torch.fx import _symbolic_trace as fx_trace

    seen: dict[str, bool] = {}
    module_call = torch.nn.Module.__call__
    with parked_elsewhere(plain_trace):
        seen["fx tracing flag"] = fx_trace.is_fx_symbolic_tracing()
        seen["nn.Module.__call__ patched by a trace"] = torch.nn.Module.__call__ is not module_call
        seen["fx patcher"] = getattr(fx_trace, "CURRENT_PATCHER", None) is not None
    with parked_elsewhere(compile_in_backend):
        seen["is_compiling"] = torch.compiler.is_compiling()
    with parked_elsewhere(annotated):
        seen["fx annotation"] = "custom" in torch.fx.traceback.get_current_meta()
    for name, config, option in (
        ("dynamo config", torch._dynamo.config, "recompile_limit"),
        ("inductor config", inductor_config, "max_fusion_size"),
        ("functorch config", functorch_config, "max_dist_from_bw"),
    ):
        with parked_elsewhere(configured(config, option, 77)):
            seen[name] = getattr(config, option) == 77

    compiles: list[str] = []
    callback_handler.register_start_callback(lambda args: compiles.append(threading.current_thread().name))

    def counting_backend(graph: Any, example_inputs: Any) -> Any:
        compiles.append("traced")
        return graph

    with parked_elsewhere(stance):
        torch.compile(lambda x: x - 1, backend=counting_backend, dynamic=False)(torch.ones(3))
        seen["stance"] = "traced" not in compiles
    compiles.clear()
    shared = torch.compile(lambda x: x / 2, backend=counting_backend, dynamic=False)
    other = threading.Thread(target=lambda: shared(torch.ones(3)), name="other")
    other.start()
    other.join(LIMIT)
    seen["compile callback, before the trace"] = compiles == ["other", "traced"]
    shared(torch.ones(3))
    seen["compiled graphs of one code object"] = compiles == ["other", "traced"]
    return seen


def run(mode: str) -> dict[str, Any]:
    if mode == "globals":
        return probe_globals()
    if mode == "gate":
        with Gate() as gate:
            results = {name: interleave(name, gate.run, lambda: gate.status()["waiting"]) for name in SCENARIOS}
            return results | {"refused": gate.refused, "compiles": gate.compiles}
    door = first_step_lock() if mode == "first" else unprotected
    return {name: interleave(name, door, lambda: 0) for name in SCENARIOS}


if __name__ == "__main__":
    configure_main()
    print(json.dumps({"torch": torch.__version__, "result": run(sys.argv[1])}))
