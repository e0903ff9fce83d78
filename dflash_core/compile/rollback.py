"""Undo of a micro-step that the gate has to repeat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_generator(device: str) -> torch.Generator:
    """What random numbers on ``device`` come from by default. All threads share it."""
    import torch

    place = torch.device(device)
    if place.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # the generators are made with the first context
    return torch.cuda.default_generators[torch.cuda.current_device() if place.index is None else place.index]


class Rollback:
    """Puts gradients and random states back to where they were when a micro-step began.

    Use: `note` as the first line of the step, `restore` as `on_refused` of `Gate.run`. Gradients that were
    None cost nothing to note; others are copied.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], generators: Iterable[torch.Generator] = ()) -> None:
        self._parameters = list(parameters)
        self._generators = list(generators)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self._random: list[torch.Tensor] = []

    def note(self) -> None:
        """Remember the present gradients and random states."""
        grads = [parameter.grad for parameter in self._parameters]
        self._gradients = [None if grad is None else (grad, grad.detach().clone()) for grad in grads]
        self._random = [generator.get_state() for generator in self._generators]

    def restore(self) -> None:
        """Put them back; a gradient tensor that existed keeps its storage."""
        for parameter, noted in zip(self._parameters, self._gradients, strict=True):
            if noted is None:
                parameter.grad = None
            else:
                grad, copy = noted
                grad.detach().copy_(copy)
                parameter.grad = grad
        for generator, state in zip(self._generators, self._random, strict=True):
            generator.set_state(state)
