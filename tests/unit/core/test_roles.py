"""A drafter's micro-step that the gate refuses half-way equals one that it never refused."""

from functools import partial

import pytest
import torch

from dflash_core.attention import reference_attention
from dflash_core.compile.environment import clone_code, configure_thread
from dflash_core.compile.gate import Gate
from dflash_core.config import DataConfig, RunConfig, TargetConfig, TrainConfig
from dflash_core.drafter import DFlashDrafter
from dflash_core.pipeline.rehearsal import synthetic_batch
from dflash_core.pipeline.roles import DrafterRole, drafter_role
from dflash_core.session import build_objective, replica

SETTINGS = RunConfig(
    version=1,
    target=TargetConfig(path="synthetic"),
    data=DataConfig(tokens_per_batch=48, max_length=24),
    train=TrainConfig(anchors_per_batch=6, dtype="float32"),
)


def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


class Noisy:
    """Reference attention with noise from the global generator, and a compile in the forward or in the backward.

    The noise is drawn on both sides of the compile, and the backward reaches it with some gradients already written.
    """

    def __init__(self, late: str) -> None:
        self.late = late
        self.armed = False
        self._compiled = torch.compile(clone_code(halved), backend="eager", dynamic=False)

    def __call__(self, q, *tensors_and_layout, **rule):
        q = q + 0.1 * torch.randn_like(q)
        if self.armed and self.late == "forward":
            q = q + self._compiled(q.detach()) * 0
        if self.armed and self.late == "backward":
            q.register_hook(lambda grad: grad + self._compiled(grad.detach()) * 0)
        return reference_attention(q + 0.1 * torch.randn_like(q), *tensors_and_layout, **rule)


@pytest.fixture
def make_role(tiny_config):
    def make(attention) -> DrafterRole:
        torch.manual_seed(11)
        config = tiny_config()
        drafter = DFlashDrafter(config, generator=torch.Generator().manual_seed(1))
        head = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(2))
        synthetic = partial(synthetic_batch, SETTINGS, config.vocab_size)
        objective = build_objective(SETTINGS, config)
        return drafter_role("cpu", replica(drafter, "cpu", "float32"), head, objective, attention, synthetic)

    return make


def gradients(role: DrafterRole) -> list[torch.Tensor]:
    return [torch.empty(0) if parameter.grad is None else parameter.grad for parameter in role.parameters]


@pytest.mark.parametrize("late", ["forward", "backward"])
def test_a_refused_micro_step_equals_one_that_was_not(make_role, late):
    def two_steps(armed: bool) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, int]:
        attention = Noisy(late)
        role = make_role(attention)
        item = role.rehearsal_item()
        with Gate() as gate:
            step = partial(gate.run, "micro-step", partial(role.micro_step, item), on_refused=role.undo)
            step()
            attention.armed = armed
            sums = step()  # adds to the gradients of the first
            return gradients(role), sums.loss_num, torch.get_rng_state(), gate.refused

    configure_thread()
    torch._dynamo.reset()
    plain, refused = two_steps(armed=False), two_steps(armed=True)
    assert (plain[3], refused[3]) == (0, 1)
    assert torch.equal(plain[1], refused[1]) and torch.equal(plain[2], refused[2])
    for mine, theirs in zip(refused[0], plain[0], strict=True):
        assert torch.equal(mine, theirs)
