"""Releases from the laptop's side: plan → stage → verify → activate → prune; rollback.

The target does its part in one program per command, under the lock (`remote/programs/apply.py`, `activate.py`,
`releases.py`); a change is proven by hashes before `current` moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from orchestrator.deploy import checks, method
from orchestrator.deploy.delivery import SLOWEST, under_way
from orchestrator.deploy.facts import Facts, Release, gather
from orchestrator.deploy.plan import Action, DeployPlan
from orchestrator.deploy.planning import make_plan, space_needed
from orchestrator.deploy.sources import Sources, collect
from orchestrator.errors import DfoError, Interrupted, UsageError, from_dict
from orchestrator.inventory.models import DeployConfig
from orchestrator.owner import owner_for
from orchestrator.remote.wire import Record
from orchestrator.session import Session

DEADLINE = 120.0

OnRecord = Callable[[Record], None]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Activated(_Answer):
    """A release is current. `kept`: releases that were to be removed, and who needs them."""

    release: str
    previous: str | None
    removed: list[str]
    kept: dict[str, str]
    warnings: list[str]
    files: int | None = None


class ReleaseList(_Answer):
    """Releases, oldest first. `in_use`: release → run or process that needs it. `time`: the target's clock."""

    releases: list[Release]
    current: str | None
    in_use: dict[str, str]
    time: float
    swept: list[str] = []
    removed: list[str] = []
    kept: dict[str, str] = {}
    warnings: list[str] = []


def read_sources(project: Path, deploy: DeployConfig) -> tuple[Sources, checks.Examined]:
    """Collect and examine the release; no connection is needed. Raises SourceError."""
    sources = collect(project, deploy)
    return sources, checks.examine(sources, deploy.include)


def plan_deploy(
    session: Session,
    sources: Sources,
    examined: checks.Examined,
    deploy: DeployConfig,
    *,
    lock_wait: float = 0.0,
    python_path: str | None = None,
    gpus: bool = False,
    on_record: OnRecord | None = None,
) -> DeployPlan:
    """Take facts (one call, and one to the node if there is something to send) and decide what to do.

    Raises SourceError, PreflightError.

    `python_path`: PYTHONPATH of runs, where more modules may lie. `gpus`: look at the GPUs too, for the `facts` line.
    """
    owner = owner_for(session, "dfo deploy")
    facts = gather(
        session,
        owner,
        content=sources.content,
        modules=examined.modules,
        parse=examined.unparsed,
        environment={} if python_path is None else {"PYTHONPATH": python_path},
        gpus=gpus,
        lock_wait=lock_wait,
        on_record=on_record,
    )
    judged = checks.judge(examined, facts, target=session.name, version=_version(deploy.python_version))
    place = f"{session.transport.label}, {session.root}"
    plan = make_plan(sources, judged, facts, deploy, target=session.name, place=place, owner=owner)
    if not plan.archive:
        return plan
    spare = facts.root.free_bytes - space_needed(sources)
    return replace(plan, method=method.choose(session, deploy.method, archive=len(plan.archive), spare=spare))


def apply(
    session: Session, plan: DeployPlan, *, lock_wait: float = 0.0, on_record: OnRecord | None = None
) -> Activated:
    """Do what the plan says (one call, and one `pct push` if the plan says so).

    Raises LockError, TransferError, PreflightError; `current` is then as it was.
    """
    if plan.lock_error is not None:
        raise from_dict(dict(plan.lock_error))
    program = {Action.SEND: "apply", Action.SWITCH: "activate"}[plan.action]
    progress = _Progress(on_record)
    deadline = DEADLINE + lock_wait + 2 * len(plan.archive) / SLOWEST
    with _explained_interrupt(session, progress), under_way(session, plan.archive, plan.method, progress.note) as way:

        def on_its_way(record: Record) -> None:
            progress(record)
            way.hear(record)

        request = {**plan.request, **way.request, "wait_s": lock_wait}
        try:
            answer = session.call(program, request, payload=way.payload, deadline=deadline, on_record=on_its_way)
        except DfoError as error:
            raise way.failed or error from way.failed
    return Activated.model_validate(answer)


def clean(session: Session) -> list[str]:
    """Remove what commands that died have left; returns the names. Raises LockError."""
    return prune(session, keep=None).swept


def rollback(session: Session, facts: Facts, release: str, *, on_record: OnRecord | None = None) -> Activated:
    """Make an earlier release current after verifying all its files. Raises PreflightError when it is damaged."""
    owner = owner_for(session, "dfo rollback")
    request = {"owner": owner, "release": release, "event": "rollback", "fingerprint": facts.fingerprint}
    progress = _Progress(on_record)
    with _explained_interrupt(session, progress):
        answer = session.call("activate", request, deadline=DEADLINE, on_record=progress)
    return Activated.model_validate(answer)


def facts_for_rollback(session: Session) -> Facts:
    return gather(session, owner_for(session, "dfo rollback"))


def choose_earlier(facts: Facts, wanted: str | None) -> str:
    """The release that `wanted` names (a part of its id is enough), or the one before the current one."""
    ids = [release.id for release in facts.releases]
    if wanted is not None:
        matches = [id for id in ids if id == wanted] or [id for id in ids if wanted in id]
        if len(matches) == 1:
            return matches[0]
        why = f"{len(matches)} releases match" if matches else "the target has " + (", ".join(ids) or "no releases")
        raise UsageError("unknown_release", f"which release is `{wanted}`?", why=why, fix="`dfo releases` lists them")
    before = history(facts.switches, ids, facts.current)
    if not before:
        raise UsageError(
            "unknown_release",
            "there is no release to go back to",
            why=f"current is {facts.current or 'none'}, and nothing that was current before is still there",
            fix="name one (`dfo releases` lists them), or deploy the code you want",
        )
    return before[-1]


def history(switches: Sequence[tuple[str, str]], ids: Sequence[str], current: str | None) -> list[str]:
    """What was current before, oldest first: a deploy goes on top, a rollback goes back down to its release.

    So after A, B, rollback to A, C the release before C is A, not the B that somebody turned away from.
    """
    stack: list[str] = []
    for event, release in switches:
        if event == "rollback" and release in stack:
            del stack[stack.index(release) + 1 :]
        elif not stack or stack[-1] != release:
            stack.append(release)
    if not stack or stack[-1] != current:
        # The audit file does not know: then older means before.
        stack = list(ids[: ids.index(current)] if current in ids else ids)
    return [id for id in stack if id in ids and id != current]


def list_releases(session: Session) -> ReleaseList:
    return _releases(session, {})


def prune(session: Session, *, keep: int | None) -> ReleaseList:
    """Remove all but the newest `keep` releases (None: only leftovers); current and used ones stay."""
    return _releases(session, {"keep": keep, "owner": owner_for(session, "dfo releases"), "clean": True})


def _releases(session: Session, request: Mapping[str, object]) -> ReleaseList:
    return ReleaseList.model_validate(session.call("releases", request, deadline=DEADLINE))


@dataclass
class _Progress:
    """Remembers where a remote transaction is, for what to say when it is interrupted."""

    forward: OnRecord | None
    step: str = field(default="start")

    def __call__(self, record: Record) -> None:
        if record.type == "step":
            self.step = str(record.fields.get("name"))
        if self.forward is not None:
            self.forward(record)

    def note(self, text: str) -> None:
        """Something the target does not know."""
        self(Record({"t": "note", "text": text}))


@contextmanager
def _explained_interrupt(session: Session, progress: _Progress) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        done = progress.step in ("activate", "prune")
        raise Interrupted(
            "interrupted",
            f"interrupted during `{progress.step}` on `{session.name}`",
            why="Ctrl-C was pressed; " + ("the release may be current already" if done else "current is as it was"),
            fix="`dfo releases` shows what is current; running the command again is safe",
            step=progress.step,
        ) from error


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


__all__ = [
    "Activated",
    "DeployPlan",
    "ReleaseList",
    "apply",
    "choose_earlier",
    "clean",
    "facts_for_rollback",
    "history",
    "list_releases",
    "plan_deploy",
    "prune",
    "read_sources",
    "rollback",
]
