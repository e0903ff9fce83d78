"""What a deploy has to do, decided from the sources and the facts of the target. Pure: contacts nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.deploy.checks import Judged
from orchestrator.deploy.facts import Facts, Release
from orchestrator.deploy.plan import Action, Change, DeployPlan
from orchestrator.deploy.sources import Entry, Sources
from orchestrator.errors import PreflightError
from orchestrator.inventory.models import DeployConfig
from orchestrator.terminal import printable
from orchestrator.words import count, size

#: What a file system hands out at least, in bytes.
BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class _Shipment:
    """How the release gets there. `copies`: path → path in the current release; `sends`: what the archive holds."""

    action: Action
    release: str
    copies: Mapping[str, str]
    sends: tuple[str, ...]
    archive: bytes


def make_plan(
    sources: Sources,
    judged: Judged,
    facts: Facts,
    deploy: DeployConfig,
    *,
    target: str,
    place: str,
    owner: Mapping[str, object],
) -> DeployPlan:
    """Decide. Raises PreflightError when the target cannot take the release."""
    _check_root(facts, target)
    ship = _shipment(sources, facts, target)
    removes = () if ship.action is Action.NOTHING else _removes(facts, ship.release, deploy.keep)
    return DeployPlan(
        target=target,
        place=place,
        action=ship.action,
        release=ship.release,
        current=facts.current,
        content=sources.content,
        num_files=len(sources.files),
        num_python=judged.num_python,
        modules=facts.modules.versions,
        warnings=(*judged.warnings, *_edited_by_hand(facts)),
        changes=_changes(sources.manifest, facts) if ship.action is Action.SEND else (),
        removes=removes,
        keep=deploy.keep,
        leftovers=tuple(facts.leftovers) if facts.lock is None or not facts.lock.alive else (),
        lock_error=facts.lock_error,
        facts=facts.summary(),
        made_at=time.time(),
        steps=_steps(ship, len(sources.files), removes),
        request=_request(ship, sources, judged, facts, removes) | {"owner": owner},
        archive=ship.archive,
    )


def _shipment(sources: Sources, facts: Facts, target: str) -> _Shipment:
    same = _intact_release(facts, sources.content)
    if same is not None:
        action = Action.NOTHING if same.id == facts.current else Action.SWITCH
        return _Shipment(action=action, release=same.id, copies={}, sends=(), archive=b"")
    _check_space(sources, facts, target)
    copies, sends = _split(sources, facts)
    archive = sources.archive(sends) if sends else b""
    release = new_id(facts, sources.content)
    return _Shipment(action=Action.SEND, release=release, copies=copies, sends=sends, archive=archive)


def _request(
    ship: _Shipment, sources: Sources, judged: Judged, facts: Facts, removes: tuple[str, ...]
) -> dict[str, object]:
    """What the program on the target is told."""
    request: dict[str, object] = {
        "fingerprint": facts.fingerprint,
        "release": ship.release,
        "event": "deploy",
        "removes": removes,
    }
    if ship.action is not Action.SEND:
        return request
    return request | {
        "content": sources.content,
        "files": sources.manifest_json(),
        "base": facts.current,
        "copies": ship.copies,
        "sends": ship.sends,
        "parse": judged.reparse,
        "archive_size": len(ship.archive),
    }


def new_id(facts: Facts, content: str) -> str:
    """`YYYYMMDD-HHMM-<6 hex of the content>` by the target's clock (UTC), and `-2` if that exists."""
    stem = f"{datetime.fromtimestamp(facts.time, UTC):%Y%m%d-%H%M}-{content[:6]}"
    taken = {release.id for release in facts.releases}
    number = 1
    while (name := stem if number == 1 else f"{stem}-{number}") in taken:
        number += 1
    return name


def _intact_release(facts: Facts, content: str) -> Release | None:
    """A release with this content that is still as deployed; the current one if it is one of them."""
    intact = [r for r in facts.releases if r.content == content and not facts.damaged.get(r.id)]
    return next((r for r in intact if r.id == facts.current), intact[-1] if intact else None)


def _sound_files(facts: Facts) -> dict[str, Entry]:
    damaged = set(facts.damaged.get(facts.current or "", ()))
    return {path: entry for path, entry in facts.current_files.items() if path not in damaged}


def _split(sources: Sources, facts: Facts) -> tuple[dict[str, str], tuple[str, ...]]:
    """What can be copied from the current release (path → path there), and what must be sent."""
    sound = _sound_files(facts)
    by_hash = {entry.sha256: path for path, entry in sound.items()}
    copies: dict[str, str] = {}
    for path, entry in sources.manifest.items():
        if path in sound and sound[path].sha256 == entry.sha256:
            copies[path] = path
        elif entry.sha256 in by_hash:
            copies[path] = by_hash[entry.sha256]
    return copies, tuple(path for path in sources.manifest if path not in copies)


def _changes(manifest: Mapping[str, Entry], facts: Facts) -> tuple[Change, ...]:
    sound, before = _sound_files(facts), facts.current_files
    changes = []
    for path in sorted({*manifest, *before}):
        if path not in manifest:
            changes.append(Change("D", path, 0, before[path].size))
        elif path not in before:
            changes.append(Change("A", path, manifest[path].size, 0))
        elif sound.get(path) != manifest[path]:
            changes.append(Change("M", path, manifest[path].size, before[path].size))
    return tuple(changes)


def _removes(facts: Facts, release: str, keep: int) -> tuple[str, ...]:
    """Releases beyond the newest `keep`; those in use stay (the target looks again before it removes)."""
    ids = [*(r.id for r in facts.releases if r.id != release), release]
    stay = {*ids[-keep:], release, *(run.release for run in facts.runs)}
    return tuple(id for id in ids if id not in stay)


def _edited_by_hand(facts: Facts) -> tuple[str, ...]:
    damaged = facts.damaged.get(facts.current or "", [])
    if not damaged:
        return ()
    names = ", ".join(f"`{printable(path)}`" for path in damaged[:3])
    return (
        f"current release {facts.current} was changed on the target: {count(len(damaged), 'file')} no longer as "
        f"deployed ({names})",
    )


def _steps(ship: _Shipment, num_files: int, removes: Sequence[str]) -> dict[str, str]:
    if ship.action is Action.NOTHING:
        return {}
    steps = {"lock": "taken"}
    if ship.sends:
        steps["send"] = f"{count(len(ship.sends), 'file')}, {size(len(ship.archive))}"
    elif ship.action is Action.SEND:
        # A pure removal or rename: copying is all there is to see.
        steps["copy"] = "nothing to send"
    steps |= {"verify": f"{num_files:,} hashes equal", "activate": ship.release}
    return steps | ({"prune": count(len(removes), "old release")} if removes else {})


def _check_root(facts: Facts, target: str) -> None:
    root = facts.root
    reasons = (
        (not root.is_folder, "root_unusable", "is not a folder", "set `deploy.root` to a folder"),
        (not root.current_is_link, "root_unusable", "has a `current` that is no link of ours", "move it away"),
        (root.read_only, "read_only", "is on a read-only file system", "mount it writable, or set `deploy.root`"),
        (not root.writable, "not_permitted", "is not writable for the login user", "correct its owner or rights"),
    )
    for is_so, kind, why, fix in reasons:
        if is_so:
            raise PreflightError(
                kind, f"cannot deploy to `{target}`", why=f"`{root.place}` {why}", fix=fix, place=root.place
            )


def space_needed(sources: Sources) -> int:
    """Bytes that a new release takes: it holds copies of all its files."""
    blocks = sum(-(-len(file.data) // BLOCK) for file in sources.files.values()) + 2 * len(_folders(sources)) + 32
    return blocks * BLOCK


def _folders(sources: Sources) -> set[str]:
    return {path.rpartition("/")[0] for path in sources.files}


def _check_space(sources: Sources, facts: Facts, target: str) -> None:
    need_bytes, need_inodes = space_needed(sources), len(sources.files) + len(_folders(sources)) + 16
    root = facts.root
    used = sum(release.bytes for release in facts.releases)
    if root.free_bytes < need_bytes:
        need, have = size(need_bytes), size(root.free_bytes)
    elif root.free_inodes is not None and root.free_inodes < need_inodes:
        need, have = f"{need_inodes:,} inodes", f"{root.free_inodes:,}"
    else:
        return
    raise PreflightError(
        "disk_full",
        f"not enough space under `{root.place}` on `{target}`",
        why=f"need {need}, have {have}; {count(len(facts.releases), 'release')} there use {size(used)}",
        fix=f"free some, for instance with `dfo releases {target} --prune 2`",
        free_bytes=root.free_bytes,
    )
