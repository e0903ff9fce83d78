import math

import pytest
import torch

from dflash_core.optim import MasterAdamW, lr_at


def tiny(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).to(dtype)


def test_one_step_is_torch_adamw_on_clipped_mean_gradients() -> None:
    model, twin = tiny(), tiny()
    ours = MasterAdamW(model.named_parameters(), device="cpu", betas=(0.9, 0.95), weight_decay=0.1)
    decayed = [p for p in twin.parameters() if p.dim() >= 2]
    plain = [p for p in twin.parameters() if p.dim() < 2]
    theirs = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip
    for step in range(3):
        gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in twin.parameters()]
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient / 8
        expected_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        theirs.step()
        norm = ours.step(gradients, divisor=torch.tensor(8.0), lr=1e-2, clip=0.05)
        torch.testing.assert_close(norm, expected_norm)
    ours.publish(model)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=1e-6, atol=1e-7)


def test_updates_below_bf16_resolution_add_up() -> None:
    model = tiny(torch.bfloat16)
    optimizer = MasterAdamW(tiny().named_parameters(), device="cpu", eps=1e-8)
    weight = optimizer.masters["0.weight"].detach().clone()
    for _ in range(40):
        gradients = [torch.ones_like(m) for m in optimizer.masters.values()]
        optimizer.step(gradients, divisor=torch.tensor(1.0), lr=1e-5, clip=1e9)
    optimizer.publish(model)
    moved = (weight - optimizer.masters["0.weight"]).mean().item()
    assert moved == pytest.approx(40e-5, rel=0.02)
    assert model[0].weight.dtype == torch.bfloat16  # type: ignore[index]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    optimizer = MasterAdamW(tiny().named_parameters(), device="cpu")
    good = [torch.ones_like(m) for m in optimizer.masters.values()]
    optimizer.step(good, divisor=torch.tensor(1.0), lr=1e-3, clip=1.0)
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    bad = [torch.ones_like(m) for m in optimizer.masters.values()]
    bad[1][0] = float("nan")
    assert not torch.isfinite(optimizer.step(bad, divisor=torch.tensor(1.0), lr=1e-3, clip=1.0))
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, before[name]), name


def test_a_first_gradient_that_is_not_finite_leaves_a_fresh_optimizer() -> None:
    optimizer = MasterAdamW(tiny().named_parameters(), device="cpu")
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    bad = [torch.full_like(m, float("inf")) for m in optimizer.masters.values()]
    assert not torch.isfinite(optimizer.step(bad, divisor=torch.tensor(0.0), lr=1e-3, clip=1.0))
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_a_step_waits_for_nothing_and_equals_the_one_on_a_cpu() -> None:
    here, there = (MasterAdamW(tiny().named_parameters(), device=device) for device in ("cpu", "cuda"))
    replica = tiny().to("cuda", torch.bfloat16)
    gradients = [torch.randn(m.shape, generator=torch.Generator().manual_seed(1)) for m in here.masters.values()]
    for number in range(4):
        poison = float("nan") if number == 2 else 1.0
        here.step([g * poison for g in gradients], divisor=torch.tensor(8.0), lr=1e-2, clip=0.05)
        on_gpu, divisor = [(g * poison).cuda() for g in gradients], torch.tensor(8.0, device="cuda")
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step makes the moments
        try:
            there.step(on_gpu, divisor=divisor, lr=1e-2, clip=0.05)
            there.publish(replica)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, tensor in here.state_tensors().items():
        torch.testing.assert_close(there.state_tensors()[name].cpu(), tensor, rtol=1e-6, atol=1e-7)
    weight = there.masters["0.weight"].bfloat16()
    assert torch.equal(replica[0].weight, weight)  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_restored_optimizer_goes_on_exactly(dtype: torch.dtype) -> None:
    def gradients(step: int, optimizer: MasterAdamW) -> list[torch.Tensor]:
        source = torch.Generator().manual_seed(step)
        return [torch.randn(m.shape, generator=source).to(m) for m in optimizer.masters.values()]

    def advance(optimizer: MasterAdamW, steps: range) -> None:
        for step in steps:
            optimizer.step(gradients(step, optimizer), divisor=torch.tensor(2.0), lr=1e-2, clip=1.0)

    straight = MasterAdamW(tiny(dtype).named_parameters(), device="cpu", compute_dtype=dtype)
    assert next(iter(straight.masters.values())).dtype == dtype
    advance(straight, range(6))
    first = MasterAdamW(tiny(dtype).named_parameters(), device="cpu", compute_dtype=dtype)
    advance(first, range(3))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    assert {name: tuple(t.shape) for name, t in saved.items()} == first.shapes()
    second = MasterAdamW(tiny(dtype).named_parameters(), device="cpu", compute_dtype=dtype)
    second.load_state_tensors(saved)
    advance(second, range(3, 6))
    for name, tensor in straight.state_tensors().items():
        assert torch.equal(tensor, second.state_tensors()[name]), name


def test_schedule_shape() -> None:
    def rate(progress: float) -> float:
        return lr_at(progress, peak=2.0, warmup_ratio=0.1, min_lr_ratio=0.25)

    assert rate(0.05) == pytest.approx(1.0)
    assert rate(0.1) == pytest.approx(2.0)
    assert rate(0.55) == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    assert rate(1.0) == rate(7.0) == pytest.approx(0.5)
    rates = [rate(n / 100) for n in range(101)]
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_schedule_without_warmup_or_with_nothing_else() -> None:
    assert lr_at(0.0, peak=1.0, warmup_ratio=0.0, min_lr_ratio=0.0) == 1.0
    assert lr_at(0.5, peak=1.0, warmup_ratio=1.0, min_lr_ratio=0.0) == 0.5
    assert math.isfinite(lr_at(1.0, peak=1.0, warmup_ratio=1.0, min_lr_ratio=0.0))
