"""The loss over a frozen head against plain autograd, and the metrics against counting."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.objective import block_loss, decay_weights, dpace_weights

BLOCKS, SIZE, WIDTH, VOCAB = 7, 5, 8, 33


def problem(dtype=torch.float64, seed=0, blocks=BLOCKS):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(blocks * SIZE, WIDTH, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, WIDTH, generator=rng, dtype=torch.float64).to(dtype)
    lengths = torch.randint(0, SIZE, (blocks, 1), generator=rng)
    lengths[:2] = torch.tensor([[SIZE - 1], [0]])[: len(lengths)]
    offsets = torch.arange(SIZE)
    supervised = (offsets >= 1) & (offsets <= lengths)
    labels = torch.randint(0, VOCAB, (blocks, SIZE), generator=rng).masked_fill(~supervised, -100)
    return hidden, head, labels, supervised


def reference_weights(kind, losses, supervised, gamma=4.0, alpha=0.5):
    weights = torch.zeros_like(losses)
    for block in range(losses.shape[0]):
        for k in range(1, SIZE):
            if not supervised[block, k]:
                continue
            if kind == "decay":
                weights[block, k] = math.exp(-(k - 1) / gamma)
                continue
            confidence = [(1 - alpha) * math.exp(-losses[block, i]) + alpha for i in range(SIZE)]
            weights[block, k] = sum(math.prod(confidence[1 : m + 1]) for m in range(k, SIZE) if supervised[block, m])
    return weights


def naive_terms(kind, hidden, head, labels, supervised):
    losses = F.cross_entropy(hidden @ head.T, labels.flatten(), reduction="none", ignore_index=-100)
    losses = losses.view(labels.shape)
    weights = reference_weights(kind, losses.detach(), supervised)
    return (weights * losses).sum(), weights.sum()


@pytest.mark.parametrize("chunk_rows", [1, 6, None])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_loss_and_gradient_equal_autograd(kind, chunk_rows):
    hidden, head, labels, supervised = problem()
    terms = block_loss(hidden, head, labels, supervised, kind=kind, gamma=4.0, chunk_rows=chunk_rows)
    num, den = naive_terms(kind, hidden, head, labels, supervised)
    torch.testing.assert_close(terms.num, num, rtol=1e-12, atol=0)
    torch.testing.assert_close(terms.den, den, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(terms.num / terms.den, hidden)
    (expected,) = torch.autograd.grad(num / den, hidden)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-13)


def test_gradcheck_of_decay():
    """D-PACE weights are constants to the gradient by definition, so only decay is the derivative of its value."""
    hidden, head, labels, supervised = problem(blocks=2)
    assert torch.autograd.gradcheck(lambda x: block_loss(x, head, labels, supervised, gamma=4.0).num, (hidden,))


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_bf16_is_close_to_fp64_of_the_same_numbers(kind):
    hidden, head, labels, supervised = problem(torch.bfloat16)
    terms = block_loss(hidden, head, labels, supervised, kind=kind, gamma=4.0)
    assert terms.num.dtype == terms.den.dtype == torch.float32
    wide = hidden.detach().double().requires_grad_()
    num, den = naive_terms(kind, wide, head.double(), labels, supervised)
    assert math.isclose(terms.metrics.loss, float((num / den).detach()), rel_tol=1e-2)
    (grad,) = torch.autograd.grad(terms.num / terms.den, hidden)
    (expected,) = torch.autograd.grad(num / den, wide)
    torch.testing.assert_close(grad.double(), expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_terms_add_up_over_any_split_of_the_blocks(kind):
    hidden, head, labels, supervised = problem()
    whole = block_loss(hidden, head, labels, supervised, kind=kind, gamma=4.0)
    parts = [
        block_loss(hidden[a * SIZE : b * SIZE], head, labels[a:b], supervised[a:b], kind=kind, gamma=4.0)
        for a, b in ((0, 1), (1, 4), (4, 7))
    ]
    torch.testing.assert_close(sum(part.num for part in parts), whole.num, rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(part.den for part in parts), whole.den, rtol=1e-12, atol=0)
    total = parts[0].metrics + parts[1].metrics + parts[2].metrics
    assert math.isclose(total.loss, whole.metrics.loss, rel_tol=1e-12)
    assert total.accept_length == whole.metrics.accept_length
    assert torch.equal(total.count, whole.metrics.count)


def test_rows_without_weight_never_meet_the_head():
    """NaN in every unsupervised row, offset 0 included, stays there."""
    hidden, head, labels, supervised = problem()
    clean = block_loss(hidden, head, labels, supervised, gamma=4.0)
    (expected,) = torch.autograd.grad(clean.num, hidden)
    dirty = hidden.detach().clone()
    dirty[~supervised.flatten()] = math.nan
    dirty.requires_grad_()
    terms = block_loss(dirty, head, labels, supervised, gamma=4.0)
    (grad,) = torch.autograd.grad(terms.num, dirty)
    assert torch.equal(terms.num, clean.num) and torch.equal(grad, expected)
    assert not grad[~supervised.flatten()].any()


def test_nothing_as_wide_as_the_vocabulary_is_kept_and_the_head_gets_no_gradient():
    hidden, head, labels, supervised = problem()
    kept = []

    def remember(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        terms = block_loss(hidden, head, labels, supervised, gamma=4.0)
    assert kept == [tuple(hidden.shape)]
    terms.num.backward()
    assert head.grad is None


def test_without_gradients_the_value_is_the_same():
    hidden, head, labels, supervised = problem()
    terms = block_loss(hidden, head, labels, supervised, kind="dpace")
    with torch.no_grad():
        quiet = block_loss(hidden, head, labels, supervised, kind="dpace")
    assert torch.equal(quiet.num, terms.num) and not quiet.num.requires_grad


def test_no_supervised_row_is_a_zero_with_a_zero_gradient():
    hidden, head, labels, supervised = problem()
    terms = block_loss(hidden, head, torch.full_like(labels, -100), torch.zeros_like(supervised))
    terms.num.backward()
    assert terms.num == 0 and terms.den == 0 and not hidden.grad.any()
    assert math.isnan(terms.metrics.loss) and math.isnan(terms.metrics.accept_length)


@pytest.mark.parametrize("gap", [5.0, 200.0, 5000.0])
def test_cross_entropy_is_exact_where_the_probability_underflows(gap):
    head = torch.eye(3)
    hidden = torch.tensor([[0.0, 0.0, 0.0], [gap, 0.0, 0.0]])
    labels, supervised = torch.tensor([[-100, 1]]), torch.tensor([[False, True]])
    terms = block_loss(hidden, head, labels, supervised)
    expected = float(torch.logsumexp(hidden[1].double(), 0) - hidden[1, 1])
    assert math.isclose(float(terms.num), expected, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("block_size", "gamma", "total", "second", "last"),
    [(16, 7, 6.631, 0.867, 0.135), (10, 5, 4.605, 0.819, 0.202), (8, 4, 3.735, 0.779, 0.223)],
)
def test_decay_weights_of_the_paper(block_size, gamma, total, second, last):
    weights = decay_weights(block_size, gamma)
    assert weights.shape == (block_size - 1,) and weights[0] == 1
    assert [round(float(w), 3) for w in (weights.sum(), weights[1], weights[-1])] == [total, second, last]


def test_dpace_weights_fall_with_the_offset_and_rise_with_confidence():
    supervised = torch.ones(2, 4, dtype=torch.bool)
    unsure, sure = dpace_weights(torch.tensor([[3.0] * 4, [0.1] * 4]), supervised, 0.5)
    assert torch.all(unsure.diff() < 0) and torch.all(sure.diff() < 0) and torch.all(sure > unsure)
    torch.testing.assert_close(
        dpace_weights(torch.rand(1, 4), supervised[:1], 1.0), torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    )


@settings(max_examples=50)
@given(
    hits=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_metrics_equal_counting(hits, lengths):
    """The head is the identity, so a row's arg-max is where its one is."""
    vocab = 8
    hidden = torch.zeros(len(hits) * SIZE, vocab)
    labels = torch.full((len(hits), SIZE), -100)
    supervised = torch.zeros(len(hits), SIZE, dtype=torch.bool)
    full, strict, correct, count = [], [], 0, 0
    for block, (row, length) in enumerate(zip(hits, lengths, strict=False)):
        for k in range(1, length + 1):
            labels[block, k], supervised[block, k] = k, True
            hidden[block * SIZE + k, k if row[k - 1] else 0] = 5.0
        leading = next((i for i, hit in enumerate(row[:length]) if not hit), length)
        correct, count = correct + sum(row[:length]), count + length
        full += [1 + leading] if length == 4 else []
        strict += [1 + leading] if length else []
    metrics = block_loss(hidden, torch.eye(vocab), labels, supervised).metrics
    for value, expected in (
        (metrics.accept_length, sum(full) / len(full) if full else math.nan),
        (metrics.strict_accept_length, sum(strict) / len(strict) if strict else math.nan),
        (metrics.accuracy, correct / count if count else math.nan),
    ):
        assert value == pytest.approx(expected, nan_ok=True)
    if full:
        assert 1 + sum(metrics.acceptance_by_offset) == pytest.approx(metrics.accept_length)
        assert metrics.acceptance_by_offset == sorted(metrics.acceptance_by_offset, reverse=True)


def test_mixed_dtypes_are_our_own_bug():
    hidden, head, labels, supervised = problem()
    with pytest.raises(AssertionError, match="head"):
        block_loss(hidden, head.float(), labels, supervised)
