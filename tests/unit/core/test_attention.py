"""The attention reference against loops over rows and keys."""

import math
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import SPANS, inputs, layout_of

from dflash_core.attention import (
    BACKENDS,
    BlockLayout,
    backend_name,
    block_attention,
    make_backend,
    reference,
    reference_attention,
)
from dflash_core.config import TrainConfig
from dflash_core.errors import ConfigError


def looped_attention(q, k_ctx, v_ctx, k_blk, v_blk, layout, *, scale, sliding_window=None, causal=False):
    """Every row by itself, from the definition."""
    size, group = layout.block_size, q.shape[1] // k_ctx.shape[1]
    out = []
    for row in range(layout.num_rows):
        block, offset = divmod(row, size)
        if not layout.valid[block]:
            out.append(torch.zeros_like(q[row]))
            continue
        lo, anchor = int(layout.lo[block]), int(layout.hi[block])
        first = lo if sliding_window is None else max(lo, anchor + offset - (sliding_window - 1))
        context = list(range(first, anchor))
        block_rows = [block * size + i for i in range(size) if i <= offset or not causal]
        keys, values = torch.cat([k_ctx[context], k_blk[block_rows]]), torch.cat([v_ctx[context], v_blk[block_rows]])
        heads = []
        for head in range(q.shape[1]):
            weights = torch.softmax(keys[:, head // group] @ q[row, head] * scale, dim=0)
            heads.append(weights @ values[:, head // group])
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 4, 6, 100])
def test_reference_equals_loops_forward_and_backward(sliding_window, causal, heads):
    layout = layout_of(SPANS, 4)
    tensors = inputs(layout, 40, heads=heads[0], kv_heads=heads[1])
    rule = {"scale": 0.3, "sliding_window": sliding_window, "causal": causal}
    out, expected = block_attention(*tensors, layout, **rule), looped_attention(*tensors, layout, **rule)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@settings(max_examples=25)
@given(
    spans=st.lists(
        st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p))),
        min_size=1,
        max_size=6,
    ),
    block_size=st.integers(2, 5),
    sliding_window=st.none() | st.integers(5, 12),
    causal=st.booleans(),
)
def test_reference_equals_loops_on_any_layout(spans, block_size, sliding_window, causal):
    layout = layout_of(spans, block_size)
    tensors = inputs(layout, 20, heads=2, kv_heads=1, width=4)
    rule = {"scale": 0.5, "sliding_window": sliding_window, "causal": causal}
    out = block_attention(*tensors, layout, **rule)
    torch.testing.assert_close(out, looped_attention(*tensors, layout, **rule), rtol=0, atol=1e-13)


@pytest.mark.parametrize("limit", [1, 500, 1 << 30])
def test_the_chunk_size_does_not_matter(limit, monkeypatch):
    layout = layout_of(SPANS, 4)
    tensors = inputs(layout, 40)
    whole = block_attention(*tensors, layout, scale=0.3)
    grads = torch.autograd.grad(whole.sum(), tensors)
    monkeypatch.setattr(reference, "CHUNK_SCORES_CPU", limit)
    out = block_attention(*tensors, layout, scale=0.3)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-13)
    for mine, theirs in zip(torch.autograd.grad(out.sum(), tensors), grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_chunks_cover_every_valid_block_once_and_never_score_another_document():
    spans = [(100 * d, 100 * d + 10 * i) for d in range(5) for i in range(10)] + [None] * 3
    layout = layout_of(spans, 8)
    for window in (None, 16):
        chunks = reference.plan_chunks(layout, sliding_window=window, num_heads=4, limit=20_000)
        covered = [block for chunk in chunks for block in range(chunk.first, chunk.last)]
        assert covered == list(range(50))
        for chunk in chunks:
            documents = {spans[block][0] for block in range(chunk.first, chunk.last)}
            assert len(documents) == 1 and chunk.lo >= documents.pop()
            assert chunk.hi == max(spans[block][1] for block in range(chunk.first, chunk.last))
            blocks = chunk.last - chunk.first
            assert blocks == 1 or blocks * 8 * 4 * (chunk.hi - chunk.lo + 8) <= 20_000


def test_unused_slots_are_zeros_and_get_no_gradient():
    layout = layout_of([None, (0, 3), None], 4)
    tensors = inputs(layout, 8)
    with torch.no_grad():
        for tensor in (tensors[0], tensors[3], tensors[4]):
            tensor[:4] = math.nan
    out = block_attention(*tensors, layout, scale=0.3)
    assert torch.equal(out[:4], torch.zeros_like(out[:4])) and torch.equal(out[8:], torch.zeros_like(out[8:]))
    for grad in torch.autograd.grad(out.sum(), tensors):
        assert grad.isfinite().all()


def test_a_layout_without_any_valid_block_is_all_zeros():
    layout = layout_of([None, None], 4)
    tensors = inputs(layout, 8)
    out = block_attention(*tensors, layout, scale=0.3)
    assert not out.any()
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), tensors))


def test_bf16_inputs_are_accumulated_in_fp32():
    layout = layout_of([(0, 300), (0, 511)], 8)
    tensors = [tensor.detach().bfloat16() for tensor in inputs(layout, 512, dtype=torch.float32)]
    wide = block_attention(*(tensor.double() for tensor in tensors), layout, scale=0.3)
    out = block_attention(*tensors, layout, scale=0.3)
    assert out.dtype == torch.bfloat16
    # One rounding of the result to bf16 (8 bits) is the only error that is left.
    torch.testing.assert_close(out.double(), wide, rtol=2**-8, atol=1e-5)


def test_large_scores_do_not_overflow():
    layout = layout_of([(0, 4)], 2)
    tensors = [tensor.detach().float() * 200 for tensor in inputs(layout, 4)]
    assert block_attention(*tensors, layout, scale=1.0).isfinite().all()


def test_an_unknown_backend_is_an_error_that_names_the_setting():
    with pytest.raises(ConfigError) as error:
        make_backend("refrence", "cpu")
    assert error.value.key == "train.attention"
    assert "'refrence'" in error.value.what and "auto, flex, reference" in error.value.fix


def test_the_setting_knows_every_backend():
    setting = typing.get_type_hints(TrainConfig)["attention"]
    assert set(typing.get_args(setting)) == {"auto", *BACKENDS}


def test_auto_is_what_can_train_on_the_device():
    assert backend_name("auto", "cpu") == "reference"
    assert make_backend("auto", "cpu") is reference_attention
    assert backend_name("auto", "cuda:1") == ("triton" if "triton" in BACKENDS else "reference")


def test_layout_positions_count_within_the_document_and_travel():
    layout = layout_of([(10, 13), None], 3).to("cpu")
    assert layout.positions().tolist() == [3, 4, 5, 0, 1, 2]
    assert layout.spans == [(10, 13), None]
    assert BlockLayout.single(7, 3, "cpu").spans == layout_of([(0, 7)], 3).spans
