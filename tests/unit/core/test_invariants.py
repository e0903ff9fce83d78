"""What must hold for any correct drafter and trainer. Tolerances are stated at each test."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Config,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dflash_core.attention.triton import TritonAttention
from dflash_core.drafter import DFlashDrafter, DraftCache, load_drafter, save_drafter
from dflash_core.objective import block_labels, block_loss, sample_anchors

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": {},
    "full-causal": {"is_causal": True},
    "full-with-biases": {"attention_bias": True},
    "sliding-causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7, "is_causal": True},
    "sliding-bidirectional": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7, "is_causal": False},
    "mixed-by-type": {"layer_types": (SLIDING, FULL), "sliding_window": 5, "is_causal": None},
}
ANCHORS = [0, 1, 2, 3, 7, 8, 12, 19, 20, 28, 35, 36, 41, 47]


@pytest.fixture(params=LAYERS, ids=list(LAYERS))
def layers(request):
    return LAYERS[request.param]


def decode_blocks(bench, row, positions):
    """Block by block through one growing cache, as in decoding: `[N, B, H]`."""
    cache = DraftCache(bench.config)
    blocks = []
    for anchor in positions:
        embeds = bench.embeds(row, bench.anchors(row, [anchor]))
        new = torch.arange(cache.length, anchor)
        blocks.append(
            bench.drafter.decode(
                embeds,
                bench.drafter.context_features(row.taps[new]),
                cache,
                block_positions=anchor + torch.arange(bench.config.block_size),
                context_positions=new,
            )
        )
        assert cache.length == anchor, "rows of the block must not stay in the cache"
    return torch.stack(blocks)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_1_parallel_forward_equals_cached_decoding(tiny_bench, layers, dtype, tolerance):
    bench = tiny_bench(dtype=dtype, **layers)
    row = bench.row(48)
    assert len(ANCHORS) >= 12
    parallel = bench.hidden(row, bench.anchors(row, ANCHORS))
    torch.testing.assert_close(parallel, decode_blocks(bench, row, ANCHORS), rtol=0, atol=tolerance)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_1_holds_with_the_kernels(tiny_bench, layers):
    bench = tiny_bench(**layers)
    row = bench.row(23, 48)
    anchors = bench.anchors(row, [23 + anchor for anchor in ANCHORS])
    parallel = bench.hidden(row, anchors, attention=TritonAttention())
    decoded = decode_blocks(bench, row.document(1), ANCHORS)
    torch.testing.assert_close(parallel, decoded, rtol=0, atol=1e-5)


def test_1_holds_when_training_packs_the_document_behind_another(tiny_bench, layers):
    bench = tiny_bench(**layers)
    row = bench.row(23, 48)
    parallel = bench.hidden(row, bench.anchors(row, [23 + anchor for anchor in ANCHORS]))
    decoded = decode_blocks(bench, row.document(1), ANCHORS)
    torch.testing.assert_close(parallel, decoded, rtol=0, atol=1e-5)


def test_2_a_block_depends_on_features_strictly_before_its_anchor(tiny_bench, layers):
    bench = tiny_bench(dtype=torch.float64, **layers)
    row = bench.row(9, 30)
    for anchor in (9, 10, 16, 38):
        taps = row.taps.clone().requires_grad_()
        changed = type(row)(row.input_ids, row.loss_mask, row.document_ids, row.position_ids, taps)
        bench.hidden(changed, bench.anchors(row, [anchor])).square().sum().backward()
        seen = taps.grad.abs().sum(dim=1) > 0
        assert not seen[anchor:].any(), "a feature at or behind the anchor leaks into the block"
        assert not seen[:9].any(), "a feature of another document leaks into the block"
        windows = [bench.config.layer_window(layer) for layer in range(2)]
        first = 9 if None in windows else max(9, anchor - max(windows) + 1)
        assert seen[first:anchor].all()
        assert not seen[:first].any()


def test_2_the_window_moves_with_the_offset(tiny_bench):
    bench = tiny_bench(
        dtype=torch.float64, num_hidden_layers=1, layer_types=(SLIDING,), sliding_window=7, is_causal=True
    )
    row = bench.row(30)
    for offset in range(4):
        taps = row.taps.clone().requires_grad_()
        changed = type(row)(row.input_ids, row.loss_mask, row.document_ids, row.position_ids, taps)
        bench.hidden(changed, bench.anchors(row, [20]))[0, offset].square().sum().backward()
        seen = (taps.grad.abs().sum(dim=1) > 0).nonzero()[:, 0].tolist()
        assert seen == list(range(20 + offset - 6, 20))


def test_2_tokens_behind_the_anchor_change_nothing_and_the_anchor_token_does(tiny_bench, layers):
    bench = tiny_bench(**layers)
    row = bench.row(30)
    anchors = bench.anchors(row, [15])
    before = bench.logits(row, anchors)
    others = row.input_ids.clone()
    others[16:] = (others[16:] + 1) % 60
    others[:15] = (others[:15] + 1) % 60
    changed = type(row)(others, row.loss_mask, row.document_ids, row.position_ids, row.taps)
    assert torch.equal(bench.logits(changed, anchors), before)
    others[15] = (others[15] + 1) % 60
    differs = (bench.logits(changed, anchors) - before).abs().amax(dim=-1)[0]
    assert (differs > 1e-3).all(), "every offset must know the anchor token"


def test_3_blocks_do_not_see_each_other(tiny_bench, layers):
    bench = tiny_bench(dtype=torch.float64, **layers)
    row = bench.row(30)
    anchors = bench.anchors(row, [5, 6, 6, 12, 20])
    layout = anchors.layout(4)
    embeds = bench.embeds(row, anchors).clone().requires_grad_()
    hidden = bench.drafter(
        embeds,
        bench.drafter.context_features(row.taps),
        layout=layout,
        block_positions=layout.positions(),
        context_positions=row.position_ids,
    )
    for block in range(5):
        (grad,) = torch.autograd.grad(hidden.view(5, 4, -1)[block].square().sum(), embeds, retain_graph=True)
        seen = grad.view(5, 4, -1).abs().sum(dim=(1, 2)) > 0
        assert seen.nonzero().tolist() == [[block]]
    torch.testing.assert_close(hidden.view(5, 4, -1)[1], hidden.view(5, 4, -1)[2], rtol=0, atol=0)


def test_3_offsets_see_each_other_unless_the_layer_is_causal(tiny_bench):
    for is_causal in (False, True):
        bench = tiny_bench(dtype=torch.float64, is_causal=is_causal)
        row = bench.row(30)
        anchors = bench.anchors(row, [12])
        layout = anchors.layout(4)
        embeds = bench.embeds(row, anchors).clone().requires_grad_()
        context = bench.drafter.context_features(row.taps)
        hidden = bench.drafter(
            embeds,
            context,
            layout=layout,
            block_positions=layout.positions(),
            context_positions=row.position_ids,
        )
        (grad,) = torch.autograd.grad(hidden[1].square().sum(), embeds)
        assert (grad.abs().sum(dim=1) > 0).tolist() == [True, True, not is_causal, not is_causal]


def test_4_packing_equals_apart(tiny_bench, layers):
    """Same blocks, same losses, same parameter gradients, up to summation order: 1e-12 in fp64."""
    bench = tiny_bench(dtype=torch.float64, **layers)
    row = bench.row(20, 33, 2, 17, padding=5)
    key = (3, 0, [11, 12, 13, 14])
    packed = sample_anchors(row.loss_mask, row.document_ids, capacity=64, seed_key=key)

    def terms(part, anchors):
        labels, supervised = block_labels(part.input_ids, part.loss_mask, part.document_ids, anchors, 4)
        return block_loss(bench.hidden(part, anchors).flatten(0, 1), bench.head, labels, supervised, gamma=4.0)

    whole = terms(row, packed)
    whole.num.backward()
    packed_grads = [parameter.grad.clone() for parameter in bench.drafter.parameters()]
    bench.drafter.zero_grad()
    num = den = 0.0
    for number, sample in enumerate(key[2]):
        part = row.document(number)
        alone = sample_anchors(part.loss_mask, part.document_ids, capacity=64, seed_key=(3, 0, [sample]))
        single = terms(part, alone)
        single.num.backward()
        num, den = num + single.num.item(), den + single.den.item()
    assert math.isclose(num, whole.num.item(), rel_tol=1e-12)
    assert math.isclose(den, whole.den.item(), rel_tol=1e-12)
    for parameter, grad in zip(bench.drafter.parameters(), packed_grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-10, atol=1e-11)


def dense_drafter(bench, row, anchor):
    """One block with transformers' Qwen3 parts and one explicit key list per query: an independent `[B, H]`."""
    config, state = bench.config, bench.drafter.state_dict()
    size, width, heads = config.block_size, config.head_dim, config.num_attention_heads
    qwen = Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        head_dim=width,
        num_attention_heads=heads,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
    )

    def norm(name, x):
        module = Qwen3RMSNorm(x.shape[-1], eps=config.rms_norm_eps).to(x.dtype)
        module.load_state_dict({"weight": state[f"{name}.weight"]})
        return module(x)

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    start = anchor - int(row.position_ids[anchor])
    context = norm("hidden_norm", linear("fc", row.taps[start:anchor]))
    x = bench.embed[[int(row.input_ids[anchor]), *[config.mask_token_id] * (size - 1)]]
    positions = torch.arange(len(context) + size)[None]
    cos, sin = Qwen3RotaryEmbedding(qwen)(x[None], positions)
    for index in range(config.num_hidden_layers):
        name = f"layers.{index}"
        h = norm(f"{name}.input_layernorm", x)
        both = torch.cat([context, h])
        q = norm(f"{name}.self_attn.q_norm", linear(f"{name}.self_attn.q_proj", h).view(1, size, heads, width))
        k = norm(f"{name}.self_attn.k_norm", linear(f"{name}.self_attn.k_proj", both).view(1, len(both), -1, width))
        v = linear(f"{name}.self_attn.v_proj", both).view(len(both), -1, width)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -size:], sin[:, -size:], unsqueeze_dim=2)
        k, _ = apply_rotary_pos_emb(k, k, cos, sin, unsqueeze_dim=2)
        out = torch.zeros(size, heads, width, dtype=x.dtype)
        for offset in range(size):
            me = len(context) + offset
            window = config.layer_window(index)
            keys = [
                p
                for p in range(len(both))
                if (p < len(context) and (window is None or me - p < window))
                or (p >= len(context) and (p <= me or not config.layer_is_causal(index)))
            ]
            for head in range(heads):
                kv = head // (heads // config.num_key_value_heads)
                weights = torch.softmax(k[0, keys, kv] @ q[0, offset, head] / math.sqrt(width), dim=0)
                out[offset, head] = weights @ v[keys, kv]
        x = x + linear(f"{name}.self_attn.o_proj", out.flatten(1))
        mlp = Qwen3MLP(qwen).to(x.dtype)
        mlp.load_state_dict({key.removeprefix(f"{name}.mlp."): state[key] for key in state if f"{name}.mlp." in key})
        x = x + mlp(norm(f"{name}.post_attention_layernorm", x))
    return norm("norm", x)


@torch.no_grad()
def test_5_an_independent_dense_drafter_gives_the_same_hidden_states(tiny_bench, layers):
    """fp32, 1e-5: Qwen3's rotary table and norm statistics are fp32 whatever the dtype."""
    bench = tiny_bench(**layers)
    row = bench.row(9, 48)
    positions = [9 + anchor for anchor in ANCHORS]
    parallel = bench.hidden(row, bench.anchors(row, positions))
    for hidden, anchor in zip(parallel, positions, strict=True):
        torch.testing.assert_close(hidden, dense_drafter(bench, row, anchor), rtol=0, atol=1e-5)


def test_7_the_first_loss_is_close_to_ln_v(tiny_bench, tiny_config):
    bench = tiny_bench()
    fresh = type(bench)(DFlashDrafter(tiny_config()), bench.embed * 0.02, bench.head * 0.02)
    row = fresh.row(200)
    anchors = sample_anchors(row.loss_mask, row.document_ids, capacity=64, seed_key=(0, 0, [0]))
    labels, supervised = block_labels(row.input_ids, row.loss_mask, row.document_ids, anchors, 4)
    terms = block_loss(fresh.hidden(row, anchors).flatten(0, 1), fresh.head, labels, supervised, gamma=4.0)
    assert abs(terms.metrics.loss - math.log(61)) < 0.1


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_7_overfitting_one_sample_drives_the_accept_length_to_the_block_size(tiny_bench, tiny_config, kind):
    bench = tiny_bench()
    drafter = DFlashDrafter(tiny_config(), generator=torch.Generator().manual_seed(1))
    learner = type(bench)(drafter, bench.embed, bench.head * 0.3)
    row = learner.row(40)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, weight_decay=0.0)
    before = None
    for step in range(250):
        anchors = sample_anchors(row.loss_mask, row.document_ids, capacity=12, seed_key=(0, step, [0]))
        labels, supervised = block_labels(row.input_ids, row.loss_mask, row.document_ids, anchors, 4)
        hidden = learner.hidden(row, anchors).flatten(0, 1)
        terms = block_loss(hidden, learner.head, labels, supervised, kind=kind, gamma=4.0)
        before = before or terms.metrics.accept_length
        optimizer.zero_grad()
        (terms.num / terms.den).backward()
        optimizer.step()
    everywhere = sample_anchors(row.loss_mask, row.document_ids, capacity=40, seed_key=(0, 0, [0]))
    labels, supervised = block_labels(row.input_ids, row.loss_mask, row.document_ids, everywhere, 4)
    hidden = learner.hidden(row, everywhere).flatten(0, 1)
    trained = block_loss(hidden, learner.head, labels, supervised, kind=kind, gamma=4.0).metrics
    assert before < 1.5
    assert trained.accept_length == 4.0
    assert trained.full_blocks == 35


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_8_saved_and_loaded_gives_the_same_logits(tiny_bench, layers, tmp_path, dtype):
    bench = tiny_bench(dtype=dtype, **layers)
    row = bench.row(48)
    anchors = bench.anchors(row, ANCHORS)
    save_drafter(bench.drafter, tmp_path)
    loaded = type(bench)(load_drafter(tmp_path), bench.embed, bench.head)
    assert loaded.drafter.dtype == dtype
    assert torch.equal(loaded.logits(row, anchors), bench.logits(row, anchors))
