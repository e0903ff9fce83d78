"""Block attention against the reference in fp64: interpreted on a CPU, compiled where there is a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import SPANS, inputs, layout_of

from dflash_core.attention import block_attention
from dflash_core.attention.triton import TritonAttention
from dflash_core.kernels import block_attention as kernels
from dflash_core.kernels.block_attention_tiles import INTERPRETED, LARGE, SMALL, WIDE, tiles_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16
# ‖out - ref‖ / ‖ref‖. fp32 rounds sums of up to a few thousand terms; bf16 and fp16 round probabilities as well.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
RULE = {"scale": 0.3, "sliding_window": None, "causal": False}


@pytest.fixture(autouse=True)
def poisoned():
    """Torch fills what it allocates without a value with NaN, so that a row that a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def both_passes(tensors, layout, grad, **options):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    out = block_attention(*tensors, layout, **options)
    return out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))


def kept_bytes_of_a_head(layout, rows, *, group):
    """What gradients of the scores of one key/value head need in fp32."""
    side = tiles_for(torch.empty(1, 1, 16, device=DEVICE)).key.keys
    row_tiles, slots = -(-layout.num_rows // side), -(-rows // side) + (1 if side % layout.block_size == 0 else 3)
    return row_tiles * slots * side * side * group * 4


def assert_equal_to_reference(tensors, layout, **rule):
    """Forward and gradients, and the same bits a second time; returns the results."""
    tensors, layout = [tensor.to(DEVICE) for tensor in tensors], layout.to(DEVICE)
    rng = torch.Generator().manual_seed(1)
    grad = torch.randn(tensors[0].shape, generator=rng).to(DEVICE, tensors[0].dtype)
    mine = both_passes(tensors, layout, grad, **rule, backend=TritonAttention())
    again = both_passes(tensors, layout, grad, **rule, backend=TritonAttention())
    expected = both_passes([tensor.double() for tensor in tensors], layout, grad, **rule)
    for name, result, same, true in zip(
        ("out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk"), mine, again, expected, strict=True
    ):
        assert result.dtype == tensors[0].dtype
        assert torch.equal(result, same), f"{name} differs between two runs"
        error = (result.double() - true).norm() / true.norm().clamp_min(1e-6)
        assert error < TOLERANCE[tensors[0].dtype], f"{name}: {error}"
    return mine


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 6])
def test_equals_the_reference_in_documents_and_unused_slots(sliding_window, causal, heads):
    layout = layout_of(SPANS, 4)
    tensors = inputs(layout, 40, heads=heads[0], kv_heads=heads[1], dtype=torch.float32)
    assert_equal_to_reference(tensors, layout, scale=0.3, sliding_window=sliding_window, causal=causal)


documents = st.tuples(st.integers(0, 48), st.integers(0, 48)).map(lambda pair: (min(pair), max(pair)))


@settings(max_examples=10)
@given(
    spans=st.lists(st.none() | documents, min_size=1, max_size=4),
    rows=st.integers(48, 64),
    block_size=st.sampled_from([2, 5, 8, 16]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 8),
    width=st.sampled_from([16, 24, 64]),
    window=st.none() | st.integers(16, 40),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float32, HALF]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_reference_on_any_shape(
    spans, rows, block_size, kv_heads, group, width, window, causal, dtype, seed
):
    # One block with many keys, so that no gradient is nothing but what is left of terms that cancel.
    layout = layout_of([*spans, (5, 45)], block_size)
    tensors = inputs(layout, rows, heads=kv_heads * group, kv_heads=kv_heads, width=width, seed=seed)
    tensors = [tensor.to(dtype) for tensor in tensors]
    assert_equal_to_reference(tensors, layout, scale=width**-0.5, sliding_window=window, causal=causal)


def test_sorted_anchors_use_tiles_without_a_mask():
    """Enough context that whole tiles are seen by all rows of a program, in two documents and with a window."""
    spans = [(0, 40 + 7 * i) for i in range(4)] + [(70, 110 + 9 * i) for i in range(4)] + [None]
    layout = layout_of(spans, 8)
    tensors = inputs(layout, 140, heads=2, kv_heads=1, width=16, dtype=torch.float32)
    for window in (None, 60):
        assert_equal_to_reference(tensors, layout, scale=0.25, sliding_window=window, causal=False)


def test_unused_slots_are_exact_zeros_and_get_exact_zeros():
    layout = layout_of([(0, 9), None, (0, 30), None, None], 8)
    tensors = inputs(layout, 32, width=16, dtype=torch.float32)
    unused = (~layout.valid).repeat_interleave(8)
    for tensor in (tensors[0], tensors[3], tensors[4]):
        tensor.data[unused] = 1e4
    out, d_q, _, _, d_k_blk, d_v_blk = assert_equal_to_reference(tensors, layout, **RULE)
    for rows in (out, d_q, d_k_blk, d_v_blk):
        assert torch.equal(rows[unused.to(DEVICE)], torch.zeros_like(rows[unused.to(DEVICE)]))


def test_a_row_without_any_block_is_all_zeros():
    layout = layout_of([None, None], 4)
    for result in assert_equal_to_reference(inputs(layout, 8, dtype=torch.float32), layout, **RULE):
        assert not result.any()


def test_context_behind_every_anchor_gets_no_gradient():
    layout = layout_of([(0, 3), (0, 20)], 4)
    _, _, d_k, d_v, _, _ = assert_equal_to_reference(inputs(layout, 80, dtype=torch.float32), layout, **RULE)
    assert not d_k[20:].any() and not d_v[20:].any()
    assert d_k[:20].abs().sum(dim=(1, 2)).all()


def test_rows_of_a_wider_buffer_are_read_in_place():
    """Keys and values of all layers come out of one product: rows are then further apart than they are wide."""
    layout = layout_of([(0, 9), (0, 30)], 8)
    tensors = inputs(layout, 32, heads=4, kv_heads=2, width=16, dtype=torch.float32)
    wide = [torch.randn(len(tensor), 3, *tensor.shape[1:]) for tensor in tensors]
    for buffer, tensor in zip(wide, tensors, strict=True):
        buffer[:, 1] = tensor
    views = [buffer[:, 1] for buffer in wide]
    assert all(kernels._heads_together(view) is view for view in views)
    assert_equal_to_reference(views, layout, **RULE)


def test_large_scores_do_not_overflow():
    layout = layout_of([(0, 4), (0, 40)], 4)
    tensors = [tensor * 200 for tensor in inputs(layout, 40, width=16, dtype=torch.float32)]
    out = both_passes(tensors, layout, torch.ones_like(tensors[0]), **RULE, backend=TritonAttention())
    assert all(result.isfinite().all() for result in out)


@pytest.mark.parametrize("tiles", [INTERPRETED, *LARGE.values(), *SMALL.values(), *WIDE.values()])
def test_kept_scores_are_written_and_read_in_the_same_squares(tiles):
    assert tiles.key.rows == tiles.key.keys == tiles.kept.rows == tiles.kept.keys
    assert tiles.heads * tiles.kept.rows <= 256, "more than one copy of the hardware takes"


def test_parts_of_the_rows_cover_all_tiles():
    for programs in (1, 8, 64, 192, 511, 512, 4096):
        for row_tiles in (1, 2, 3, 100):
            splits = kernels._splits(programs, row_tiles)
            assert splits <= row_tiles
            assert programs * splits >= kernels.KEY_PROGRAMS or splits * 2 > row_tiles


@pytest.mark.parametrize("heads_at_once", [1, 2, 3])
@pytest.mark.parametrize("block_size", [5, 4])
def test_scores_that_are_kept_and_computed_again_give_the_same_gradients(heads_at_once, block_size, monkeypatch):
    """Blocks of 5 straddle tiles; a buffer for two of three heads leaves one for a second turn."""
    layout = layout_of(SPANS, block_size)
    tensors = inputs(layout, 40, heads=6, kv_heads=3, width=16, dtype=torch.float32)
    again = assert_equal_to_reference(tensors, layout, scale=0.3, sliding_window=9, causal=True)
    turns, take_turn = [], kernels._Backward._kept_query_gradients
    monkeypatch.setattr(
        kernels._Backward,
        "_kept_query_gradients",
        lambda self, kept, heads: turns.append(len(heads)) or take_turn(self, kept, heads),
    )
    monkeypatch.setattr(kernels, "KEPT_BYTES", heads_at_once * kept_bytes_of_a_head(layout, 40, group=2))
    kept = assert_equal_to_reference(tensors, layout, scale=0.3, sliding_window=9, causal=True)
    assert turns == 2 * {1: [1, 1, 1], 2: [2, 1], 3: [3]}[heads_at_once]
    for result, same in zip(kept, again, strict=True):
        assert (result - same).norm() <= 1e-6 * same.norm()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "width", "dtype"),
    [
        (16, 8, 2, 128, torch.bfloat16),
        (8, 8, 8, 64, torch.bfloat16),
        (12, 6, 2, 80, torch.float16),
        (32, 16, 2, 256, torch.bfloat16),
        (16, 8, 2, 64, torch.float32),
    ],
)
def test_equals_the_reference_at_real_sizes(block_size, heads, kv_heads, width, dtype):
    rng = torch.Generator().manual_seed(0)
    anchors = torch.randint(0, 1000, (48,), generator=rng).sort().values.tolist()
    layout = layout_of([(500 if anchor >= 500 else 0, anchor) for anchor in anchors] + [None] * 3, block_size)
    tensors = inputs(layout, 1000, heads=heads, kv_heads=kv_heads, width=width, dtype=torch.float32)
    tensors = [tensor.to(dtype) for tensor in tensors]
    for window, causal in ((None, False), (200, True)):
        assert_equal_to_reference(tensors, layout, scale=width**-0.5, sliding_window=window, causal=causal)
