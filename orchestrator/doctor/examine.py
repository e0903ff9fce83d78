"""The whole examination: facts first, layer by layer, then what they mean."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from orchestrator.doctor.checks import api, container, gpu, hop, laptop, node
from orchestrator.doctor.facts import GpuInside, Hop, Inside, Missing, Node, Trouble, Wanted, or_trouble
from orchestrator.doctor.look import api as look_api
from orchestrator.doctor.look import inside as look_inside
from orchestrator.doctor.look import laptop as look_laptop
from orchestrator.doctor.side_by_side import threads
from orchestrator.doctor.verdict import Checks, Finding, Status, Verdict, judge, skipped
from orchestrator.inventory.locate import Found
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.session import Session

if TYPE_CHECKING:
    from orchestrator.doctor.look.way import Arrival
    from orchestrator.transport.shell import RemoteTransport

T = TypeVar("T")
Trace = Callable[[str, int], None]
NodeFacts = Node | Missing | Trouble
InsideFacts = Inside | Missing | Trouble


@dataclass(frozen=True)
class Diagnosis:
    """All findings in the order of the way, and how long it took."""

    findings: tuple[Finding, ...]
    seconds: float

    def of(self, status: Status) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is status]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(str(finding.status) for finding in self.findings)
        return {str(status): found[str(status)] for status in Status}


def examine(target: ResolvedTarget, *, inventory: Found, trace: Trace) -> Diagnosis:
    """Look at everything and change nothing. `inventory`: where the target is written down.

    Raises UsageError where this machine's own ssh configuration cannot be read; all else is a finding.
    """
    started = time.monotonic()
    wanted = wanted_of(target)
    here = look_laptop.look(target, wanted, inventory)
    with threads(1) as pool:
        asked = pool.submit(look_api.look, target)
        hops, seen, within = _go(target, wanted, trace)
    wanted = replace(wanted, traced=_traced(seen, within))
    seen = replace(seen, wanted=wanted) if isinstance(seen, Node) else seen
    within = replace(within, wanted=wanted) if isinstance(within, Inside) else within
    findings = judge("laptop", laptop.CHECKS, here)
    for one in hops:
        findings += judge(f"hop {one.label}", hop.CHECKS, one)
    findings += _answering("node", node.answers, node.CHECKS, seen)
    findings += _answering("container", container.answers, container.CHECKS, within)
    findings += _gpus(wanted, _rest(seen), _rest(within))
    findings += judge("api", api.CHECKS, asked.result())
    return Diagnosis(tuple(findings), time.monotonic() - started)


def wanted_of(target: ResolvedTarget) -> Wanted:
    """GPUs are those of `gpus`, else those of `launch.topology`."""
    gpus, topology = target.gpus, target.launch.topology
    if gpus is None and topology is not None:
        devices = {*topology.targets, *topology.drafters}
        gpus = tuple(sorted(int(device[5:]) for device in devices if device.startswith("cuda:")))
    return Wanted(target.name, target.transport, gpus, target.pct.container if target.pct else None)


def _go(target: ResolvedTarget, wanted: Wanted, trace: Trace) -> tuple[tuple[Hop, ...], NodeFacts, InsideFacts]:
    """The way, the node and the inside."""
    environment = {name: value for name, value in target.env.items() if isinstance(value, str)}
    no_node = Missing(f"the transport is `{target.transport}`")
    if target.ssh is None:
        from orchestrator.transport.local import LocalTransport

        session = Session(target.name, LocalTransport(), target.root, target.python, trace)
        return (), no_node, look_inside.look(session, wanted, environment)
    from orchestrator.doctor.look.way import travel
    from orchestrator.transport import transport_over

    with travel(target.name, target.ssh, lambda text: trace(text, 1)) as (hops, arrival):
        if arrival is None:
            stopped = next(one for one in hops if one.stopped)
            lost = Missing(f"the {stopped.stopped} of `{stopped.spoken}` failed")
            return hops, lost if target.pct else no_node, lost
        transport = transport_over(arrival.link, target)
        session = Session(target.name, transport, target.root, target.python, trace)
        with threads(1) as pool:
            inside = pool.submit(look_inside.look, session, wanted, environment)
            seen: NodeFacts = _node(transport, target, wanted, arrival) if target.pct else no_node
        return hops, seen, _known_cause(seen, inside.result())


def _node(transport: RemoteTransport, target: ResolvedTarget, wanted: Wanted, arrival: Arrival) -> Node | Trouble:
    from orchestrator.doctor.look import node as look_node
    from orchestrator.transport import container_of

    way, ssh = container_of(transport), target.ssh
    assert way is not None and ssh is not None
    return or_trouble(lambda: look_node.look(way.node, way.vmid, wanted, arrival, sudo=ssh.sudo))


def _known_cause(seen: NodeFacts, within: InsideFacts) -> InsideFacts:
    """What the checks of the node say already is not said again of every program inside."""
    if isinstance(within, Trouble) and isinstance(seen, Node):
        if refused := next((fact for fact in (seen.config, seen.status) if isinstance(fact, Trouble)), None):
            return Missing(refused.what)
        if seen.status != "running":
            return Missing(f"container {seen.wanted.vmid} is {seen.status}")
    return within


def _answering(
    group: str, answers: Callable[[T | Trouble], Verdict], checks: Checks[T], seen: T | Missing | Trouble
) -> list[Finding]:
    """A group whose first check is that anything answers at all."""
    first = skipped(seen.why) if isinstance(seen, Missing) else answers(seen)
    return [Finding(group, "answers", first), *judge(group, checks, _rest(seen))]


def _rest(seen: T | Missing | Trouble) -> T | Missing:
    """For checks that need an answer."""
    return Missing("nothing answers there") if isinstance(seen, Trouble) else seen


def _gpus(wanted: Wanted, seen: Node | Missing, within: Inside | Missing) -> list[Finding]:
    if not wanted.some_gpu:
        why = "the target wants no GPU" if wanted.gpus == () else "there is no GPU, and `gpus` names none"
        return judge("gpu", gpu.FROM_NODE, Missing(why)) + judge("gpu", gpu.INSIDE, Missing(why))
    driver = seen.devices.driver if isinstance(seen, Node) else None
    inside = within if isinstance(within, Missing) else GpuInside(wanted, within.said, driver)
    return judge("gpu", gpu.FROM_NODE, seen) + judge("gpu", gpu.INSIDE, inside)


def _traced(seen: NodeFacts, within: InsideFacts) -> bool:
    """Whether there is anything of a GPU."""
    on_node = isinstance(seen, Node) and (seen.devices.driver or seen.devices.gpus)
    inside = isinstance(within, Inside) and (within.said.gpu.module or within.said.gpu.devices)
    return bool(on_node or inside)
