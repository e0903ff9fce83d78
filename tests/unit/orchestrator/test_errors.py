"""Kinds and exit codes are what programs rely on."""

from __future__ import annotations

import pytest

from orchestrator.errors import KINDS, DfoError, LockError, PreflightError, UsageError, from_dict


def test_each_kind_belongs_to_one_class() -> None:
    classes = set(KINDS.values())
    assert sum(len(cls.kinds) for cls in classes) == len(KINDS)
    assert len({cls.exit_code for cls in classes}) == len(classes)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_error_survives_the_wire(kind: str) -> None:
    error = KINDS[kind](kind, "what", why="why", fix="fix", pid=7)
    again = from_dict(error.as_dict())
    assert type(again) is type(error)
    assert again.as_dict() == error.as_dict() == {"kind": kind, "what": "what", "why": "why", "fix": "fix", "pid": 7}


def test_an_unknown_kind_from_a_target_is_told_as_it_is() -> None:
    error = from_dict({"kind": "from_the_future", "what": "a", "why": "b", "fix": "c"})
    assert isinstance(error, PreflightError)
    assert (error.kind, error.what) == ("remote_failed", "a")


def test_a_kind_of_another_class_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="is not a kind of"):
        UsageError("lock_held", "a", why="b", fix="c")
    assert issubclass(LockError, DfoError)
