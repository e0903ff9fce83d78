import json
import subprocess
from pathlib import Path

import pytest
import torch

from dflash_core.errors import CheckpointError
from dflash_core.training_state import (
    TrainState,
    generator_states,
    latest_checkpoint,
    list_checkpoints,
    read_state,
    read_tensors,
    restore_generators,
    write_checkpoint,
)

TENSORS = {"master.w": torch.arange(6.0).view(2, 3), "exp_avg.w": torch.ones(2, 3), "adam_step.w": torch.tensor(4.0)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def save_drafter(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def write(run: Path, step: int, *, keep: int = 2) -> Path:
    state = TrainState(step=step, stream={"sequence": step * 2}, elapsed_s=1.5, config={"seed": 3})
    return write_checkpoint(run, state, TENSORS, save_drafter=save_drafter, keep=keep)


def test_round_trip(tmp_path: Path) -> None:
    folder = write(tmp_path, 120)
    assert folder == tmp_path / "checkpoints" / "step-000120" == latest_checkpoint(tmp_path)
    state = read_state(folder)
    assert (state.step, state.stream["sequence"], state.config) == (120, 240, {"seed": 3})
    for name, tensor in read_tensors(folder, SHAPES).items():
        assert torch.equal(tensor, TENSORS[name])


def test_old_checkpoints_go_but_never_the_new_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000020", "step-000030"]
    write(tmp_path, 5, keep=1)
    assert (tmp_path / "checkpoints" / "step-000005").is_dir()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000005"


def test_the_same_step_may_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / "checkpoints" / "step-000010" / "train_state.json").write_text("torn")
    assert read_state(write(tmp_path, 10)).step == 10
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()] == ["step-000010"]


def test_leftovers_of_a_kill_are_invisible_and_removed(tmp_path: Path) -> None:
    staging = tmp_path / "checkpoints" / ".step-000040.partial"
    staging.mkdir(parents=True)
    (staging / "train_state.json").write_text("{}")
    assert latest_checkpoint(tmp_path) is None
    write(tmp_path, 50)
    assert not staging.exists()


def test_a_lost_pointer_falls_back_to_the_newest(tmp_path: Path) -> None:
    for step in (10, 20):
        write(tmp_path, step)
    (tmp_path / "checkpoints" / "latest").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000020"


@pytest.mark.parametrize("name", ["step-000099", "../step-000010", ""])
def test_a_wrong_pointer_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, 10)
    (tmp_path / "checkpoints" / "latest").write_text(name)
    with pytest.raises(CheckpointError) as caught:
        latest_checkpoint(tmp_path)
    assert "latest" in caught.value.what and "step-000010" in caught.value.why


@pytest.mark.parametrize("size", [0, 7, 200])
def test_truncated_tensors_are_refused_and_another_checkpoint_offered(tmp_path: Path, size: int) -> None:
    write(tmp_path, 10)
    folder = write(tmp_path, 20)
    path = folder / "train_state.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError) as caught:
        read_tensors(folder, SHAPES)
    assert str(path) in caught.value.what and "step-000010" in caught.value.fix


@pytest.mark.parametrize("text", ["", "{", "[]", '{"v": 1, "surprise": 2}', '{"v": 99}', '{"step": 1}'])
def test_a_damaged_state_file_is_refused(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, 20)
    (folder / "train_state.json").write_text(text)
    with pytest.raises(CheckpointError, match="train_state.json"):
        read_state(folder)


def test_wrong_shapes_and_names_are_listed(tmp_path: Path) -> None:
    folder = write(tmp_path, 20)
    expected = {**SHAPES, "master.w": (3, 2), "master.new": (1,)}
    del expected["exp_avg.w"]
    with pytest.raises(CheckpointError) as caught:
        read_tensors(folder, expected)
    for part in ("missing master.new", "unknown exp_avg.w", "master.w has shape [2, 3], expected [3, 2]"):
        assert part in caught.value.why


def test_a_full_disk_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 10)

    def no_space(folder: Path) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot write the checkpoint") as caught:
        write_checkpoint(tmp_path, TrainState(step=20), TENSORS, save_drafter=no_space, keep=1)
    assert "No space left" in caught.value.why
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()] == ["step-000010"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000010"


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here: a full disk is NOT tested")
    try:
        write(tmp_path, 10)
        large = {**TENSORS, "exp_avg.w": torch.zeros(400, 400)}
        with pytest.raises(CheckpointError, match="step-000020"):
            write_checkpoint(tmp_path, TrainState(step=20), large, save_drafter=save_drafter, keep=1)
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000010"]
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000010"
        read_tensors(tmp_path / "checkpoints" / "step-000010", SHAPES)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_state_json_is_plain_json(tmp_path: Path) -> None:
    document = json.loads((write(tmp_path, 10) / "train_state.json").read_text())
    assert document["v"] == 1 and document["stream"] == {"sequence": 20}


def test_generators_resume(tmp_path: Path) -> None:
    torch.manual_seed(5)
    states = generator_states()
    first = torch.rand(4)
    torch.manual_seed(6)
    restore_generators(states)
    assert torch.equal(torch.rand(4), first)
