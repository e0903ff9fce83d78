"""The step's elementwise kernels against their torch references in fp64: values, gradients, strides, unwritten outputs.

Without a GPU they run in Triton's interpreter; with one, compiled.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dflash_core.kernels.norm_rotate import norm_rotate, norm_rotate_backward, reference_norm_rotate
from dflash_core.kernels.rms_norm import add_rms_norm, reference_add_rms_norm, rms_norm_backward
from dflash_core.kernels.swiglu import reference_swiglu, swiglu, swiglu_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = st.sampled_from(list(TOLERANCE))
seeds = st.integers(0, 2**31)
few = settings(max_examples=25, phases=(Phase.explicit, Phase.generate))  # shrinking is slow in the interpreter


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory():
    """Every `torch.empty` comes filled with NaN, so an output that a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def rows(rng, *shape, dtype, scale=1.0):
    return (torch.randn(*shape, generator=rng) * scale).to(DEVICE, dtype)


def wide(tensor):
    return tensor.detach().double().requires_grad_()


def close(mine, expected):
    """By relative norm; NaN never passes."""
    error = (mine.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[mine.dtype], float(error)


@few
@given(st.integers(1, 70), st.integers(16, 300), st.booleans(), st.booleans(), dtypes, seeds)
def test_add_rms_norm(number, width, branched, other_way, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    x, weight = rows(rng, number, width, dtype=dtype, scale=3), 1 + rows(rng, width, dtype=dtype, scale=0.3)
    branch = rows(rng, number, width, dtype=dtype) if branched else None
    total, y, rstd = add_rms_norm(x, branch, weight, EPS)
    close(total, x.double() if branch is None else x.double() + branch.double())
    stream, scale = wide(total), wide(weight)  # normed is what was stored: the sum, rounded
    _, expected = reference_add_rms_norm(stream, None, scale, EPS)
    close(y, expected)
    d_y = rows(rng, number, width, dtype=dtype)
    d_total = rows(rng, number, width, dtype=dtype) if other_way else None
    d_x, d_weight, again = rms_norm_backward(d_y, total, weight, rstd, d_total)
    expected_x, expected_weight = torch.autograd.grad(expected, (stream, scale), d_y.double())
    close(d_x, expected_x if d_total is None else expected_x + d_total.double())
    close(d_weight, expected_weight)
    close(again, expected)


@few
@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([8, 24, 64, 128]), st.integers(1, 3), dtypes, seeds)
def test_norm_rotate(number, heads, width, parts, dtype, seed):
    """The heads are a slice of a wider product, as keys are beside values; so is where their gradient goes."""
    rng = torch.Generator().manual_seed(seed)
    product, weight = (
        rows(rng, number, parts, heads, width, dtype=dtype),
        1 + rows(rng, width, dtype=dtype, scale=0.3),
    )
    angles = torch.rand(number, 1, width // 2, generator=rng).to(DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    mine, expected_heads, scale = product[:, parts - 1], wide(product[:, parts - 1]), wide(weight)
    out = norm_rotate(mine, weight, cos, sin, EPS)
    expected = reference_norm_rotate(expected_heads, scale, cos.double(), sin.double(), EPS)
    close(out, expected)
    d_out = rows(rng, number, heads, width, dtype=dtype)
    d_product = torch.zeros_like(product)
    d_weight = norm_rotate_backward(d_out, mine, weight, cos, sin, EPS, into=d_product[:, parts - 1])
    d_heads, expected_weight = torch.autograd.grad(expected, (expected_heads, scale), d_out.double())
    close(d_product[:, parts - 1], d_heads)
    close(d_weight, expected_weight)
    assert not d_product[:, : parts - 1].any(), "wrote outside its slice"


@few
@given(st.integers(1, 20), st.integers(1, 2100), dtypes, seeds)
def test_swiglu(number, inner, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    gate, up = (rows(rng, number, inner, dtype=dtype, scale=2) for _ in range(2))
    d_out = rows(rng, number, inner, dtype=dtype)
    out, exact = swiglu(gate, up), (wide(gate), wide(up))
    expected = reference_swiglu(*exact)
    close(out, expected)
    expected_gate, expected_up = torch.autograd.grad(expected, exact, d_out.double())
    d_gate, d_up, again = swiglu_backward(d_out, gate, up)
    close(d_gate, expected_gate)
    close(d_up, expected_up)
    close(again, expected)


def test_norm_rotate_of_rows_taken_from_fewer():
    """Row r takes heads from row source[r]; the gradient of what it took comes out per row."""
    rng = torch.Generator().manual_seed(5)
    few_heads, weight = rows(rng, 3, 2, 16, dtype=torch.float32), 1 + rows(rng, 16, dtype=torch.float32, scale=0.3)
    source = torch.tensor([0, 2, 2, 1, 2, 0, 2], device=DEVICE)
    angles = torch.rand(7, 1, 8, generator=rng).to(DEVICE)
    rotary = (weight, angles.cos(), angles.sin(), EPS)
    taken, d_out = few_heads[source].contiguous(), rows(rng, 7, 2, 16, dtype=torch.float32)
    assert torch.equal(norm_rotate(few_heads, *rotary, source), norm_rotate(taken, *rotary))
    mine, expected = torch.empty_like(d_out), torch.empty_like(d_out)
    d_weight = norm_rotate_backward(d_out, few_heads, *rotary, source, into=mine)
    assert torch.equal(d_weight, norm_rotate_backward(d_out, taken, *rotary, into=expected))
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_same_inputs_give_the_same_bits(dtype):
    rng = torch.Generator().manual_seed(3)
    number, heads, width = 1500 if DEVICE == "cuda" else 20, 3, 16
    x, d_y = (rows(rng, number, heads * width, dtype=dtype) for _ in range(2))
    weight, head_weight = torch.rand(heads * width).to(DEVICE, dtype), torch.rand(width).to(DEVICE, dtype)
    angles = torch.rand(number, 1, width // 2).to(DEVICE)
    _, _, rstd = add_rms_norm(x, None, weight, EPS)
    by_head = x.view(number, heads, width)

    def once():
        into = torch.empty_like(by_head)
        rotary = (angles.cos(), angles.sin(), EPS)
        d_head = norm_rotate_backward(d_y.view_as(by_head), by_head, head_weight, *rotary, into=into)
        return *rms_norm_backward(d_y, x, weight, rstd), into, d_head

    first = once()
    for _ in range(3):
        assert all(torch.equal(mine, before) for mine, before in zip(once(), first, strict=True))


def test_long_rows_of_many_programs():
    """More rows than programs, at the width of a 27B target."""
    rng = torch.Generator().manual_seed(1)
    x, weight = rows(rng, 1060, 5120, dtype=torch.bfloat16), 1 + rows(rng, 5120, dtype=torch.bfloat16, scale=0.2)
    total, y, rstd = add_rms_norm(x, None, weight, EPS)
    stream, scale = wide(total), wide(weight)
    _, expected = reference_add_rms_norm(stream, None, scale, EPS)
    close(y, expected)
    d_y = rows(rng, 1060, 5120, dtype=torch.bfloat16)
    d_x, d_weight, _ = rms_norm_backward(d_y, total, weight, rstd)
    expected_x, expected_weight = torch.autograd.grad(expected, (stream, scale), d_y.double())
    close(d_x, expected_x)
    close(d_weight, expected_weight)
