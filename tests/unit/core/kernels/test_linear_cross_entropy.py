"""The fused head against torch in fp64: under Triton's interpreter without a GPU, compiled on one."""

import math

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.kernels.linear_cross_entropy import FusedHead, TorchHead
from dflash_core.objective import block_loss
from dflash_core.objective.scored_rows import ScoredRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, SIZE, WIDTH, VOCAB = 11, 5, 16, 157
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def poison(request):
    """Torch fills what it allocates without a value with NaN and the largest integers."""
    torch.use_deterministic_algorithms(request.cls is None, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def error(out, reference):
    out, reference = out.detach().double().cpu(), reference.detach().double().cpu()
    norm = reference.norm()
    return float((out - reference).norm() / norm) if norm > 0 else float(out.norm())


def random_rows(rng, rows, vocab, width, *, scale=1.0, dtype=torch.float32):
    hidden = torch.randn(rows, width, generator=rng, dtype=torch.float64) * scale
    head = torch.randn(vocab, width, generator=rng, dtype=torch.float64)
    labels = torch.randint(-1, vocab, (rows,), generator=rng)
    weights = torch.rand(rows, generator=rng)
    return hidden.to(DEVICE, dtype), head.to(DEVICE, dtype), labels.to(DEVICE), weights.to(DEVICE)


def truth(hidden, head, labels, weights, *, top_k=1):
    reference = TorchHead(head.double(), len(labels))
    scores = reference.score(hidden.double(), labels, top_k=top_k)
    return scores, reference.gradient(labels, weights.double())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    vocab=st.integers(2, 200),
    width=st.integers(1, 12),
    tile=st.sampled_from([16, 64, 256]),
    scale=st.sampled_from([1e-4, 1.0, 30.0]),
)
def test_any_shape_equals_fp64(seed, rows, vocab, width, tile, scale):
    """V on both sides of a tile and its multiples; tiny, ordinary and huge logits; labels at both ends."""
    hidden, head, labels, weights = random_rows(torch.Generator().manual_seed(seed), rows, vocab, width, scale=scale)
    labels[0], labels[-1] = 0, vocab - 1
    weights[rows // 2] = 0.0
    fused = FusedHead(head, rows + 3, tile=tile)
    scores = fused.score(hidden, labels)
    gradient = fused.gradient(labels, weights)
    expected, expected_gradient = truth(hidden, head, labels, weights)
    rounding = 1e-6 * max(1.0, float(expected.top_logits.abs().max()))  # of fp32 logits, which a tiny loss comes from
    torch.testing.assert_close(scores.losses.double(), expected.losses, rtol=1e-5, atol=rounding)
    slack = rounding * float(head.abs().max())
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=slack)
    scored = labels >= 0
    assert torch.equal(scores.top_ids[scored], expected.top_ids[scored])
    assert not scores.losses[~scored].any() and not gradient[~scored].any()
    assert not gradient[weights == 0].any()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), vocab=st.integers(1, 90), top_k=st.integers(1, 20), tile=st.sampled_from([16, 128]))
def test_top_k_of_few_values_with_many_ties_is_the_stable_order(seed, vocab, top_k, tile):
    """Small integers are exact in any order of summation, so equal logits are equal bit by bit."""
    rng, top_k = torch.Generator().manual_seed(seed), min(top_k, vocab)
    hidden = torch.randint(-2, 3, (4, 3), generator=rng).float().to(DEVICE)
    head = torch.randint(-1, 2, (vocab, 3), generator=rng).float().to(DEVICE)
    labels = torch.randint(0, vocab, (4,), generator=rng).to(DEVICE)
    scores = FusedHead(head, 4, tile=tile).score(hidden, labels, top_k=top_k)
    logits, ids = (hidden @ head.T).sort(dim=1, descending=True, stable=True)
    assert torch.equal(scores.top_ids, ids[:, :top_k])
    assert torch.equal(scores.top_logits, logits[:, :top_k])


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("gap", [1e-3, 20.0, 5000.0, 1e30])
def test_a_loss_keeps_its_digits(gap, label):
    """A confident row has a loss far below the rounding of its logits, a wrong one a probability below fp32."""
    hidden = torch.tensor([[gap, 0.0]], device=DEVICE)
    scores = FusedHead(torch.eye(2, device=DEVICE), 1).score(hidden, torch.tensor([label], device=DEVICE))
    other = gap if label == 1 else -gap
    expected = other + math.log1p(math.exp(-other)) if other > 0 else math.log1p(math.exp(other))
    assert float(scores.losses) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_bf16_stays_within_its_rounding():
    rng = torch.Generator().manual_seed(0)
    hidden, head, labels, weights = random_rows(rng, 64, 1000, 128, scale=0.3, dtype=torch.bfloat16)
    fused = FusedHead(head, 64, tile=256)
    scores = fused.score(hidden, labels)
    gradient = fused.gradient(labels, weights)
    expected, expected_gradient = truth(hidden, head, labels, weights)
    assert scores.losses.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert error(scores.losses, expected.losses) < 1e-2
    assert error(gradient, expected_gradient) < 1e-2


@pytest.mark.parametrize("head_type", [TorchHead, FusedHead])
def test_a_row_without_a_label_may_hold_anything(head_type):
    hidden, head, labels, weights = random_rows(torch.Generator().manual_seed(1), 8, VOCAB, WIDTH)
    labels[2:5], weights[2:5] = -100, math.nan
    results = []
    for garbage in (0.0, math.nan, math.inf):
        hidden[2:5] = garbage
        it = head_type(head, 8)
        results.append((it.score(hidden, labels).losses, it.gradient(labels, weights)))
        assert not results[-1][0][2:5].any() and not results[-1][1][2:5].any()
    assert all(torch.equal(loss, results[0][0]) and torch.equal(grad, results[0][1]) for loss, grad in results)


def test_a_logit_that_is_not_a_number_shows_in_the_loss():
    hidden, head, labels, _ = random_rows(torch.Generator().manual_seed(2), 3, VOCAB, WIDTH)
    labels[:] = 0
    hidden[1, 3] = math.nan
    losses = FusedHead(head, 3, tile=64).score(hidden, labels).losses
    assert losses.isnan().tolist() == [False, True, False]


def problem(seed=0, dtype=torch.float32, blocks=BLOCKS):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(blocks * SIZE, WIDTH, generator=rng).to(DEVICE, dtype).requires_grad_()
    head = torch.randn(VOCAB, WIDTH, generator=rng).to(DEVICE, dtype)
    lengths = torch.randint(0, SIZE, (blocks, 1), generator=rng)
    offsets = torch.arange(SIZE)
    supervised = (offsets >= 1) & (offsets <= lengths)
    labels = torch.randint(0, VOCAB, (blocks, SIZE), generator=rng).masked_fill(~supervised, -100)
    return hidden, head, labels, supervised


def assert_same_terms(terms, expected, hidden, expected_hidden):
    assert error(terms.num, expected.num) < 1e-5 and error(terms.den, expected.den) < 1e-5
    (gradient,) = torch.autograd.grad(terms.num / terms.den, hidden)
    (expected_gradient,) = torch.autograd.grad(expected.num / expected.den, expected_hidden)
    assert error(gradient, expected_gradient) < 1e-5
    for name in ("correct", "count", "accepted", "full_blocks", "strict_length", "blocks"):
        assert torch.equal(getattr(terms.metrics, name).cpu(), getattr(expected.metrics, name).cpu()), name


@pytest.mark.parametrize("chunk_rows", [1, 6, 20, None])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_the_loss_equals_its_torch_path_in_fp64(kind, chunk_rows):
    hidden, head, labels, supervised = problem()
    terms = block_loss(hidden, head, labels, supervised, kind=kind, chunk_rows=chunk_rows, fused=True)
    wide = hidden.detach().double().requires_grad_()
    expected = block_loss(wide, head.double(), labels, supervised, kind=kind)
    assert_same_terms(terms, expected, hidden, wide)


def test_the_loss_is_the_same_bit_by_bit():
    def once():
        hidden, head, labels, supervised = problem()
        terms = block_loss(hidden, head, labels, supervised, kind="dpace", chunk_rows=12, fused=True)
        return terms.num, *torch.autograd.grad(terms.num, hidden)

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_the_loss_of_nothing_is_zero():
    hidden, head, labels, supervised = problem()
    terms = block_loss(hidden, head, labels, torch.zeros_like(supervised), fused=True)
    terms.num.backward()
    assert terms.num == 0 and terms.den == 0 and not hidden.grad.any()


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(("limit", "multiple"), [(1, 1), (9, 1), (9, 8), (100, 16)])
def test_rows_to_score_are_all_there_in_whole_blocks(limit, multiple, every):
    _, _, labels, supervised = problem(seed=3)
    rows = ScoredRows.of(labels, supervised, torch.device("cpu"), limit=limit, multiple=multiple, every=every)
    wanted = torch.ones_like(supervised) if every else supervised
    for index, blocks in rows.chunks:
        assert len(index) <= rows.capacity and len(index) % multiple == 0
        cells = (torch.arange(BLOCKS)[blocks, None] * SIZE + torch.arange(SIZE))[:, 1:]
        assert torch.equal(index[index > 0], cells[wanted[blocks, 1:]])
    assert sum(int((index > 0).sum()) for index, _ in rows.chunks) == int(wanted[:, 1:].sum())
    assert torch.equal(rows.labels >= 0, supervised)


def test_the_capacity_knows_nothing_of_the_labels():
    labels = torch.zeros(512, 16, dtype=torch.long)
    full = torch.arange(16).expand(512, 16) >= 1
    for supervised in (full, full & (torch.arange(512)[:, None] < 3)):
        rows = ScoredRows.of(labels, supervised, torch.device("cpu"), limit=2048, multiple=128)
        assert rows.capacity == 2048
        assert [len(index) for index, _ in rows.chunks] == ([2048] * 3 + [1664] if supervised is full else [128])


class TestOnTheDevice:
    pytestmark = needs_gpu

    @pytest.fixture
    def real(self):
        """16 blocks of 16 rows at the shape of Qwen3-8B's head."""
        rng = torch.Generator(DEVICE).manual_seed(0)
        hidden, head = (
            torch.randn(rows, 4096, generator=rng, device=DEVICE).mul_(scale).bfloat16()
            for rows, scale in ((256, 1.0), (151_936, 0.03))
        )
        supervised = torch.arange(16) <= torch.randint(0, 16, (16, 1))
        supervised[:, 0] = False
        labels = torch.randint(0, 151_936, (16, 16)).masked_fill(~supervised, -100)
        return hidden.requires_grad_(), head, labels, supervised

    @pytest.mark.parametrize("kind", ["decay", "dpace"])
    def test_a_real_shape(self, real, kind):
        hidden, head, labels, supervised = real
        terms = block_loss(hidden, head, labels, supervised, kind=kind)
        wide = hidden.detach().float().requires_grad_()
        expected = block_loss(wide, head.float(), labels, supervised, kind=kind, fused=False)
        assert error(terms.num, expected.num) < 1e-2
        assert error(*(torch.autograd.grad(t.num, x)[0] for t, x in ((terms, hidden), (expected, wide)))) < 1e-2

    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    def test_nothing_waits_and_nothing_compiles_again(self, real, where):
        hidden, head, labels, supervised = real
        block_loss(hidden, head, labels, supervised).num.backward()
        few = torch.zeros_like(supervised)
        few[3, 1:2] = True
        labels, supervised, few = labels.to(where), supervised.to(where), few.to(where)
        compiled = []
        triton.knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(details["repr"])
        torch.cuda.set_sync_debug_mode("error")
        try:
            for chosen in (supervised, few):
                for kind in ("decay", "dpace"):
                    block_loss(hidden, head, labels, chosen, kind=kind, chunk_rows=100).num.backward()
            assert not compiled
            FusedHead(head, 1, tile=32).score(hidden[:1], torch.ones(1, dtype=torch.long, device=DEVICE))
            assert compiled, "the hook sees what it should"
        finally:
            torch.cuda.set_sync_debug_mode("default")
            triton.knobs.runtime.jit_post_compile_hook = None

    def test_a_graph_replays_it_with_other_labels(self, real):
        hidden, head, labels, supervised = real
        labels, supervised = labels.to(DEVICE), supervised.to(DEVICE)

        def step():
            terms = block_loss(hidden, head, labels, supervised, kind="dpace", chunk_rows=100)
            return terms.num, torch.autograd.grad(terms.num, hidden)[0]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = step()
        for _ in range(2):
            labels.random_(0, 151_936)
            supervised.copy_(supervised.roll(1, 0))
            graph.replay()
            for a, b in zip(replayed, step(), strict=True):
                assert torch.equal(a, b)
