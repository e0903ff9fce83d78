"""Anchors and labels: the rules, the fixed capacity, and independence of packing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.objective import block_input_ids, block_labels, sample_anchors
from dflash_core.objective.anchors import allot

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=6)


def pack(documents, padding=0):
    mask = [value for document in documents for value in document] + [False] * padding
    ids = [number for number, document in enumerate(documents) for _ in document] + [-1] * padding
    return np.array(mask), np.array(ids)


def drawn(anchors):
    return anchors.positions[anchors.valid].tolist()


@given(documents=masks, padding=st.integers(0, 4), capacity=st.integers(1, 40), seed=st.integers(0, 5))
def test_rule_and_capacity(documents, padding, capacity, seed):
    mask, ids = pack(documents, padding)
    anchors = sample_anchors(mask, ids, capacity=capacity, seed_key=(seed, 0, list(range(len(documents)))))
    allowed = {p for p in range(len(mask) - 1) if mask[p] and mask[p + 1] and ids[p] == ids[p + 1] >= 0}
    positions = drawn(anchors)
    assert anchors.positions.shape == anchors.valid.shape == anchors.lo.shape == (capacity,)
    assert set(positions) <= allowed and len(set(positions)) == len(positions) == min(capacity, len(allowed))
    assert positions == sorted(positions)
    assert anchors.valid.tolist() == [True] * len(positions) + [False] * (capacity - len(positions))
    for position, lo in zip(positions, anchors.lo.tolist(), strict=False):
        assert lo == list(ids).index(ids[position])
    assert not anchors.positions[~anchors.valid].any() and not anchors.lo[~anchors.valid].any()


@given(documents=masks, capacity=st.integers(1, 40), order=st.randoms(use_true_random=False), padding=st.integers(0, 5))
def test_a_document_gets_the_same_anchors_wherever_it_is_packed(documents, capacity, order, padding):
    samples = [10 + 7 * number for number in range(len(documents))]

    def by_sample(numbers, padding):
        mask, ids = pack([documents[number] for number in numbers], padding)
        key = (1, 2, [samples[number] for number in numbers])
        anchors = sample_anchors(mask, ids, capacity=capacity, seed_key=key)
        pairs = zip(drawn(anchors), anchors.lo.tolist(), strict=False)
        return sorted((samples[numbers[ids[position]]], position - lo) for position, lo in pairs)

    numbers = list(range(len(documents)))
    shuffled = numbers.copy()
    order.shuffle(shuffled)
    assert by_sample(numbers, 0) == by_sample(shuffled, padding)


def test_the_draw_changes_with_seed_epoch_and_sample():
    mask, ids = pack([[True] * 200])
    keys = [(0, 0, [0]), (1, 0, [0]), (0, 1, [0]), (0, 0, [1])]
    draws = [tuple(drawn(sample_anchors(mask, ids, capacity=20, seed_key=key))) for key in keys]
    assert len(set(draws)) == 4
    assert draws[0] == tuple(drawn(sample_anchors(mask, ids, capacity=20, seed_key=keys[0])))


def test_the_draw_is_frozen():
    """A resumed run and an upgraded numpy must draw the same anchors."""
    mask, ids = pack([[True] * 100, [False] * 3 + [True] * 50])
    anchors = sample_anchors(mask, ids, capacity=8, seed_key=(5, 3, [17, 99]))
    assert drawn(anchors) == [8, 30, 92, 98, 103, 104, 144, 147]


def test_all_positions_are_equally_likely():
    mask, ids = pack([[True] * 11])
    hits = np.zeros(10)
    for epoch in range(2000):
        hits[drawn(sample_anchors(mask, ids, capacity=3, seed_key=(0, epoch, [0])))] += 1
    # Each of the 10 is drawn with probability 0.3: 600 of 2000, standard deviation 20.
    assert np.all(np.abs(hits - 600) < 5 * 20)


def test_short_documents_are_not_starved():
    mask, ids = pack([[True] * 1001, [True] * 6, [True] * 501])
    positions = np.array(drawn(sample_anchors(mask, ids, capacity=100, seed_key=(0, 0, [0, 1, 2]))))
    per_document = np.bincount(ids[positions])
    assert per_document[1] == 5, "all of the short one"
    assert sorted(per_document[[0, 2]]) == [47, 48]


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=12), capacity=st.integers(0, 200))
def test_allotment_is_exact_and_even(counts, capacity):
    slots = allot(np.array(counts), capacity, tie_breaks=list(range(len(counts))))
    assert slots.sum() == min(capacity, sum(counts)) and np.all(slots <= counts)
    unmet = slots[slots < counts]
    assert unmet.size == 0 or slots.max() - unmet.min() <= 1


def test_nothing_supervised_gives_no_anchor():
    mask, ids = pack([[False] * 5, [True]], padding=3)
    anchors = sample_anchors(mask, ids, capacity=4, seed_key=(0, 0, [0, 1]))
    assert not anchors.valid.any()
    empty = sample_anchors(np.zeros(4, bool), np.full(4, -1), capacity=2, seed_key=(0, 0, []))
    assert not empty.valid.any()


@given(documents=masks, padding=st.integers(0, 4), block_size=st.integers(2, 6))
def test_labels_follow_the_supervised_prefix(documents, padding, block_size):
    mask, documents_of = pack(documents, padding)
    anchors = sample_anchors(mask, documents_of, capacity=12, seed_key=(0, 0, list(range(len(documents)))))
    ids = torch.arange(100, 100 + len(mask))
    labels, supervised = block_labels(ids, torch.from_numpy(mask), torch.from_numpy(documents_of), anchors, block_size)
    for block, (position, valid) in enumerate(zip(anchors.positions.tolist(), anchors.valid.tolist(), strict=True)):
        going = valid
        assert not supervised[block, 0] and labels[block, 0] == -100
        for offset in range(1, block_size):
            row = position + offset
            going = going and row < len(mask) and mask[row] and documents_of[row] == documents_of[position]
            assert bool(supervised[block, offset]) == bool(going)
            assert labels[block, offset] == (100 + row if going else -100)
        assert not valid or supervised[block, 1], "an anchor predicts at least one token"


def test_a_gap_ends_the_block_for_good():
    mask, ids = pack([[True, True, False, True, True, True]])
    anchors = sample_anchors(mask, ids, capacity=8, seed_key=(0, 0, [0]))
    labels, supervised = block_labels(torch.arange(6), torch.tensor(mask), torch.tensor(ids), anchors, 4)
    assert drawn(anchors) == [0, 3, 4]
    assert supervised[:3].int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0]]
    assert labels[:3].tolist() == [[-100, 1, -100, -100], [-100, 4, 5, -100], [-100, 5, -100, -100]]


def test_block_inputs_are_the_anchor_token_and_masks():
    mask, ids = pack([[True] * 5])
    anchors = sample_anchors(mask, ids, capacity=4, seed_key=(0, 0, [0]))
    tokens = block_input_ids(torch.arange(10, 15), anchors, 3, 99)
    assert tokens.tolist() == [10, 99, 99, 11, 99, 99, 12, 99, 99, 13, 99, 99]


@pytest.mark.parametrize("ids", [[1, 1, 0, 0], [0, 0, 2, 2]])
def test_documents_out_of_order_are_our_own_bug(ids):
    with pytest.raises(AssertionError):
        sample_anchors(np.ones(4, bool), np.array(ids), capacity=2, seed_key=(0, 0, [0, 1]))
