"""The target's lock from the laptop's side; `remote/programs/_lock.py` is the other half."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from orchestrator.deploy.facts import Lock
from orchestrator.owner import owner_for
from orchestrator.session import Session
from orchestrator.words import ago

DEADLINE = 60.0


@dataclass(frozen=True)
class LockChange:
    """The lock that was taken, released or broken, and what went less than well."""

    lock: Lock
    warnings: tuple[str, ...]


def show(session: Session) -> Lock | None:
    """Who holds the lock now."""
    answer = session.call("lock", {"action": "show"}, deadline=DEADLINE)["lock"]
    return None if answer is None else Lock.model_validate(answer)


def take(session: Session, *, message: str, seconds: float | None) -> LockChange:
    """Take the lock by hand, for `seconds` or until released. Raises LockError when it is held."""
    return _change(session, "take", manual=True, message=message, for_s=seconds)


def release(session: Session) -> LockChange:
    """Give back a lock that this user took by hand. Raises LockError."""
    return _change(session, "release")


def break_lock(session: Session) -> LockChange:
    """Remove the lock, whoever holds it. A running command notices before it changes anything that counts."""
    return _change(session, "break")


def describe(held: Lock) -> str:
    """One line about a lock and its holder."""
    since = f"{held.holder}, {held.command or 'an unknown command'}, since {ago(held.age_s)}"
    if held.manual:
        until = "" if held.expires is None else f", until {datetime.fromtimestamp(held.expires).astimezone():%H:%M}"
        return f"{since}{until}: {held.message or 'no message'}"
    return f"{since}, {f'alive {ago(held.beat_age_s)} ago' if held.alive else 'its process is gone'}"


def _change(session: Session, action: str, **fields: object) -> LockChange:
    owner = {**owner_for(session, f"dfo lock {action}"), **fields}
    answer = session.call("lock", {"action": action, "owner": owner}, deadline=DEADLINE)
    warnings = answer["warnings"]
    assert isinstance(warnings, list)
    return LockChange(Lock.model_validate(answer["lock"]), tuple(map(str, warnings)))
