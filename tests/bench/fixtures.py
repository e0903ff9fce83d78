"""The fixtures of README.md. Whatever needs a node is marked `bench`; `relay` and `faulty_ssh` run anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from bench import requirements, sweep
from bench.container import Container
from bench.faulty_ssh import Answer, Faults, FaultySsh
from bench.node import Node
from bench.relay import Relay
from bench.sshd import Endpoint

NEEDS_THE_MACHINE = "bench_machine"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NEEDS_THE_MACHINE in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.bench)


@pytest.fixture(scope="session")
def bench_machine() -> None:
    """Skips what this machine cannot do, or fails where DFO_BENCH_REQUIRED says that it must be able to."""
    reason = requirements.missing()
    if reason and os.environ.get("DFO_BENCH_REQUIRED") == "1":
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)
    sweep.sweep()


@pytest.fixture
def node(bench_machine: None) -> Iterator[Node]:
    """A fresh node without containers."""
    with Node() as fresh:
        yield fresh


@pytest.fixture
def ct(node: Node) -> Container:
    """Container 200 on `node`: unprivileged, running."""
    return node.create(200)


@pytest.fixture(scope="session")
def lab(bench_machine: None) -> Iterator[Node]:
    """One node with container 200 running, for tests that leave nothing behind."""
    with Node() as shared:
        shared.create(200)
        yield shared


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    """Factory: `relay(endpoint, delay=0.01)`."""
    with ExitStack() as opened:

        def make(
            target: Endpoint, *, delay: float = 0.0, cut_up: int | None = None, cut_down: int | None = None
        ) -> Relay:
            made = Relay(target, delay=delay, cut_up=cut_up, cut_down=cut_down)
            opened.callback(made.close)
            return made

        yield make


@pytest.fixture
def faulty_ssh() -> Iterator[Callable[..., FaultySsh]]:
    """Factory: `faulty_ssh(banner_delay=5)`; the arguments are those of `Faults`."""
    with ExitStack() as opened:

        def make(**faults: float | bool | Mapping[str, Answer] | None) -> FaultySsh:
            made = FaultySsh(Faults(**faults))  # type: ignore[arg-type]
            opened.callback(made.close)
            return made

        yield make
