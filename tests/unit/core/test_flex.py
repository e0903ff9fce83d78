"""The flex backend against the reference: the mask rule and the forward on a CPU, everything on a GPU."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import SPANS, inputs, layout_of
from torch.nn.attention.flex_attention import create_mask

from dflash_core.attention import block_attention, check_backend, make_backend
from dflash_core.attention.flex import DenseFallback, FlexAttention, mask_rule
from dflash_core.compile.environment import configure_thread
from dflash_core.errors import ConfigError

RULES = [{"sliding_window": window, "causal": causal, "scale": 0.3} for window in (None, 6) for causal in (False, True)]
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention trains on a GPU only"),
]


def visible(layout, rows, sliding_window, causal):
    """Which of the S + T keys each row sees, `[T, S + T]`, from the definition in `block_attention`."""
    size = layout.block_size
    seen = torch.zeros(layout.num_rows, rows + layout.num_rows, dtype=torch.bool)
    for row in range(layout.num_rows):
        block, offset = divmod(row, size)
        if layout.spans[block] is None:
            continue
        lo, anchor = layout.spans[block]
        first = lo if sliding_window is None else max(lo, anchor + offset - (sliding_window - 1))
        seen[row, first:anchor] = True
        last = offset + 1 if causal else size
        seen[row, rows + block * size : rows + block * size + last] = True
    return seen


@settings(max_examples=40)
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
def test_the_mask_is_the_rule(spans, block_size, sliding_window, causal):
    layout = layout_of(spans, block_size)
    rule = mask_rule(layout.lo, layout.hi, layout.valid, block_size, 20, sliding_window, causal)
    mask = create_mask(rule, 1, 1, layout.num_rows, 20 + layout.num_rows, device="cpu")
    assert torch.equal(mask[0, 0], visible(layout, 20, sliding_window, causal))


@pytest.fixture
def thread():
    """Compile options as in a worker, for the calling thread."""
    configure_thread()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("rule", RULES)
def test_the_compiled_forward_is_the_reference(thread, rule):
    layout = layout_of(SPANS, 4)
    tensors = [tensor.detach() for tensor in inputs(layout, 40, width=16, dtype=torch.float32)]
    out = block_attention(*tensors, layout, **rule, backend=FlexAttention(compiler="aot_eager"))
    torch.testing.assert_close(out, block_attention(*tensors, layout, **rule), rtol=0, atol=2e-6)
    assert not out[12:16].any() and not out[32:].any(), "rows of unused slots are zeros"


@pytest.mark.slow
def test_the_forward_of_inductor_is_the_reference(thread):
    layout, rule = layout_of(SPANS, 4), RULES[-1]
    tensors = [tensor.detach() for tensor in inputs(layout, 40, width=16, dtype=torch.float32)]
    out = block_attention(*tensors, layout, **rule, backend=FlexAttention())
    torch.testing.assert_close(out, block_attention(*tensors, layout, **rule), rtol=0, atol=2e-6)


def test_the_gradients_are_those_of_the_reference(thread, monkeypatch):
    """The operator's backward works on a CPU; torch only forbids it there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    layout, rule = layout_of(SPANS, 4), RULES[-1]
    tensors = inputs(layout, 40, width=16, dtype=torch.float32)
    outs = [
        block_attention(*tensors, layout, **rule, **way)
        for way in ({"backend": FlexAttention(compiler="aot_eager")}, {})
    ]
    grad = torch.randn_like(outs[0])
    for mine, theirs in zip(*(torch.autograd.grad(out, tensors, grad) for out in outs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6)


def test_layers_share_a_mask_and_another_layout_gets_its_own(thread):
    flex = FlexAttention(compiler="eager")
    made = []
    make = flex._block_mask
    flex._block_mask = lambda *args: made.append(args[-2:]) or make(*args)
    layouts = [layout_of([(0, hi), None], 4) for hi in (3, 9)]
    for layout in layouts:
        tensors = [tensor.detach() for tensor in inputs(layout, 10, width=16, dtype=torch.float32)]
        for rule in (RULES[0], RULES[2], RULES[0], RULES[2]):
            out = block_attention(*tensors, layout, **rule, backend=flex)
            torch.testing.assert_close(out, block_attention(*tensors, layout, **rule), rtol=0, atol=2e-6)
    assert made == [(None, False), (6, False)] * 2


# -- the dense fallback ---------------------------------------------------------------------------------------------


def call(flex, rows=10):
    layout = layout_of([(0, 3), None], 4)
    tensors = [tensor.detach() for tensor in inputs(layout, rows, width=16, dtype=torch.float32)]
    return block_attention(*tensors, layout, **RULES[0], backend=flex)


def test_eager_execution_raises(thread):
    flex = FlexAttention(compiler="eager")
    call(flex)
    with torch.compiler.set_stance("force_eager"), pytest.raises(DenseFallback, match="create_block_mask was not comp"):
        call(flex)
    mask_made = FlexAttention(compiler="eager")
    mask_made._block_mask = flex._block_mask
    mask_made._attend = torch.compiler.disable(flex._attend)
    with pytest.raises(DenseFallback, match="flex_attention was not compiled"):
        call(mask_made)


def test_a_graph_break_raises(thread, monkeypatch):
    def breaks(*_):
        torch._dynamo.graph_break()

    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", breaks)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"graph_break"):
        call(FlexAttention(compiler="eager"))


def test_more_shapes_than_the_recompile_limit_raise(thread):
    configure_thread(recompile_limit=2)
    flex = FlexAttention(compiler="eager")
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for rows in range(10, 16):
            call(flex, rows)


def test_workers_do_not_share_the_recompile_limit(thread):
    """Four workers with a shape each: more graphs than one code object would hold."""
    failures = []

    def work(rows):
        configure_thread(recompile_limit=1)
        try:
            call(FlexAttention(compiler="eager"), rows)
        except Exception as error:
            failures.append(error)

    for rows in range(10, 14):
        worker = threading.Thread(target=work, args=(rows,))
        worker.start()
        worker.join()
    assert not failures


# -- where it is refused --------------------------------------------------------------------------------------------


def test_a_cpu_is_refused_in_words():
    with pytest.raises(ConfigError) as error:
        make_backend("flex", "cpu")
    assert error.value.key == "train.attention"
    assert (error.value.what, error.value.fix) == (
        "train.attention: flex cannot train on cpu",
        "set train.attention to auto or reference, or topology.drafters to GPUs",
    )
    assert "no backward pass" in error.value.why


@pytest.mark.parametrize(
    ("variable", "words"), [("TORCHINDUCTOR_CUDAGRAPHS", "CUDA graphs"), ("TORCH_COMPILE_DISABLE", "switched off")]
)
def test_an_environment_that_breaks_it_is_refused_in_words(monkeypatch, variable, words):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=words) as error:
        check_backend("flex", "cuda:0")
    assert variable in error.value.fix
    check_backend("reference", "cuda:0")


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
class TestOnAGpu:
    pytestmark = gpu

    def test_forward_and_gradients_are_those_of_the_reference(self, thread, rule, dtype):
        """Against the reference in fp64; bf16 may be as far off as the reference in bf16 is, and a little."""
        rule = {**rule, "sliding_window": rule["sliding_window"] and 100}
        spans = [*((0, 37 * n) for n in range(8)), None, *((300, 300 + 53 * n) for n in range(9)), None]
        layout = layout_of(spans, 16)
        wide = [t.detach().cuda().requires_grad_() for t in inputs(layout, 777, heads=8, width=64)]
        layout = layout.to("cuda")
        narrow = [t.detach().to(dtype).requires_grad_() for t in wide]
        out = block_attention(*narrow, layout, **rule, backend=make_backend("flex", "cuda"))
        grad = torch.randn_like(out)
        expected = block_attention(*wide, layout, **rule)
        pairs = [(out, expected)]
        pairs += zip(
            torch.autograd.grad(out, narrow, grad), torch.autograd.grad(expected, wide, grad.double()), strict=True
        )
        limit = 2e-2 if dtype == torch.bfloat16 else 5e-3  # fp32 products are tf32 ones on the GPU
        for mine, theirs in pairs:
            error = (mine.double() - theirs).norm() / theirs.norm()
            assert error < limit
        for slot in (8, 18):
            rows = slice(16 * slot, 16 * slot + 16)
            assert not out[rows].any() and not pairs[1][0][rows].any(), "unused slots"
