"""The fused forward and backward against plain torch: the same model, the same parameters, the same gradients.

Kernels run in Triton's interpreter without a GPU. Tolerances are relative norms: 1e-5 in fp32, 4e-2 in bf16 (two layers
that round at different places; against fp64 both are equally far).
"""

import copy

import numpy as np
import pytest
import torch

from dflash_core.drafter import model as plain
from dflash_core.drafter.fused import can_fuse, settle
from dflash_core.objective import block_labels, block_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLIDING, FULL = "sliding_attention", "full_attention"
POSITIONS = [3, 4, 9, 20, 21, 33]


@pytest.fixture
def fused(monkeypatch):
    """Switches the fused path on or off, whatever the device."""
    return lambda on: monkeypatch.setattr(plain, "can_fuse", lambda rows, *, biased: on)


def hidden_states(bench, row, anchors):
    layout = anchors.layout(bench.config.block_size).to(DEVICE)
    return bench.drafter(
        bench.embeds(row, anchors).to(DEVICE),
        bench.drafter.context_features(row.taps.to(DEVICE)),
        layout=layout,
        block_positions=layout.positions(),
        context_positions=row.position_ids.to(DEVICE),
    )


def loss_and_grads(bench, row, positions=POSITIONS):
    """Loss, hidden states and the gradient of every parameter."""
    bench.drafter.zero_grad()
    anchors = bench.anchors(row, positions)
    labels, supervised = block_labels(row.input_ids, row.loss_mask, row.document_ids, anchors, bench.config.block_size)
    hidden = hidden_states(bench, row, anchors)
    terms = block_loss(hidden, bench.head.to(DEVICE), labels, supervised, gamma=4.0)
    terms.num.backward()
    return terms.num.detach(), hidden.detach(), [parameter.grad.clone() for parameter in bench.drafter.parameters()]


def relative(mine, expected):
    return float((mine.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("layers", [{}, {"layer_types": (SLIDING, FULL), "sliding_window": 6, "is_causal": None}])
def test_fused_equals_plain(tiny_bench, fused, dtype, tolerance, layers):
    bench = tiny_bench(dtype=dtype, std=0.15, **layers)
    bench.drafter.to(DEVICE)
    row = bench.row(24, 21, padding=3)
    fused(False)
    loss, hidden, grads = loss_and_grads(bench, row)
    fused(True)
    mine = loss_and_grads(bench, row)
    assert relative(mine[0], loss) < tolerance and relative(mine[1], hidden) < tolerance
    names = [name for name, _ in bench.drafter.named_parameters()]
    for name, grad, expected in zip(names, mine[2], grads, strict=True):
        assert relative(grad, expected) < tolerance, name


def test_settled_weights_are_the_same_parameters_with_the_same_values(tiny_bench):
    drafter = tiny_bench().drafter
    before = dict(drafter.named_parameters())
    values = copy.deepcopy(drafter.state_dict())
    attention = drafter.layers[1].self_attn
    settle(attention.q_proj, attention.k_proj, attention.v_proj)
    places = {name: parameter.data_ptr() for name, parameter in drafter.named_parameters()}
    settle(attention.q_proj, attention.k_proj, attention.v_proj)
    for name, parameter in drafter.named_parameters():
        assert parameter is before[name] and torch.equal(parameter, values[name])
        assert places[name] == parameter.data_ptr(), "settled once, nothing moves again"
    q, k, v = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
    assert (k.storage_offset(), v.storage_offset()) == (q.numel(), q.numel() + k.numel())


def test_neighbours_in_memory_that_share_no_storage_are_settled_too():
    """As a GPU's allocator places small weights."""
    row = np.arange(12, dtype=np.float32)
    linears = [torch.nn.Linear(4, 1, bias=False) for _ in range(3)]
    for n, linear in enumerate(linears):
        linear.weight.data = torch.from_numpy(row[4 * n : 4 * n + 4]).view(1, 4)
    first, second, _ = (linear.weight for linear in linears)
    assert second.data_ptr() == first.data_ptr() + 16
    settle(*linears)
    assert second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert torch.equal(first.as_strided((3, 4), (4, 1)), torch.arange(12.0).view(3, 4))


def test_weights_that_moved_apart_still_give_the_same_result(tiny_bench, fused):
    """A copy of the module, or a cast, gives every parameter a storage of its own again."""
    bench = tiny_bench(std=0.15)
    bench.drafter.to(DEVICE)
    fused(True)
    row = bench.row(40)
    loss, _, grads = loss_and_grads(bench, row)
    twin = type(bench)(copy.deepcopy(bench.drafter), bench.embed, bench.head)
    again = loss_and_grads(twin, row)
    assert torch.equal(again[0], loss)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again[2], grads, strict=True))


def test_a_second_backward_pass_is_refused(tiny_bench, fused):
    bench = tiny_bench()
    bench.drafter.to(DEVICE)
    fused(True)
    row = bench.row(40)
    hidden = hidden_states(bench, row, bench.anchors(row, POSITIONS))
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="second one needs a new forward"):
        hidden.sum().backward()


def test_what_the_kernels_do_not_cover_takes_the_plain_path():
    rows = torch.zeros(2, 2)
    assert not can_fuse(rows, biased=False)
    if torch.cuda.is_available():
        assert can_fuse(rows.cuda(), biased=False)
        assert not can_fuse(rows.cuda(), biased=True) and not can_fuse(rows.cuda().double(), biased=False)
