"""Rendering: no value, whatever is in it, may become code."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from orchestrator.errors import UsageError
from orchestrator.runs.script import render_script

ROOT = Path(__file__).parents[3]
TEMPLATE = (ROOT / "templates" / "launch.sh.j2").read_text()
VALUES: dict[str, Any] = {
    "release": "/opt/dfo/releases/20261130-1612-9f3c1a",
    "python": "/opt/venv/bin/python",
    "cache": "/opt/dfo/shared/cache",
    "visible": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    "env": {"NCCL_NVLS_ENABLE": "0", "GREETING": "it's $(id)"},
    "secrets": ["HF_TOKEN"],
    "stages": ("preflight", "warmup", "train", "evaluate", "export"),
    "warmup_required": True,
    "warmth_required": False,
    "resume": False,
}
TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))
NASTY = ["", "'", '"', "`id`", "$(id)", "${IFS}", "\\", "!", "a\nb", "-n", "~", "*", "$'\\x41'", "#", "; id", "é\u2028"]


def bash(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", script, *arguments], capture_output=True, env={"PATH": "/usr/bin:/bin", **environ}, timeout=30
    )


def test_the_script_of_a_launch(snapshot: SnapshotAssertion) -> None:
    assert render_script(TEMPLATE, VALUES, name="launch.sh.j2") == snapshot


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": ("train",), "visible": {}, "env": {}, "secrets": []},
        {"warmup_required": False},
        {"resume": True, "warmth_required": True},
        {"release": "/opt/my dfo's/releases/x", "env": {"A": "\n", "B": "'"}},
    ],
)
def test_every_variant_is_bash(changes: dict[str, Any]) -> None:
    script = render_script(TEMPLATE, VALUES | changes, name="launch.sh.j2")
    done = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "{{" not in script and "{%" not in script


@settings(max_examples=150)
@given(st.lists(TEXT | st.sampled_from(NASTY), min_size=1, max_size=20))
def test_words_arrive_as_they_were_sent(words: list[str]) -> None:
    script = render_script(
        "printf '%s\\0' {{ words }}\nx={{ words[0] }}\nprintf '%s' \"$x\"", {"words": words}, name="t"
    )
    done = bash(script)
    assert done.stderr == b""
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words) + words[0].encode()


@settings(max_examples=40)
@given(release=TEXT, value=TEXT | st.sampled_from(NASTY), resume=st.booleans())
def test_the_real_template_hands_every_value_on(
    tmp_path_factory: pytest.TempPathFactory, release: str, value: str, resume: bool
) -> None:
    """The whole launch.sh through bash, with a program in the place of Python that says what it was given."""
    place = tmp_path_factory.mktemp("run")
    folder = place / ("r" + release.replace("/", "_")[:40])
    folder.mkdir()
    (place / "logs").mkdir()
    spy = place / "spy it's"
    spy.write_text('#!/bin/bash\nprintf "%s\\0" "$PWD" "$VALUE" "$PYTHONPATH" "$@" >"$DFO_RUN_DIR/seen"\n')
    spy.chmod(0o755)
    changes = {
        "release": str(folder),
        "python": str(spy),
        "env": {"VALUE": value},
        "resume": resume,
        "stages": ["train"],
    }
    (place / "launch.sh").write_text(render_script(TEMPLATE, VALUES | changes, name="t"), newline="")
    done = subprocess.run(
        ["bash", str(place / "launch.sh")], capture_output=True, env={"PATH": "/bin", "HF_TOKEN": "x"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    core = ["-m", "dflash_core", "train", "--config", f"{place}/run.yaml", "--run-dir", str(place)]
    seen = (place / "seen").read_bytes().decode().split("\0")[:-1]
    assert seen == [str(folder), value, str(folder), *core, *(["--resume"] if resume else [])]


@pytest.mark.parametrize(
    ("template", "place"),
    [
        ('echo "{{ x }}"', "double quotes"),
        ('echo "hello {{ x }} there"', "double quotes"),
        ("echo 'hello {{ x }}'", "single quotes"),
        ('echo "a" \'b\' "\\" {{ x }}"', "double quotes"),
        ("# about {{ x }}", "a comment"),
        ("echo a; # about {{ x }}", "a comment"),
        ("{% if true %}\n# about {{ x }}\n{% endif %}", "a comment"),
        ("echo `echo {{ x }}`", "backticks"),
        ('echo "${y:-{{ x }}}"', "double quotes"),
        ('echo "$(echo "{{ x }}")"', "double quotes"),
        ("echo $(({{ x }} + 1))", "an arithmetic expression"),
        ("(({{ x }} > 1))", "an arithmetic expression"),
        ('echo "first\n\n{{ x }}"', "double quotes"),
    ],
)
def test_a_placeholder_in_an_unsafe_place_is_refused(template: str, place: str) -> None:
    with pytest.raises(UsageError, match="has an unsafe placeholder") as refused:
        render_script(template, {"x": "v"}, name="own.sh.j2")
    assert refused.value.kind == "template_invalid"
    assert place in refused.value.why
    line = template[: template.index("{{ x }}")].count("\n") + 1
    assert refused.value.what.startswith(f"own.sh.j2:{line} ")


@pytest.mark.parametrize("template", ["cat <<EOF\n{{ x }}\nEOF", "echo $'a' {{ x }}"])
def test_shell_that_hides_where_words_end_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match=r"uses (a here-document|ANSI-C quotes)"):
        render_script(template, {"x": "v"}, name="own.sh.j2")


@pytest.mark.parametrize(
    "template",
    [
        "echo {{ x }}",
        "x={{ x }}/below",
        "echo \"quoted\" {{ x }} 'quoted'",
        "echo a#b {{ x }}",
        "echo $# ${#y} {{ x }}",
        'echo "it\'s" {{ x }}',
        "# it's a comment\necho {{ x }}",
        'echo "$(echo {{ x }})"',
        "echo $(echo $(echo {{ x }})) {{ x }}",
        "f() { echo {{ x }}; }",
        "cat <<< {{ x }}",
        'y="\\"" ; echo {{ x }}',
        "echo $((1 + 2)) {{ x }}",
        "(cd /; (echo {{ x }}))",
    ],
)
def test_safe_places_are_not_refused(template: str) -> None:
    script = render_script(template, {"x": "$(echo danger)"}, name="own.sh.j2")
    done = bash(script + "\nf 2>/dev/null || true")
    assert b"danger" not in done.stdout.replace(b"$(echo danger)", b"")


@pytest.mark.parametrize(
    ("template", "values", "why"),
    [
        ("echo {{ missing }}", {}, "'missing' is undefined"),
        ("echo {{ x.missing }}", {"x": "v"}, "no attribute 'missing'"),
        ("echo {{ x", {}, "unexpected"),
        ("{% if %}", {}, "Expected an expression"),
        ("echo {{ x }}", {"x": None}, "NoneType None is no shell word"),
        ("echo {{ x }}", {"x": True}, "bool True is no shell word"),
        ("echo {{ x }}", {"x": {"a": 1}}, "dict"),
        ("echo {{ x }}", {"x": "a\0b"}, "NUL"),
        ("echo {{ x }}", {"x": "\ud800"}, "broken text"),
        ("{% for y in x %}{{ y }}{% endfor %}", {"x": 5}, "not iterable"),
        ("echo {{ 1 / 0 }}", {}, "division by zero"),
        ("{% include 'other' %}", {}, "no loader"),
    ],
)
def test_what_cannot_be_rendered_names_its_line(template: str, values: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refused:
        render_script("\n\n" + template, values, name="own.sh.j2")
    assert refused.value.kind == "template_invalid" and why in refused.value.why
    assert refused.value.what.startswith("own.sh.j2:3 ")


def test_marking_a_value_as_safe_does_not_unquote_it() -> None:
    assert render_script("{{ x | safe }} {{ [x, 1] }}", {"x": "$(id)"}, name="t") == "'$(id)' '$(id)' 1"
