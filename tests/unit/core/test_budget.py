import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.budget import Budget


def test_steps_alone() -> None:
    budget = Budget(total_steps=10)
    assert budget.progress(0, 1e9) == 0.05
    assert budget.progress(9, 0) == 0.95
    assert [budget.ended_by(step, 1e9) for step in (9, 10)] == [None, "steps"]
    assert budget.remaining_s(4, 100, 2.0) == 12
    assert budget.expected_steps(4, 100, 2.0) == 10


def test_time_takes_over_when_it_is_further_along() -> None:
    budget = Budget(total_steps=1000, max_seconds=60)
    assert budget.progress(10, 30) == 0.5
    assert budget.progress(900, 30) == 0.9005
    assert budget.ended_by(10, 59.9) is None and budget.ended_by(10, 60) == "time"
    assert budget.remaining_s(10, 50, 2.0) == 10
    assert budget.expected_steps(10, 50, 2.0) == 15


def test_progress_made_before_a_resume_is_a_floor() -> None:
    assert Budget(total_steps=100, max_seconds=60, floor=0.7).progress(10, 12) == 0.7


@given(
    st.integers(1, 500),
    st.none() | st.floats(1, 1e4),
    st.lists(st.floats(0, 100), min_size=1, max_size=50),
)
def test_progress_never_falls_and_stays_within_the_run(total: int, limit: float | None, waits: list[float]) -> None:
    budget = Budget(total_steps=total, max_seconds=limit)
    elapsed, seen = 0.0, 0.0
    for step, wait in enumerate(waits):
        if budget.ended_by(step, elapsed):
            break
        progress = budget.progress(step, elapsed)
        assert seen <= progress <= 1
        if limit is None:
            assert progress == pytest.approx((step + 0.5) / total)
        seen, elapsed = progress, elapsed + wait
