from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.resolve import load_inventory
from orchestrator.inventory.strict_yaml import parse_strict
from orchestrator.runs.run_config import RunConfigText, devices_of, parse_set, read_run_config

OWN = "version: 1\n# why this rate\ntrain: {lr: 6e-4, steps: 100}\ntopology:\n  targets: [cuda:0]\n"


def target(project: Path, launch: str = "{config: run.yaml}") -> ResolvedTarget:
    path = project / "dfo.yaml"
    path.write_text(f"version: 1\ntargets:\n  lab:\n    transport: local\n    launch: {launch}\n")
    return load_inventory(find_inventory(path, environ={})).resolve("lab", environ={}).target


def devices(topology: dict[str, Any], gpus: list[int] | None = None) -> tuple[str, ...]:
    config = RunConfigText(text="", written=None, origin="run.yaml", overrides={}, topology=topology)
    return devices_of(config, gpus)


def test_without_overrides_the_file_is_sent_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(OWN)
    config = read_run_config(target(tmp_path))
    assert (config.text, config.written, config.origin) == (OWN, None, "run.yaml")
    assert devices_of(config, None) == ("cuda:0", "cpu"), "the core's default is the CPU"


def test_the_command_line_wins_over_the_inventory_and_the_inventory_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(OWN)
    launch = "{config: run.yaml, set: {train.steps: 200, train.lr: 1}, topology: {targets: [1], drafters: [2, cpu]}}"
    config = read_run_config(target(tmp_path, launch), sets=["train.steps=300", "data.train=[a.jsonl]", "seed=7"])
    assert parse_strict(config.text, "merged")[0] == {
        "version": 1,
        "train": {"lr": 1, "steps": 300},
        "topology": {"targets": ["cuda:1"], "drafters": ["cuda:2", "cpu"]},
        "data": {"train": ["a.jsonl"]},
        "seed": 7,
    }
    assert config.written == OWN
    assert devices_of(config, None) == ("cuda:1", "cuda:2", "cpu")


def test_a_resumed_run_keeps_its_own_configuration(tmp_path: Path) -> None:
    launch = "{config: missing.yaml, set: {train.steps: 200}}"
    config = read_run_config(target(tmp_path, launch), sets=["seed=1"], resumed=(OWN, "run.yaml of run 3"))
    assert parse_strict(config.text, "merged")[0]["train"] == {"lr": 0.0006, "steps": 100}
    assert (config.origin, config.overrides) == ("run.yaml of run 3", {"seed": 1})


@pytest.mark.parametrize(
    ("text", "launch", "what"),
    [
        ("a: 1\na: 2\n", "{config: run.yaml}", "run.yaml:2:1 has the key `a` again"),
        ("a: [1\n", "{config: run.yaml}", "run.yaml:"),
        ("- 1\n", "{config: run.yaml}", "run.yaml is not a mapping"),
        ("", "{config: run.yaml}", "run.yaml is not a mapping"),
        ("train: 5\n", "{config: run.yaml, set: {train.steps: 1}}", "run.yaml has no place for `train.steps`"),
        ("a: 1\n", "{config: other.yaml}", "cannot read other.yaml"),
        ("a: 1\n", "{stages: [train]}", "target `lab` has no run configuration"),
    ],
)
def test_what_cannot_be_read_names_its_place(tmp_path: Path, text: str, launch: str, what: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError) as wrong:
        read_run_config(target(tmp_path, launch))
    assert wrong.value.kind == "config_invalid" and wrong.value.what.startswith(what)


@pytest.mark.parametrize("word", ["train.steps", "=1", "train..steps=1", "train steps=1", "1=2"])
def test_set_needs_a_key_and_a_value(word: str) -> None:
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        parse_set(word)


def test_the_value_of_set_is_yaml() -> None:
    assert parse_set("a.b=1") == ("a.b", 1)
    assert parse_set("a=x=y") == ("a", "x=y")
    assert parse_set("a=") == ("a", None)
    assert parse_set("a='1'") == ("a", "1")
    with pytest.raises(UsageError) as wrong:
        parse_set("a=[1")
    assert wrong.value.kind == "usage"


@pytest.mark.parametrize(
    ("topology", "gpus", "expected"),
    [
        ({}, None, ("cpu",)),
        ({"targets": ["cuda:0", "cuda:0"], "drafters": ["cuda"]}, None, ("cuda:0",)),
        ({"targets": ["cuda:0"], "drafters": ["cuda:1"]}, [2, 5], ("cuda:2", "cuda:5")),
        ({"targets": ["cpu"], "drafters": ["cuda"]}, [3], ("cpu", "cuda:3")),
    ],
)
def test_devices_are_named_as_nvidia_smi_numbers_them(
    topology: dict[str, Any], gpus: list[int] | None, expected: tuple[str, ...]
) -> None:
    assert devices(topology, gpus) == expected


@pytest.mark.parametrize("name", ["gpu0", "cuda:x", 3, None])
def test_what_is_no_device(name: object) -> None:
    with pytest.raises(UsageError, match="names no device"):
        devices({"targets": [name]})


def test_a_device_beyond_the_gpus_of_the_target() -> None:
    with pytest.raises(UsageError) as wrong:
        devices({"targets": ["cuda:2"], "drafters": ["cuda:0"]}, [4, 6])
    assert "uses `cuda:2`, which the target does not give it" in wrong.value.what
    assert wrong.value.why == "the target's `gpus` are 4, 6, so a run sees cuda:0 to cuda:1"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Line breaks of YAML that are none to JSON would be folded in any plain style.
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


@given(values)
def test_merging_changes_no_value(value: object) -> None:
    """Also texts such as `1e5`, `yes` and `0x1F`, which one YAML reads as text and another as something else."""
    from yaml import dump

    from orchestrator.runs.run_config import _Dumper

    text = dump({"kept": value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    assert parse_strict(text, "merged")[0] == {"kept": value}
