"""The pages under docs/ say what the code does: names, defaults, kinds, keys, flags and links are compared with it.

`UPDATE_SNAPSHOTS=1` rewrites the one part that is generated, the table of run.yaml's keys.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import dflash_core.errors as core_errors
from dflash_core.config import RunConfig
from dflash_core.strict_yaml import parse_dataclass, settings_of
from orchestrator.errors import KINDS
from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.resolve import load_inventory
from orchestrator.runs.run import OUTCOMES, EndReason

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SURFACE = json.loads((ROOT / "tests" / "data" / "surface.json").read_text(encoding="utf-8"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """The text under a `## ` heading, up to the next one."""
    parts = re.split(r"^## ", page(name), flags=re.MULTILINE)
    return next(part for part in parts if part.partition("\n")[0] == heading)


def words(text: str) -> set[str]:
    """Every identifier in code spans: `a`, `b.c` and `{"d", "e"}` give a, b, c, d, e."""
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}


def table(text: str) -> list[list[str]]:
    """The cells of all table rows in `text`, header and ruler left out."""
    rows = re.findall(r"^\|( `.*)\|$", text, flags=re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


# -- training.md: every key of run.yaml ---------------------------------------------------------------------------

KEYS = re.compile(r"(<!-- keys:.*?-->\n).*?(<!-- end of keys -->)", re.DOTALL)


def test_the_table_of_keys_is_that_of_the_dataclasses() -> None:
    path = DOCS / "training.md"
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        fresh = KEYS.sub(lambda found: found[1] + keys_table() + found[2], page("training.md"))
        path.write_text(fresh, encoding="utf-8")
    found = KEYS.search(page("training.md"))
    assert found is not None
    assert found[0] == found[1] + keys_table() + found[2], "UPDATE_SNAPSHOTS=1 writes the table anew"


def keys_table() -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in keys_of(RunConfig):
        lines.append(f"| `{key}` | {kind} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def keys_of(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Dotted key, type, default and meaning of every setting, in order."""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    for name, setting in settings_of(cls).items():
        if dataclasses.is_dataclass(setting.kind):
            yield from keys_of(setting.kind, f"{prefix}{name}.")
        else:
            meaning = setting.meaning.replace("|", "\\|")
            yield prefix + name, type_words(setting.kind), default_words(fields[name]), meaning


def type_words(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(arg) for arg in args if arg is not types.NoneType)
    if origin is Literal:
        return " / ".join(args)
    if origin is tuple:
        return f"list of {type_words(args[0])}" if args[-1] is Ellipsis else f"{len(args)} × {type_words(args[0])}"
    return {int: "integer", float: "number", str: "text", bool: "true / false"}[kind]


def default_words(item: dataclasses.Field[Any]) -> str:
    if item.default is dataclasses.MISSING:
        return "required"
    value = list(item.default) if isinstance(item.default, tuple) else item.default
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


# -- commands.md: the frozen surface ------------------------------------------------------------------------------


def flags_in(text: str) -> set[str]:
    """Every flag named at the start of a code span: "`-n, --dry-run`" gives both."""
    return {flag for span in re.findall(r"`(-[^`]*)`", text) for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", span)}


def commands() -> dict[str, dict[str, Any]]:
    """Leaves of the surface by name; a command with subcommands is described by them."""
    described: dict[str, dict[str, Any]] = SURFACE["commands"]
    parents = {name.rpartition(" ")[0] for name in described} - {"dfo"}
    return {name: found for name, found in described.items() if name not in parents}


def common_flags() -> set[str]:
    return set.intersection(*(set(flags_of(found)) for name, found in commands().items() if name != "dfo"))


def flags_of(found: dict[str, Any]) -> set[str]:
    return {flag for option in found["options"] for flag in option.split()}


def test_every_command_is_listed_with_its_arguments_and_flags() -> None:
    documented: dict[str, tuple[str, set[str]]] = {}
    for row in table(page("commands.md")):
        span = row[0].strip("`")
        if span.startswith("dfo"):
            name = re.match(r"dfo(?: [a-z-]+)*", span)
            assert name is not None and name[0] not in documented, span
            documented[name[0]] = (span.removeprefix(name[0]), flags_in(row[2]))
    assert documented.keys() == commands().keys()
    for name, found in commands().items():
        arguments, flags = documented[name]
        assert re.findall(r"\w+", arguments) == re.findall(r"\w+", " ".join(found["arguments"])), name
        assert flags == flags_of(found) - (common_flags() if name != "dfo" else set()), name


def test_the_options_of_every_command_are_listed() -> None:
    assert flags_in(section("commands.md", "Options of every command")) == common_flags()


def test_the_exit_codes_are_those_of_the_surface() -> None:
    rows = table(section("commands.md", "Exit codes"))
    documented = {cells[1].strip("`"): int(cells[0].strip("`")) for cells in rows}
    assert documented == SURFACE["exit_codes"]


def test_codes_of_a_command_are_known() -> None:
    known = set(SURFACE["exit_codes"].values())
    for row in table(page("commands.md")):
        if row[0].startswith("`dfo "):
            assert {int(code) for code in re.findall(r"\d+", row[3])} <= known, row


# -- failures.md ---------------------------------------------------------------------------------------------------


def test_every_error_kind_is_explained_under_its_exit_code() -> None:
    documented: dict[str, int] = {}
    code = None
    for line in section("failures.md", "Errors of dfo").splitlines():
        if found := re.match(r"### Exit code (\d+)", line):
            code = int(found[1])
        elif row := table(line):
            assert code is not None and len(row[0]) == 3 and all(row[0][:2]), line
            documented |= dict.fromkeys(re.findall(r"`(\w+)`", row[0][0]), code)
    assert documented == {kind: cls.exit_code for kind, cls in KINDS.items()}


def test_every_end_of_a_run_is_explained() -> None:
    rows = {cells[0].strip("`"): cells[1:] for cells in table(section("failures.md", "How a run ends"))}
    assert rows.keys() == {str(reason) for reason in EndReason}
    for reason, outcome in OUTCOMES.items():
        state, code = rows[str(reason)][:2]
        assert (state.strip("`"), int(code)) == (str(outcome.state), outcome.exit_code), reason


def test_every_error_of_the_trainer_is_explained() -> None:
    classes = [
        cls for cls in vars(core_errors).values() if isinstance(cls, type) and issubclass(cls, core_errors.CoreError)
    ]
    rows = table(section("failures.md", "Errors of the trainer"))
    documented = {cells[0].strip("`"): (cells[1].strip("`"), int(cells[2])) for cells in rows if len(cells) == 4}
    assert documented == {cls.__name__: (cls.kind, cls.exit_code) for cls in classes}


# -- formats.md: the keys that the code writes ----------------------------------------------------------------------


def function(path: str, name: str) -> ast.AST:
    """The definition of a function, a class or a method (`Class.method`) in a source file."""
    found: ast.AST = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    for part in name.split("."):
        found = next(node for node in ast.walk(found) if isinstance(node, kinds) and node.name == part)
    return found


def keys_written(path: str, name: str) -> set[str]:
    """Keys of all dict displays in a function, keywords of `dict(...)`, and `x["key"] = ...`."""
    keys: set[str] = set()
    for node in ast.walk(function(path, name)):
        if isinstance(node, ast.Dict):
            keys |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            keys |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    return keys


def class_fields(path: str, name: str) -> set[str]:
    """Annotated fields of a class, without importing its module (and torch with it)."""
    node = function(path, name)
    assert isinstance(node, ast.ClassDef)
    return {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def keyword_calls(paths: list[Path], method: str) -> Iterator[tuple[str, set[str]]]:
    """`x.method("name", key=...)` and `x.method(event="name", key=...)`: name and other keywords, wherever called."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method):
                continue
            named = {word.arg: word.value for word in node.keywords if word.arg}
            event = named.pop("event", node.args[0] if node.args else None)
            if isinstance(event, ast.Constant):
                yield str(event.value), set(named)


PROGRAMS = "orchestrator/remote/programs"
EVALUATION = [
    ("dflash_core/evaluate.py", name)
    for name in ("evaluate", "_teacher_forced", "_decoded", "_answer_record", "_totals")
]
REPORT = [
    ("orchestrator/report/build.py", name)
    for name in (
        "build",
        "_headlines",
        "_curves",
        "_throughput",
        "_evaluation",
        "_run",
        "_prompt",
        "_data_set",
        "stage_times",
    )
]
WRITTEN = {
    "The target's folder": [
        (f"{PROGRAMS}/apply.py", "stage"),
        (f"{PROGRAMS}/_lock.py", "_place_lock"),
        ("orchestrator/owner.py", "owner_for"),
    ],
    "A run's folder": [
        ("orchestrator/runs/launch.py", "_spec"),
        (f"{PROGRAMS}/launch.py", "claim_number"),
        (f"{PROGRAMS}/supervisor.py", "Supervisor.__init__"),
        (f"{PROGRAMS}/supervisor.py", "Supervisor.index_logs"),
        (f"{PROGRAMS}/stop.py", "ask"),
        (f"{PROGRAMS}/_base.py", "process_identity"),
    ],
    "evaluation.json": [*EVALUATION, ("dflash_core/prompt_sets.py", "_record")],
    "warmup.json": [
        ("dflash_core/compile/warmup.py", "write_record"),
        ("dflash_core/compile/fingerprint.py", "fingerprint"),
        ("dflash_core/cli.py", "_print_cache"),
    ],
    "report.json": REPORT,
    "Environment snapshot": [(f"{PROGRAMS}/snapshot.py", "work"), (f"{PROGRAMS}/snapshot.py", "cache_facts")],
    "Saved caches": [("orchestrator/compile_cache/archive.py", "Manifest.as_dict")],
}
FIELDS = {
    "Checkpoints": [
        ("dflash_core/training_state.py", "TrainState"),
        ("dflash_core/data/rows.py", "StreamState"),
    ],
    "The target's folder": [("orchestrator/deploy/sources.py", "Entry")],
    "warmup.json": [("dflash_core/pipeline/rehearsal.py", "RehearsalEntry")],
    "Saved caches": [("orchestrator/compile_cache/archive.py", "Manifest")],
    "Environment snapshot": [
        ("orchestrator/environment/node.py", "NodeRecord"),
        *(
            ("orchestrator/environment/snapshot.py", name)
            for name in ("Python", "Package", "Torch", "Driver", "Folder", "Caches", "Cpu", "Memory", "Disk", "System")
        ),
    ],
}


@pytest.mark.parametrize("heading", WRITTEN)
def test_keys_that_are_written_are_in_the_page(heading: str) -> None:
    known = words(section("formats.md", heading))
    for path, name in WRITTEN[heading]:
        written = keys_written(path, name)
        assert written, f"{path} has no `{name}` that writes keys"
        assert written <= known, f"{path}, {name}: not in docs/formats.md: {sorted(written - known)}"


@pytest.mark.parametrize("heading", FIELDS)
def test_fields_that_are_written_are_in_the_page(heading: str) -> None:
    known = words(section("formats.md", heading))
    for path, name in FIELDS[heading]:
        fields = class_fields(path, name)
        assert fields and fields <= known, f"{path}, {name}: not in docs/formats.md: {sorted(fields - known)}"


def test_every_event_of_the_core_is_listed_with_its_keys() -> None:
    rows = {cells[0].strip("`"): words(cells[2]) for cells in table(section("formats.md", "Events"))}
    emitted: dict[str, set[str]] = {}
    for event, keys in keyword_calls(sorted((ROOT / "dflash_core").rglob("*.py")), "emit"):
        emitted.setdefault(event, set()).update(keys)
    emitted["step"] |= keys_written("dflash_core/progress.py", "_summary") | {"lr", "grad_norm"}
    emitted["warmup_step"] |= class_fields("dflash_core/pipeline/rehearsal.py", "RehearsalEntry") | {"misses"}
    emitted["environment"] |= keys_written("dflash_core/compile/environment.py", "describe")
    assert rows.keys() == emitted.keys()
    for event, keys in emitted.items():
        assert keys <= rows[event], f"{event}: not in docs/formats.md: {sorted(keys - rows[event])}"


def test_every_event_of_logs_is_listed_with_its_keys() -> None:
    found: dict[str, set[str]] = {}
    sources = [ROOT / "orchestrator" / "runs" / name for name in ("watch.py", "loglines.py")]
    for method in ("notice", "event"):
        for event, keys in keyword_calls(sources, method):
            found.setdefault(event, set()).update(keys)
    documented = section("formats.md", "--json")
    assert len(found) >= 7
    for event, keys in found.items():
        assert {event, *keys} <= words(documented), event


def test_progress_numbers_are_explained() -> None:
    explained = words(section("training.md", "What the progress numbers mean"))
    assert keys_written("dflash_core/progress.py", "_summary") <= explained


# -- all pages -------------------------------------------------------------------------------------------------------


def yaml_examples() -> list[tuple[str, str]]:
    return [
        (path.name, found)
        for path in PAGES
        for found in re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    ]


def test_examples_load(tmp_path: Path) -> None:
    examples = yaml_examples()
    assert len(examples) >= 3
    (tmp_path / "inventory").mkdir()
    for name, text in examples:
        if re.search(r"^targets:", text, re.MULTILINE):
            (tmp_path / "inventory" / "dfo.yaml").write_text(text, encoding="utf-8")
            assert load_inventory(find_inventory(environ={}, cwd=tmp_path)), name
        else:
            assert parse_dataclass(text, RunConfig, name), name


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name) if name else path
        assert target.exists(), f"{path.name}: there is no {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{path.name}: no heading for {link}"
