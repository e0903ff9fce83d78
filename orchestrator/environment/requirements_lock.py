"""From a good snapshot to hashed requirements, and the plan that leads back to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from orchestrator.environment.drift import faults
from orchestrator.environment.findings import Severity
from orchestrator.environment.snapshot import Snapshot
from orchestrator.errors import UsageError
from orchestrator.session import Session

DEADLINE = 900.0
SHA256 = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class Lock:
    """`text` is a pip requirements file with hashes; `plan` the commands that return to it, in order."""

    text: str
    plan: tuple[str, ...]
    num_locked: int
    unlocked: tuple[str, ...]


def make_lock(session: Session, good: Snapshot, now: Snapshot, path: Path) -> Lock:
    """Lock `good`; hashes are asked of the index that the target itself uses.

    Raises `UsageError` when `good` is not good: a broken environment is not worth returning to.
    """
    broken = [f for f in faults(good) if f.severity is Severity.BROKEN]
    if broken:
        raise UsageError(
            "snapshot_invalid",
            f"the snapshot of {good.taken} is not one to return to",
            why=f"{broken[0].what}: {broken[0].change}",
            fix="name an earlier one with `--from FILE`",
        )
    pins = {p.name: f"{p.name}=={p.version}" for p in good.packages if p.origin == "index"}
    timeout = DEADLINE / 3
    answer = session.call("wheel_hashes", {"pins": sorted(pins.values()), "timeout": timeout}, deadline=DEADLINE)
    hashes = _checked(answer)
    locked = {name: pin for name, pin in pins.items() if name in hashes}
    unlocked = [f"{p.name}=={p.version} ({p.origin})" for p in good.packages if p.name not in locked]
    plan = _plan(good, now, path)
    return Lock(_render(good, locked, hashes, unlocked, plan), plan, len(locked), tuple(unlocked))


def _checked(answer: dict[str, object]) -> dict[str, list[str]]:
    """name → sha256 sums; anything that is not a sum is dropped, so the pin counts as not lockable."""
    found = answer.get("found")
    rows = found if isinstance(found, list) else []
    sums = {
        canonicalize_name(str(name)): [s for s in digests if isinstance(s, str) and SHA256.match(s)]
        for name, _, digests in rows
    }
    return {name: digests for name, digests in sums.items() if digests}


def _render(
    good: Snapshot, locked: dict[str, str], hashes: dict[str, list[str]], unlocked: list[str], plan: tuple[str, ...]
) -> str:
    lines = [f"# Environment of {good.target} on {good.taken}, python {good.python.version}.", "# To return to it:"]
    lines += [f"#   {command}" for command in plan]
    lines += ["# Not from an index, or not offered by it any more; put these back by hand:"] if unlocked else []
    lines += [f"#   {pin}" for pin in unlocked]
    for name, pin in sorted(locked.items()):
        sums = " \\\n".join(f"    --hash=sha256:{digest}" for digest in hashes[name])
        lines.append(f"{pin} \\\n{sums}")
    return "\n".join(lines) + "\n"


def _plan(good: Snapshot, now: Snapshot, path: Path) -> tuple[str, ...]:
    """Remove what appeared since, then install what was there; pip replaces changed versions by itself."""
    known = {p.name for p in good.packages}
    appeared = sorted(p.name for p in now.packages if p.name not in known)
    python = now.python.executable
    remove = [f"{python} -m pip uninstall --yes {' '.join(appeared)}"] if appeared else []
    install = f"{python} -m pip install --no-deps --require-hashes -r {path.name}"
    return (*remove, install, f"{python} -m pip check")
