"""Queue, reducer, control and feature store, each alone."""

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_core.pipeline.control import Control, StalledError, Stopped
from dflash_core.pipeline.feature_store import FeatureStore, target_fingerprint
from dflash_core.pipeline.queue import FeatureQueue
from dflash_core.pipeline.reducer import GradientReducer, MicroResult


def result(sequence: int) -> MicroResult:
    return MicroResult(batch=SimpleNamespace(sequence=sequence), worker="w", sums=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("producers", "consumers", "capacity"), [(1, 1, 1), (3, 2, 1), (2, 3, 2), (3, 3, 8)])
def test_every_item_arrives_once_and_memory_stays_bounded(producers: int, consumers: int, capacity: int) -> None:
    control = Control()
    queue: FeatureQueue[int] = FeatureQueue(capacity, control, first=5, end=65, stall_s=20)
    got: dict[int, int] = {}
    most = 0

    def produce(name: str) -> None:
        nonlocal most
        while (sequence := queue.claim(name)) is not None:
            time.sleep(random.random() * 0.002)
            queue.put(sequence, sequence * 10)
            most = max(most, len(queue))

    def consume(index: int) -> None:
        for sequence in range(5, 65):
            if sequence % consumers == index:
                got[sequence] = queue.take(sequence)[0]

    threads = [threading.Thread(target=produce, args=(f"t{n}",)) for n in range(producers)]
    threads += [threading.Thread(target=consume, args=(n,)) for n in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {sequence: sequence * 10 for sequence in range(5, 65)}
    assert most <= capacity


def test_a_silent_producer_is_named() -> None:
    queue: FeatureQueue[int] = FeatureQueue(2, Control(), first=0, end=9, stall_s=0.3)
    queue.claim("target-1")
    with pytest.raises(StalledError, match=r"target-1 has not delivered the features of batch 0 for 0\.3 s") as caught:
        queue.take(0)
    control = Control()
    control.fail("drafter-0", caught.value, step=1)
    assert control.failure is not None and control.failure.worker == "target-1"


def test_every_wait_ends_when_the_run_ends() -> None:
    control = Control()
    queue: FeatureQueue[int] = FeatureQueue(1, control, first=0, end=9, stall_s=60)
    reducer = GradientReducer([torch.zeros(1)], control, first=0, micro_batches=1)
    queue.claim("t")
    ended: list[str] = []

    def expect_stopped(name: str, wait: object) -> None:
        try:
            wait()  # type: ignore[operator]
        except Stopped:
            ended.append(name)

    waits = {
        "claim": lambda: queue.claim("t"),
        "take": lambda: queue.take(0),
        "window": lambda: reducer.wait_window(deadline_s=60, late=lambda n: AssertionError()),
        "open": lambda: reducer.wait_open(7),
        "turn": lambda: reducer.add([None], result(1)),
    }
    threads = [threading.Thread(target=expect_stopped, args=item) for item in waits.items()]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    control.fail("someone", ValueError("boom"), step=3)
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - begin < 1
    assert sorted(ended) == sorted(waits)


def test_the_first_failure_is_kept_and_nothing_fails_after_the_end() -> None:
    control = Control()
    control.fail("a", ValueError("first"), step=1)
    control.fail("b", ValueError("second"), step=2)
    assert control.failure is not None and control.failure.worker == "a"
    finished = Control()
    finished.finish()
    finished.fail("a", ValueError("late"), step=1)
    assert finished.failure is None


def test_gradients_are_summed_in_order_whoever_comes_first() -> None:
    """Values whose sum depends on the order: only ((big + small) - big) loses the small one."""
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8]), torch.tensor([0.25])]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        buffer = torch.full((1,), 99.0)
        reducer = GradientReducer([buffer], Control(), first=8, micro_batches=4)
        threads = []
        for n in order:
            thread = threading.Thread(target=reducer.add, args=([parts[n]], result(8 + n)))
            thread.start()
            threads.append(thread)
            time.sleep(0.02)
        results = reducer.wait_window(deadline_s=10, late=lambda n: AssertionError())
        assert [r.batch.sequence for r in results] == [8, 9, 10, 11]
        assert torch.equal(buffer, expected)
        for thread in threads:
            thread.join()


def test_bf16_gradients_add_up_in_fp32() -> None:
    buffer = torch.zeros(1)
    reducer = GradientReducer([buffer], Control(), first=0, micro_batches=3)
    for n, value in enumerate([256.0, 1.0, 1.0]):
        reducer.add([torch.tensor([value], dtype=torch.bfloat16)], result(n))
    assert buffer.item() == 258.0


def test_a_missing_gradient_is_zero_and_a_window_starts_afresh() -> None:
    buffer = torch.full((2,), 7.0)
    reducer = GradientReducer([buffer], Control(), first=0, micro_batches=1)
    reducer.add([None], result(0))
    assert buffer.tolist() == [0.0, 0.0]
    reducer.open_next()
    reducer.add([torch.ones(2)], result(1))
    assert buffer.tolist() == [1.0, 1.0]


def make_store(folder: Path | None, **changes: object) -> FeatureStore:
    options: dict[str, object] = {"width": 6, "dtype": torch.bfloat16, "ram_budget": 1 << 20, **changes}
    return FeatureStore(folder, "f" * 64, **options)  # type: ignore[arg-type]


def sample(tokens: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    ids = np.random.default_rng(seed).integers(0, 99, tokens)
    return ids, torch.randn(tokens, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_features_come_back_from_ram_and_from_disk(tmp_path: Path) -> None:
    ids, features = sample(5)
    store = make_store(tmp_path)
    assert store.get(ids) is None
    store.put(ids, features)
    assert torch.equal(store.get(ids), features)
    again = make_store(tmp_path, ram_budget=0)
    assert torch.equal(again.get(ids), features)
    assert (again.hits, again.misses, again.damaged) == (1, 0, 0)
    assert again.get(sample(5, seed=1)[0]) is None


def test_ram_only_store_keeps_what_fits() -> None:
    store = make_store(None, ram_budget=5 * 6 * 2)
    for seed in range(2):
        store.put(*sample(5, seed))
    assert store.get(sample(5, 0)[0]) is not None
    assert store.get(sample(5, 1)[0]) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other_width", "not_safetensors"])
def test_a_damaged_file_is_computed_again(tmp_path: Path, damage: str) -> None:
    ids, features = sample(40)
    store = make_store(tmp_path)
    store.put(ids, features)
    [path] = tmp_path.rglob("*.safetensors")
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(raw[:-10])
    elif damage == "flip":
        raw[-5] ^= 1
        path.write_bytes(raw)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "not_safetensors":
        path.write_bytes(b"x" * 400)
    fresh = make_store(tmp_path, **({"width": 7} if damage == "other_width" else {}))
    assert fresh.get(ids) is None
    assert fresh.damaged == 1
    if damage != "other_width":
        fresh.put(ids, features)
        assert torch.equal(make_store(tmp_path).get(ids), features)


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = make_store(blocked, ram_budget=0)
    store.put(*sample(3))
    assert store.write_error is not None
    assert store.get(sample(3)[0]) is None


def test_a_kept_slice_does_not_keep_its_row_alive() -> None:
    store = make_store(None)
    row = torch.randn(1000, 6).bfloat16()
    ids = np.arange(3)
    store.put(ids, row[10:13])
    kept = store.get(ids)
    assert kept is not None and kept.untyped_storage().nbytes() == 3 * 6 * 2


def test_the_fingerprint_follows_weights_taps_and_type() -> None:
    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Linear(50, 60)

    base = target_fingerprint(model(0), [1, 2], torch.bfloat16, {"a": 1, "_path": 1})
    assert base == target_fingerprint(model(0), [1, 2], torch.bfloat16, {"_path": 2, "a": 1})
    changed = model(0)
    with torch.no_grad():
        changed.weight.mul_(1.001)
    others = [
        target_fingerprint(changed, [1, 2], torch.bfloat16, {"a": 1}),
        target_fingerprint(model(0), [1, 3], torch.bfloat16, {"a": 1}),
        target_fingerprint(model(0), [1, 2], torch.float32, {"a": 1}),
        target_fingerprint(model(0), [1, 2], torch.bfloat16, {"a": 2}),
    ]
    assert len({base, *others}) == 5
