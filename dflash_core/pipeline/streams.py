"""A CUDA stream per worker, and marks that order them. Without a GPU all of this does nothing.

Workers that share a GPU would queue behind each other on its default stream. On streams of their own their kernels fill
each other's gaps; what one hands to another then needs an order, which a `Mark` gives without anybody waiting on the
host. Memory that crosses over must be told to torch's allocator as well, or its stream would reuse it too early.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

LEAST, URGENT = 0, -1
"""Priorities: the step waits for drafters, while targets run ahead."""


def use_own_stream(device: str, *, priority: int) -> None:
    """From now on the calling thread works on `device` and, if that is a GPU, on a new stream there."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(priority=priority))


def settle(devices: Iterable[str]) -> None:
    """Wait on the host until everything that was enqueued on `devices` is done; only before the steps begin."""
    for device in _gpus(devices):
        torch.cuda.synchronize(device)


class Mark:
    """A point in what the calling thread has enqueued on `devices`; any thread can queue its own work behind it."""

    def __init__(self, *devices: torch.device | str) -> None:
        self._events = [torch.cuda.current_stream(device).record_event() for device in _gpus(devices)]
        self._devices = _gpus(devices)

    def wait(self) -> None:
        """What the calling thread enqueues from now on, on the mark's devices, runs after it."""
        for device in self._devices:
            stream = torch.cuda.current_stream(device)
            for event in self._events:
                stream.wait_event(event)


def adopt(*tensors: torch.Tensor) -> None:
    """The calling thread will use `tensors` that another one made: keep their memory until it has."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _gpus(devices: Iterable[torch.device | str]) -> list[torch.device]:
    places = dict.fromkeys(torch.device(device) for device in devices)
    return [place for place in places if place.type == "cuda"]
