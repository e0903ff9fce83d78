"""The strict YAML reader: what you read is what you wrote, and every mistake names its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.inventory.strict_yaml import MAX_BYTES, MAX_DEPTH, load_strict, parse_strict


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12", 12),
        ("-3", -3),
        ("0", 0),
        ("1.5", 1.5),
        ("6e-4", 6e-4),
        ("1.0E+3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        # What YAML 1.1 would quietly turn into something else.
        *((text, text) for text in ("yes", "No", "on", "True", "NULL", "0755", "0x1f", "1:30", "1_000", ".", "1e")),
        *((text, text) for text in ("<<", "=", "2026-11-30", "2026-11-30 10:00:00", "1.10.2", ".inf", "1e999")),
        ('"12"', "12"),
        ("'true'", "true"),
        ("[1, two]", [1, "two"]),
        ("{a: {b: 0755}}", {"a": {"b": "0755"}}),
        ("|\n  12\n", "12\n"),
    ],
)
def test_values_are_what_they_look_like(text: str, value: object) -> None:
    read, _ = parse_strict(text, "f")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3:1", "the key `a` again"),
        ("x:\n  a: 1\n  a: 1\n", "f:3:3", "the key `a` again"),
        ("{1: x}", "f:1:2", "a key that is not text"),
        ("? [a]\n: b\n", "f:1:3", "a key that is not text"),
        ("a: &x 1\n", "f:1:4", "the anchor `x`"),
        ("a: *x\n", "f:1:4", "the anchor `x`"),
        ("a: !!python/object:os.system 1\n", "f:1:4", "the tag"),
        ("a: !!str 1\n", "f:1:4", "the tag"),
        ("a: [1\n", "f:2:1", "is not YAML"),
        ("a: 1\n---\nb: 1\n", "f:2:1", "is not YAML"),
        ("a: \x01", "f", "is not YAML"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"f:1:{MAX_DEPTH + 1}", "nested too deeply"),
    ],
)
def test_mistakes_name_their_place(text: str, where: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strict(text, "f")
    assert caught.value.kind == "inventory_invalid"
    assert caught.value.what.split(" ")[0] == where
    assert words in caught.value.what


def test_all_duplicates_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_strict("a: 1\na: 2\nb: 1\nb: 2\n", "f", kind="config_invalid")
    assert caught.value.kind == "config_invalid"
    assert caught.value.what == "f has 2 problems"
    assert caught.value.why.splitlines() == [
        "2:1 has the key `a` again: it is already at 1:1",
        "4:1 has the key `b` again: it is already at 3:1",
    ]


def test_every_node_has_its_place() -> None:
    _, positions = parse_strict("a:\n  b: [10, 20]\n", "f")
    assert positions.where(("a", "b")) == "f:2:3"
    assert positions.where(("a", "b"), value=True) == "f:2:6"
    assert positions.where(("a", "b", 1)) == "f:2:11"
    assert positions.where(("a", "missing")) == "f:1:1"


def test_a_file_is_read_with_limits(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load_strict(path)[0] == {"a": 1}
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(UsageError, match=r"f\.yaml:2 is not UTF-8"):
        load_strict(path)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(UsageError, match="is too large"):
        load_strict(path)
    with pytest.raises(UsageError) as caught:
        load_strict(tmp_path / "none.yaml")
    assert caught.value.kind == "inventory_missing"


_scalars = st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.floats(allow_nan=False, allow_infinity=False)
_texts = st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=20)


@given(
    st.recursive(
        _scalars | _texts,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
        max_leaves=12,
    )
)
def test_json_means_the_same_here(value: object) -> None:
    assert parse_strict(json.dumps(value), "f")[0] == value
