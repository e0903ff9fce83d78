"""What is wrong with a node as a container's, and what changed about it."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.environment.findings import Finding, Severity, changed
from orchestrator.environment.node import NodeRecord

FOLLOWS = "`devN` entries follow by themselves, lines of the old way do not"


def faults(node: NodeRecord | None) -> Iterator[Finding]:
    """Faults of one node alone."""
    if node is None:
        return
    for key, value in node.passed.items():
        path = value.partition(",")[0].removeprefix("path=")
        if path not in node.devices:
            what = f"the container does not start again: load the driver on `{node.name}`, or take {key} out"
            yield Finding(Severity.BROKEN, f"{key} of the container", None, f"{path} is not on the node", what)
    for text in node.trouble:
        yield Finding(Severity.RISK, "GPU lines of the container", None, text, "`dfo gpu plan` shows the new way")


def differences(before: NodeRecord | None, now: NodeRecord | None, library: str | None) -> Iterator[Finding]:
    """Nothing where one of the two has no node: a snapshot of an older dfo, or another transport.

    `library`: the version of libcuda in the container now.
    """
    if before is None or now is None:
        return
    moved = "another machine: its driver, its GPUs and their order are its own"
    if before.proxmox and now.proxmox:
        yield from changed(
            [(Severity.NOTE, "Proxmox VE", before.proxmox, now.proxmox, "its `pct` may behave otherwise")]
        )
    yield from changed(
        [
            (Severity.RISK, "node", before.name, now.name, moved),
            (Severity.RISK, "container number", before.container, now.container, "another container answers now"),
            (Severity.NOTE, "node kernel", before.kernel, now.kernel, "numbers of devices may have changed with it"),
            (Severity.RISK, "node driver", before.driver, now.driver, what_follows(now.driver, library)),
        ]
    )
    for name in sorted(before.majors.keys() | now.majors.keys()):
        was, is_ = before.majors.get(name), now.majors.get(name)
        yield from changed([(Severity.NOTE, f"major of {name}", was, is_, FOLLOWS)])
    passed = list(_keys(before.passed, now.passed, "passed device", "what the container may use changed"))
    told = list(_keys(before.config, now.config, "container", "its limits decide what fits"))
    yield from (*passed, *told)
    if before.config_sha256 != now.config_sha256 and not passed and not told:
        hashes = (before.config_sha256[:12], now.config_sha256[:12])
        yield from changed([(Severity.NOTE, "container configuration", *hashes, "none of its limits and devices")])


def what_follows(driver: str | None, library: str | None) -> str:
    """What another driver of the node means for a container with this libcuda."""
    if driver is None or library is None:
        return "the container's libraries must be of the same version"
    if library == driver:
        return f"the container's libcuda is {library} as well"
    return f"the container's libcuda is still {library}: install the libraries of {driver} there"


def _keys(before: dict[str, str], now: dict[str, str], what: str, consequence: str) -> Iterator[Finding]:
    for key in sorted(before.keys() | now.keys()):
        yield from changed([(Severity.RISK, f"{what} {key}", before.get(key), now.get(key), consequence)])
