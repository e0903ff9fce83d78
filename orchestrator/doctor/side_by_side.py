"""Several questions at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that is waited for at the end of the block, but not after Ctrl-C: the connections it waits for are closed
    next, and that ends it.
    """
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
