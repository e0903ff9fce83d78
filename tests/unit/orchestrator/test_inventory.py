"""The inventory: which file, what it says, which value wins, and what is told about mistakes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from orchestrator import resources
from orchestrator.errors import UsageError
from orchestrator.inventory.docs import entries, render, render_example
from orchestrator.inventory.keys import defaults_of, flatten
from orchestrator.inventory.locate import find_inventory, target_names
from orchestrator.inventory.models import InventoryFile, Settings, Target
from orchestrator.inventory.resolve import Inventory, load_inventory
from orchestrator.inventory.show import rows
from orchestrator.inventory.units import format_duration, format_size, parse_duration, parse_size

MINIMAL = "version: 1\ntargets:\n  lab:\n    transport: local\n"
ROOT = Path(__file__).parents[3]


def inventory(folder: Path, text: str) -> Inventory:
    path = folder / "inventory" / "dfo.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return load_inventory(find_inventory(environ={}, cwd=folder))


def refused(folder: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        inventory(folder, text)
    return caught.value


# Which file


def test_the_order_of_inventories(tmp_path: Path) -> None:
    bundled = find_inventory(environ={}, cwd=tmp_path)
    assert bundled.path == resources.bundled("inventory") / "local.yaml"
    assert bundled.label.startswith("inventory/local.yaml (the embedded default, as installed; ")
    assert bundled.project == tmp_path

    for name in ("local.yaml", "dfo.yaml"):
        (tmp_path / "inventory").mkdir(exist_ok=True)
        (tmp_path / "inventory" / name).write_text(MINIMAL)
        found = find_inventory(environ={}, cwd=tmp_path)
        assert found.path == tmp_path / "inventory" / name
        assert found.label.startswith(f"inventory/{name}")

    other = tmp_path / "else where" / "my dfo.yaml"
    other.parent.mkdir()
    other.write_text(MINIMAL)
    found = find_inventory(environ={"DFO_INVENTORY": str(other)}, cwd=tmp_path)
    assert (found.path, found.project) == (other, other.parent)
    assert load_inventory(found).positions.where(("targets",)) == f"{other}:2:1"
    named = tmp_path / "inventory" / "dfo.yaml"
    found = find_inventory(named, environ={"DFO_INVENTORY": str(other)}, cwd=Path("/"))
    assert (found.path, found.project) == (named, tmp_path)


@pytest.mark.parametrize("asker", ["--inventory", "DFO_INVENTORY"])
def test_an_inventory_that_was_asked_for_must_exist(tmp_path: Path, asker: str) -> None:
    option, environ = (Path("no.yaml"), {}) if asker == "--inventory" else (None, {"DFO_INVENTORY": "no.yaml"})
    with pytest.raises(UsageError) as caught:
        find_inventory(option, environ=environ, cwd=tmp_path)
    assert caught.value.kind == "inventory_missing"
    assert asker in caught.value.why


# What it says


def test_the_embedded_default(tmp_path: Path) -> None:
    loaded = load_inventory(find_inventory(environ={}, cwd=tmp_path))
    target = loaded.resolve(loaded.choose(None, environ={}), environ={}).target
    assert target.name == "local"
    assert target.transport == "local"
    assert target.root == str(tmp_path / ".dfo/target")
    assert target.python == sys.executable
    assert target.deploy.include == ["dflash_core", "templates", "demo"]
    assert target.launch.config == "demo/run.yaml"


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        ("auto", sys.executable),
        ("python3.12", "python3.12"),
        ("/opt/venv/bin/python", "/opt/venv/bin/python"),
        (".venv/bin/python", "{project}/.venv/bin/python"),
        ("~/venv/bin/python", str(Path("~/venv/bin/python").expanduser())),
    ],
)
def test_the_interpreter(tmp_path: Path, written: str, resolved: str) -> None:
    loaded = inventory(tmp_path, f"{MINIMAL}    python: {written}\n")
    assert loaded.resolve("lab", environ={}).target.python == resolved.format(project=tmp_path)


def test_one_mistake_has_the_place_in_its_first_line(tmp_path: Path) -> None:
    error = refused(tmp_path, MINIMAL + "    gpuz: [0]\n")
    assert (error.kind, error.exit_code) == ("inventory_invalid", 2)
    assert error.what == "inventory/dfo.yaml:5:5 unknown key `gpuz`"
    assert error.why == "under `targets.lab`; did you mean `gpus`?"
    assert error.fix == "`dfo config docs targets` lists the keys"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpus: 3", "5:11 `targets.lab.gpus` must be a list"),
        ("gpus: [true]", "5:12 `targets.lab.gpus[0]` must be a whole number"),
        ("gpus: [1, 1]", "5:11 `targets.lab.gpus` must not name a GPU twice"),
        ('gpus: ["1"]', "5:12 `targets.lab.gpus[0]` must be a whole number"),
        ("python: 3", "5:13 `targets.lab.python` must be text (quote it)"),
        ("env: {A: 0}", '5:14 `targets.lab.env.A` must be text (quote it: "0") or a secret'),
        ("env: {A: true}", "5:14 `targets.lab.env.A` must be text"),
        ("env: {A: {vault: x}}", "5:14 `targets.lab.env.A` must be a secret, one of"),
        ("env: {A-B: x}", "5:11 `A-B` is not usable as a name"),
        ("groups: [h200]", "5:14 unknown group `h200`"),
        ("transpott: local", "5:5 unknown key `transpott`"),
        ("deploy: {keep: 0}", "5:20 `targets.lab.deploy.keep` must be greater than or equal to 1"),
        ("deploy: {keep: 3.0}", "5:20 `targets.lab.deploy.keep` must be a whole number"),
        ("deploy: {keep: yes}", "5:20 `targets.lab.deploy.keep` must be a whole number"),
        ("deploy: {max_size: 50}", "5:24 `targets.lab.deploy.max_size` must be a size with its unit"),
        ("deploy: {python_version: 3.11}", "5:30 `targets.lab.deploy.python_version` must be text"),
        ("deploy: {include: [../x]}", "5:24 `targets.lab.deploy.include[0]` must be a relative path"),
        ("deploy: {include: [/etc]}", "5:24 `targets.lab.deploy.include[0]` must be a relative path"),
        ("launch: {warmup: {timeout: 20}}", "5:32 `targets.lab.launch.warmup.timeout` must be a duration"),
        ("launch: {warmup: {require: yes}}", "5:32 `targets.lab.launch.warmup.require` must be true or false"),
        ("launch: {stop: {signal: KILL}}", "5:29 `targets.lab.launch.stop.signal` must be `TERM` or `INT`"),
        ("launch: {topology: {targets: [0]}}", "5:14 missing key `drafters`"),
        ("launch: {topology: {targets: [gpu], drafters: [0]}}", "5:35 `targets.lab.launch.topology.targets[0]`"),
        ("artefacts: [{remote: x, local: '{job}'}]", "5:36 `targets.lab.artefacts[0].local` may hold"),
    ],
)
def test_wrong_values(tmp_path: Path, line: str, message: str) -> None:
    error = refused(tmp_path, f"{MINIMAL}    {line}\n")
    assert error.what.removeprefix("inventory/dfo.yaml:").startswith(message)


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    error = refused(tmp_path, "version: 2\ndefaults: {kep: 1}\ntargets:\n  lab: {transport: telnet}\n  b:\n")
    assert error.what == "inventory/dfo.yaml has 4 problems"
    assert error.why.splitlines() == [
        "1:10 `version` must be 1: it is the number 2",
        "2:12 unknown key `kep`: under `defaults`; known are python, ssh, pct, deploy, env, gpus, launch, artefacts",
        "4:20 `targets.lab.transport` must be `local`, `ssh` or `pct`: it is the text `telnet`",
        "5:5 `targets.b` must be a mapping: it is empty",
    ]
    assert len(error.as_dict()["problems"]) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", "version: 1\n", "version: 1\ntargets: {}\n", "version: '1'\ntargets: 3\n"])
def test_no_useful_inventory(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text).kind == "inventory_invalid"


def test_a_value_in_env_is_never_quoted(tmp_path: Path) -> None:
    error = refused(tmp_path, MINIMAL + "    env: {TOKEN: {file: hunter2, env: hunter2}, PIN: 4711}\n")
    assert "hunter2" not in json.dumps(error.as_dict())
    assert "4711" not in json.dumps(error.as_dict())


def test_a_section_with_everything_commented_out_says_nothing(tmp_path: Path) -> None:
    text = "version: 1\ndefaults:\n  deploy:\n  env:\ngroups:\n  a:\n" + MINIMAL[11:] + "    launch:\n"
    loaded = inventory(tmp_path, text)
    assert loaded.resolve("lab", environ={}).target.deploy == Settings().deploy


# Which value wins

LAYERED = """\
version: 1
defaults:
  deploy: {keep: 1, max_files: 11}
  env: {A: defaults, B: defaults, C: {env: HOME}}
groups:
  one:
    deploy: {keep: 2}
    env: {B: one}
    launch: {topology: {targets: [0], drafters: [1, cpu]}}
  two:
    deploy: {keep: 3, include: [a]}
targets:
  lab:
    transport: local
    groups: [one, two]
    env: {C: text}
    launch: {topology: null}
  bare: {transport: local}
"""


def origin(loaded: Inventory, name: str, key: str, **more: object) -> tuple[object, str]:
    resolution = loaded.resolve(name, **{"environ": {}, **more})  # type: ignore[arg-type]
    return next((row.value, row.origin) for row in rows(resolution) if row.key == key)


def test_precedence_and_origin(tmp_path: Path) -> None:
    loaded = inventory(tmp_path, LAYERED)
    file = "inventory/dfo.yaml"
    assert origin(loaded, "lab", "deploy.max_size") == ("50MB", "built in")
    assert origin(loaded, "lab", "deploy.max_files") == (11, f"defaults ({file}:3:21)")
    assert origin(loaded, "lab", "deploy.keep") == (3, f"groups.two ({file}:11:14)")
    assert origin(loaded, "lab", "env.A") == ("defaults", f"defaults ({file}:4:9)")
    assert origin(loaded, "lab", "env.B") == ("one", f"groups.one ({file}:8:11)")
    assert origin(loaded, "lab", "env.C") == ("text", f"targets.lab ({file}:16:11)")
    assert origin(loaded, "lab", "launch.topology") == (None, f"targets.lab ({file}:17:14)")
    assert origin(loaded, "bare", "deploy.keep") == (1, f"defaults ({file}:3:12)")
    environ = {"DFO_DEPLOY__KEEP": "4", "DFO_ENV__A": "0"}
    assert origin(loaded, "lab", "deploy.keep", environ=environ) == (4, "DFO_DEPLOY__KEEP")
    assert origin(loaded, "lab", "env.A", environ=environ) == ("0", "DFO_ENV__A")
    flags = {"deploy.keep": (5, "--keep")}
    assert origin(loaded, "lab", "deploy.keep", environ=environ, flags=flags) == (5, "--keep")
    target = loaded.resolve("lab", environ=environ, flags=flags).target
    assert (target.deploy.keep, target.deploy.include, target.launch.topology) == (5, ["a"], None)
    assert dict(target.env) == {"A": "0", "B": "one", "C": "text"}


def test_a_number_is_a_gpu_in_a_topology(tmp_path: Path) -> None:
    loaded = inventory(tmp_path, LAYERED.replace("    launch: {topology: null}\n", ""))
    topology = loaded.resolve("lab", environ={}).target.launch.topology
    assert topology is not None
    assert (topology.targets, topology.drafters) == (["cuda:0"], ["cuda:1", "cpu"])


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("DFO_PYTHON", "3", "python", "3"),
        ("DFO_GPUS", "[0, 2]", "gpus", [0, 2]),
        ("DFO_LAUNCH__WARMUP__TIMEOUT", "5m", "launch.warmup.timeout", "5m"),
        ("DFO_LAUNCH__WARMUP__REQUIRE", "false", "launch.warmup.require", False),
        ("DFO_LAUNCH__SET", "{train.steps: 5}", "launch.set.train.steps", 5),
        ("DFO_DEPLOY__INCLUDE", "[src]", "deploy.include", ["src"]),
        ("DFO_DEPLOY__PYTHON_VERSION", "3.12", "deploy.python_version", "3.12"),
        ("DFO_ENV__Lower_Case__X", "v", "env.Lower_Case__X", "v"),
    ],
)
def test_settings_from_variables(tmp_path: Path, name: str, text: str, key: str, value: object) -> None:
    loaded = inventory(tmp_path, MINIMAL)
    assert origin(loaded, "lab", key, environ={name: text}) == (value, name)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DFO_DEPLOY__KEPE": "3"}, "did you mean `DFO_DEPLOY__KEEP`?"),
        ({"DFO_DEPLOI__KEEP": "3"}, "did you mean `DFO_DEPLOY`?"),
        ({"DFO_GPUS__X": "3"}, "`gpus` has no keys below it"),
        ({"DFO_DEPLOY__KEEP": "three"}, "it is the text `three`"),
        ({"DFO_GPUS": "[0"}, "expected"),
    ],
)
def test_variables_that_mean_nothing(tmp_path: Path, environ: dict[str, str], words: str) -> None:
    loaded = inventory(tmp_path, MINIMAL)
    with pytest.raises(UsageError) as caught:
        loaded.resolve("lab", environ=environ)
    assert caught.value.kind == "inventory_invalid"
    assert next(iter(environ)) in caught.value.what
    assert words in caught.value.why


def test_other_variables_are_left_alone(tmp_path: Path) -> None:
    loaded = inventory(tmp_path, MINIMAL)
    others = {"DFO_TARGET": "lab", "DFO_DEBUG": "1", "DFO_PVE_TOKEN": "x", "DFO_DEPLOY__KEEP": "", "PATH": "/bin"}
    assert loaded.resolve("lab", environ=others) == loaded.resolve("lab", environ={})


def test_choosing_a_target(tmp_path: Path) -> None:
    only = inventory(tmp_path, MINIMAL)
    assert only.choose(None, environ={}) == "lab"
    two = inventory(tmp_path, MINIMAL + "  rack: {transport: local}\n")
    assert two.choose(None, environ={"DFO_TARGET": "rack"}) == "rack"
    assert two.choose("lab", environ={"DFO_TARGET": "rack"}) == "lab"
    for name, environ, why, fix in [
        (None, {}, "has 2: lab, rack", "name one, such as `lab`, or set DFO_TARGET"),
        ("rakc", {}, "the command line names it", "did you mean `rack`?"),
        (None, {"DFO_TARGET": "zzz"}, "DFO_TARGET names it", "name one of them"),
    ]:
        with pytest.raises(UsageError) as caught:
            two.choose(name, environ=environ)
        assert caught.value.kind == "unknown_target"
        assert why in caught.value.why
        assert fix in caught.value.fix


def test_names_for_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFO_INVENTORY", raising=False)
    assert target_names() == ["local"]
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "dfo.yaml").write_text("targets: {lab: {not: valid}, rack: 1}\n")
    assert target_names() == ["lab", "rack"]
    monkeypatch.setenv("DFO_INVENTORY", "missing.yaml")
    assert target_names() == []


# How a target is reached

REMOTE = "version: 1\ntargets:\n  lab:\n    transport: pct\n    ssh: {host: pve1}\n    pct: {container: 101}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ssh: {host: root@pve1}", "5:17 `targets.lab.ssh.host` must be a name, an address or a Host alias"),
        ("ssh: {host: -oProxyCommand=x}", "5:17 `targets.lab.ssh.host` must be a name"),
        ("ssh: {port: 0}", "5:17 `targets.lab.ssh.port` must be greater than or equal to 1"),
        ("ssh: {user: a b}", "5:17 `targets.lab.ssh.user` must be the name of a user"),
        ("ssh: {keys: ~/.ssh/id}", "5:17 `targets.lab.ssh.keys` must be a list"),
        ("ssh: {jump: [-x]}", "5:18 `targets.lab.ssh.jump[0]` must be a host such as bastion"),
        ("ssh: {jump: ['a:b:c']}", "5:18 `targets.lab.ssh.jump[0]` must be a host such as bastion"),
        ("ssh: {host_key: [MD5:aa]}", "5:22 `targets.lab.ssh.host_key[0]` must be `SHA256:` and 43 characters"),
        ("ssh: {host_key_policy: off}", "5:28 `targets.lab.ssh.host_key_policy` must be `accept-new` or `strict`"),
        ("ssh: {client: putty}", "5:19 `targets.lab.ssh.client` must be `auto`, `paramiko` or `openssh`"),
        ("ssh: {timeouts: {connect: 5}}", "5:31 `targets.lab.ssh.timeouts.connect` must be a duration"),
        ("ssh: {sudo: yes}", "5:17 `targets.lab.ssh.sudo` must be true or false"),
        ("ssh: {hots: a}", "5:11 unknown key `hots`"),
        ("pct: {container: 99}", "5:22 `targets.lab.pct.container` must be greater than or equal to 100"),
        ('pct: {container: "101"}', "5:22 `targets.lab.pct.container` must be a whole number"),
        ("pct: {path: pct}", "5:17 `targets.lab.pct.path` must be an absolute path"),
    ],
)
def test_wrong_ways(tmp_path: Path, line: str, message: str) -> None:
    error = refused(tmp_path, REMOTE.split("    ssh:")[0] + f"    {line}\n")
    assert error.what.removeprefix("inventory/dfo.yaml:").startswith(message)


def test_a_container_through_its_node(tmp_path: Path) -> None:
    text = REMOTE.replace("{host: pve1}", "{host: pve1, keys: [id, ~/k], known_hosts: kh, config: none}")
    target = inventory(tmp_path, text).resolve("lab", environ={}).target
    assert (target.root, target.python) == ("/opt/dfo", "python3")
    assert target.ssh is not None and target.pct is not None
    assert (target.ssh.host, target.pct.container) == ("pve1", 101)
    assert target.ssh.keys == [str(tmp_path / "id"), str(Path("~/k").expanduser())]
    assert (target.ssh.known_hosts, target.ssh.config) == (str(tmp_path / "kh"), "none")


def test_groups_are_nodes_that_targets_share(tmp_path: Path) -> None:
    loaded = inventory(
        tmp_path,
        "version: 1\ndefaults: {ssh: {user: root}}\ngroups: {pve1: {ssh: {host: pve1.example.org, port: 2222}}}\n"
        "targets:\n  a: {transport: pct, groups: [pve1], pct: {container: 101}}\n"
        "  b: {transport: ssh, groups: [pve1], ssh: {port: 22}}\n  here: {transport: local, groups: [pve1]}\n",
    )
    ssh = {name: loaded.resolve(name, environ={"DFO_SSH__CLIENT": "openssh"}).target.ssh for name in ("a", "b")}
    assert [(s.host, s.port, s.user, s.client) for s in ssh.values() if s] == [
        ("pve1.example.org", 2222, "root", "openssh"),
        ("pve1.example.org", 22, "root", "openssh"),
    ]
    here = loaded.resolve("here", environ={})
    assert (here.target.ssh, here.target.pct) == (None, None)
    assert not [row for row in rows(here) if row.key.startswith(("ssh", "pct"))]
    origins = {row.key: row.origin for row in rows(loaded.resolve("b", environ={}))}
    assert origins["ssh.port"] == "targets.b (inventory/dfo.yaml:6:45)"
    assert origins["ssh.host"] == "groups.pve1 (inventory/dfo.yaml:3:23)"
    assert "pct.container" not in origins


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        (REMOTE.replace("{host: pve1}", "{port: 22}"), "4:16 missing key `host`", "under `targets.lab.ssh`"),
        (REMOTE.replace("{container: 101}", "{}"), "4:16 missing key `container`", "under `targets.lab.pct`"),
        (f"{REMOTE}    deploy: {{root: here}}\n", "7:20 `targets.lab.deploy.root` must be an absolute path", "`here`"),
        (f"{REMOTE}    deploy: {{root: ~/dfo}}\n", "7:20 `targets.lab.deploy.root` must be an absolute", "`~/dfo`"),
        (f"{REMOTE}    python: .venv/bin/python\n", "7:13 `targets.lab.python` must be an absolute path or", ".venv"),
        (f"{REMOTE}    python: -c\n", "7:13 `targets.lab.python` must be an absolute path or a name", "`-c`"),
    ],
)
def test_what_a_remote_target_needs(tmp_path: Path, text: str, what: str, why: str) -> None:
    loaded = inventory(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        loaded.resolve("lab", environ={})
    assert caught.value.what.removeprefix("inventory/dfo.yaml:").startswith(what)
    assert why in caught.value.why


def test_a_section_that_a_transport_never_reads_is_a_mistake(tmp_path: Path) -> None:
    error = refused(tmp_path, f"{MINIMAL}    ssh: {{host: pve1}}\n    pct: {{container: 101}}\n")
    assert error.what == "inventory/dfo.yaml has 2 problems"
    assert "5:5 `ssh` means nothing to `transport: local`" in error.why
    error = refused(tmp_path, f"{REMOTE}".replace("transport: pct", "transport: ssh"))
    assert error.what == "inventory/dfo.yaml:6:5 `pct` means nothing to `transport: ssh`"


# The manual


def test_the_example_is_the_models() -> None:
    example = ROOT / "inventory" / "example.yaml"
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        example.write_text(render_example(), encoding="utf-8")
    assert example.read_text(encoding="utf-8") == render_example(), "set UPDATE_SNAPSHOTS=1 to write it anew"


def test_the_example_holds_every_key_with_its_default(tmp_path: Path) -> None:
    text = re.sub(r"^( *)#(?=[^ ])", r"\1", render_example(), flags=re.MULTILINE)
    text = re.sub(r"^( *)#  (?=- |env: )", r"\1  ", text, flags=re.MULTILINE)
    (tmp_path / "example.yaml").write_text(text)
    loaded = load_inventory(find_inventory(tmp_path / "example.yaml", environ={}))
    written = dict(flatten(Settings, loaded.document["defaults"]))
    assert {path[0] for path in written} == set(Settings.model_fields)
    for entry in entries(Settings):
        path = tuple(entry.key.split("."))
        assert "[]" in entry.key or any(p[: len(path)] == path for p in written), f"{entry.key} is missing"
    # Where there is no default, or an empty one, the line is an example.
    for path, default in flatten(Settings, defaults_of(Settings)):
        if default and path != ("artefacts",):
            assert written[path] == default
    assert loaded.file.defaults.artefacts == Settings().artefacts


def test_every_key_is_explained() -> None:
    for entry in [*entries(InventoryFile), *entries(Target)]:
        assert len(entry.text) > 10, f"{entry.key} has no explanation"
        assert entry.key in render()


def test_pages_of_the_manual() -> None:
    assert render("launch.stop").startswith("launch.stop  (mapping)")
    assert "launch.warmup" not in render("launch.stop")
    assert "targets.NAME.transport" in render("targets")
    with pytest.raises(UsageError) as caught:
        render("depoly")
    assert caught.value.fix == "did you mean `deploy`?"


def test_the_schema_describes_the_models() -> None:
    schema = InventoryFile.model_json_schema()
    settings = schema["$defs"]["Settings"]
    assert settings["additionalProperties"] is False
    assert set(settings["properties"]) == set(Settings.model_fields)
    assert schema["$defs"]["WarmupConfig"]["properties"]["timeout"]["type"] == "string"


# Units


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("5s", 5), ("20m", 1200), ("1.5h", 5400), ("2d", 172800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("0B", 0), ("500kB", 500_000), ("50MB", 50_000_000), ("64MiB", 64 << 20), ("1.5GB", 15 * 10**8)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["5", "s", "5 s", "-5s", "5s5s", "", "1e3s", 5, None, "5sek"])
def test_a_unit_is_needed(text: object) -> None:
    with pytest.raises(ValueError, match="with its unit"):
        parse_duration(text)
    with pytest.raises(ValueError, match="with its unit"):
        parse_size(text)


# What is bundled


def test_includes_fall_back_to_the_installed_copy(tmp_path: Path) -> None:
    for name in resources.BUNDLED:
        installed = resources.locate(name, project=tmp_path)
        assert installed is not None
        assert installed.is_dir()
        (tmp_path / name).mkdir()
        assert resources.locate(name, project=tmp_path) == tmp_path / name
    assert resources.locate("demo", project=tmp_path) is None
    assert resources.locate("dflash_core/none.py", project=Path("/")) is None
