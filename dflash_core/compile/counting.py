"""How often this process found compiled code in a cache and how often it had to make it.

A compile that Dynamo starts (`Gate.compiles`) costs a second when the disk cache has the code and minutes when it has
not; only the second kind is a miss.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

_kernels = {True: 0, False: 0}


def count_kernels() -> None:
    """Count what Triton loads and compiles in this process, unless somebody else listens already."""
    if find_spec("triton") is None:
        return
    from triton import knobs

    if knobs.compilation.listener is None:
        knobs.compilation.listener = _on_kernel


def cache_misses() -> int:
    """Graphs that Inductor and kernels that Triton had to compile so far; what cannot be cached is a miss each time."""
    from torch._dynamo.utils import counters

    graphs = counters["inductor"]
    return graphs["fxgraph_cache_miss"] + graphs["fxgraph_cache_bypass"] + _kernels[False]


def _on_kernel(*, cache_hit: bool, **_: Any) -> None:
    _kernels[cache_hit] += 1
