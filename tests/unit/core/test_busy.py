"""How long a device is at work: the union of what its workers do, and every moment of it once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.pipeline import busy as module
from dflash_core.pipeline.busy import Busy


class Clock:
    """Hands out the moments of a list."""

    def __init__(self, moments: Sequence[float]) -> None:
        self.moments = iter(moments)

    def perf_counter(self) -> float:
        return next(self.moments)


def test_spans_beside_each_other_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two workers: 0 to 4 and 1 to 6, a pause, then 8 to 9.
    monkeypatch.setattr(module, "time", Clock([0.0, 1.0, 4.0, 6.0, 8.0, 9.0]))
    busy = Busy("cpu")
    first, second = busy.span(), busy.span()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert busy.take() == 4.0
    second.__exit__(None, None, None)
    assert busy.take() == 2.0
    assert busy.timed(lambda: "result")() == "result"
    assert busy.take() == 1.0 and busy.take() == 0.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=600))
def test_the_sum_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    """One after the other by their ends, as they arrive; many more than are gathered."""
    ordered = sorted(((float(begin), float(begin + length)) for begin, length in spans), key=lambda span: span[1])
    busy = Busy("cpu")
    busy._counted_to = min(begin for begin, _ in ordered)
    busy._spans = list(ordered)
    union = {moment for begin, end in ordered for moment in range(int(begin), int(end))}
    assert busy.take() == pytest.approx(len(union))


def test_a_failing_span_counts_and_many_are_summed_up() -> None:
    busy = Busy("cpu")
    for _ in range(module.GATHERED + 1):
        with pytest.raises(ZeroDivisionError), busy.span():
            _ = 1 / 0
    assert len(busy._spans) == 1


def test_threads_share_one_device() -> None:
    busy = Busy("cpu")
    begin = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(8):
            pool.submit(busy.timed(lambda: time.sleep(0.05)))
    passed = time.perf_counter() - begin
    assert 0.09 <= busy.take() <= passed < 8 * 0.05


def test_nothing_done_is_no_time() -> None:
    assert Busy("cpu").take() == 0.0
