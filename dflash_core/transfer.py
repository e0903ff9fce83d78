"""Copies to a GPU that nobody waits for."""

from __future__ import annotations

import numpy as np
import torch


def to_device(
    values: torch.Tensor | np.ndarray, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`values` on `device` as `dtype` (default: their own); for a GPU, enqueued on the calling thread's current stream.

    Host memory travels to a GPU through pinned memory: from pageable memory the driver first waits for the stream.
    torch keeps freed pinned blocks and gives one out again when its copies are done, so pinning is cheap from the
    second time on, and the source may be changed or freed at once.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    place = torch.device(device)
    if place.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    # Back to the host it must be waited for: whoever reads there does not know of streams.
    return tensor.to(place, dtype if dtype is not None else tensor.dtype, non_blocking=place.type == "cuda")
