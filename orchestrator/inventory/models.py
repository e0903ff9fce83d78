"""Every key of the inventory: its type, its default and its explanation.

The text under each field is what `dfo config docs`, the JSON schema and `inventory/example.yaml` say, so there
is one place to change. Nothing is converted silently: text for a number, a number for text, or an unknown key
is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from orchestrator.inventory.secrets import Secret
from orchestrator.inventory.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size

# A letter first: on the command line a word of digits is a run.
NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]{0,62}$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
DEVICE_PATTERN = r"^(cpu|cuda:[0-9]+)$"
PYTHON_PATTERN = r"^3\.[0-9]+$"
#: What each pattern asks for, in words.
PATTERN_WORDS = {
    NAME_PATTERN: "of letters, digits, `.`, `_` and `-`, beginning with a letter",
    VARIABLE_PATTERN: "the name of a variable",
    DEVICE_PATTERN: "`cpu`, `cuda:N` or the number of a GPU",
    PYTHON_PATTERN: 'a Python version such as "3.11"',
}
PLACEHOLDERS = frozenset({"run", "target"})


def _inside(text: str) -> str:
    parts = text.split("/")
    if text.startswith(("/", "~")) or ".." in parts or "\\" in text or not text:
        raise ValueError("must be a relative path without `..`")
    return text


def _placeholders(text: str) -> str:
    unknown = set(re.findall(r"\{([^{}]*)\}", text)) - PLACEHOLDERS
    if unknown or text.count("{") != text.count("}"):
        raise ValueError("may hold the placeholders {run} and {target}, no others")
    return text


def _device(value: object) -> object:
    """A bare number is a GPU: 3 means `cuda:3`."""
    return f"cuda:{value}" if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value


def _unique(values: list[int]) -> list[int]:
    if len(set(values)) != len(values):
        raise ValueError("must not name a GPU twice")
    return values


def _unique_stages(values: list[str]) -> list[str]:
    if not values or len(set(values)) != len(values):
        raise ValueError("must name at least one stage, and none twice")
    return values


def _env_value(value: object) -> str | Secret:
    """Text stays text; a mapping with one key says where a secret is."""
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("must not contain a NUL character")
        return value
    if not isinstance(value, Mapping):
        raise ValueError('must be text (quote it: "0") or a secret such as {env: NAME}')
    if len(value) == 1:
        match dict(value):
            case {"env": str(name)} if re.match(VARIABLE_PATTERN, name):
                return Secret(env=name)
            case {"file": str(path)} if path:
                return Secret(file=path)
            case {"command": [str(), *_] as words} if all(isinstance(word, str) for word in words):
                return Secret(command=tuple(words))
    raise ValueError("a secret is one of {env: NAME}, {file: PATH}, {command: [PROGRAM, ARGUMENT, …]}")


def _nothing(value: object) -> object:
    """A section with every line commented out is the same as none."""
    return {} if value is None else value


EMPTY = BeforeValidator(_nothing)
Duration = Annotated[
    float, PlainValidator(parse_duration), WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
]
Size = Annotated[int, PlainValidator(parse_size), WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN})]
EnvValue = Annotated[
    str | Secret,
    PlainValidator(_env_value),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                *(
                    {"type": "object", "properties": {key: kind}, "required": [key], "additionalProperties": False}
                    for key, kind in (
                        ("env", {"type": "string"}),
                        ("file", {"type": "string"}),
                        ("command", {"type": "array", "items": {"type": "string"}, "minItems": 1}),
                    )
                ),
            ]
        }
    ),
]
Stage = Literal["generate", "preflight", "train", "evaluate", "export"]
Text = Annotated[str, StringConstraints(min_length=1)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Variable = Annotated[str, StringConstraints(pattern=VARIABLE_PATTERN)]
InsidePath = Annotated[str, AfterValidator(_inside)]
Device = Annotated[
    str,
    BeforeValidator(_device),
    StringConstraints(pattern=DEVICE_PATTERN),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]


class Section(BaseModel):
    """A mapping of the inventory."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class DeployConfig(Section):
    """Which files become a release, and where releases live."""

    root: Text = ".dfo/target"
    """Folder on the target for releases, runs and caches. Relative: under the project (local transport only)."""
    keep: Annotated[int, Field(ge=1)] = 5
    """How many releases stay. The current one and those with a running job always stay."""
    include: Annotated[list[InsidePath], Field(min_length=1)] = ["dflash_core", "templates"]
    """Files and folders of the project to ship. `dflash_core` and `templates` come from the installed package
    where the project has none of its own."""
    ignore_files: list[InsidePath] = [".gitignore", ".dfoignore"]
    """Files with git-style patterns of what not to ship."""
    max_files: Annotated[int, Field(ge=1)] = 2000
    """A release with more files is refused: usually a data folder that should be ignored."""
    max_size: Size = 50_000_000
    """A release with more bytes is refused, and the largest files are named."""
    python_version: Annotated[
        Annotated[str, StringConstraints(pattern=PYTHON_PATTERN)] | None, Field(examples=["3.11"])
    ] = None
    """Check the sources for this Python, such as "3.11" (quoted). Unset: the version the target reports."""


class Topology(Section):
    """Which device plays which role. A device may appear several times; 3 means cuda:3."""

    targets: Annotated[list[Device], Field(min_length=1)]
    """Devices that run the frozen target model."""
    drafters: Annotated[list[Device], Field(min_length=1)]
    """Devices that train the drafter."""


class WarmupConfig(Section):
    """The warm-up stage, which compiles every kernel once, in order, before training."""

    timeout: Duration = 1200.0
    """Deadline of the stage."""
    require: bool = True
    """Whether a failed warm-up keeps training from starting."""


class StopConfig(Section):
    """How `dfo stop` ends a run."""

    signal: Literal["TERM", "INT"] = "TERM"
    """What the processes are asked with first."""
    grace: Duration = 60.0
    """How long they may take to write a checkpoint before they are killed."""


class LaunchConfig(Section):
    """What `dfo launch` starts."""

    template: InsidePath = "templates/launch.sh.j2"
    """The script that runs on the target, rendered with jinja2."""
    config: Annotated[Text | None, Field(examples=["run.yaml"])] = None
    """The run configuration (YAML), relative to the project."""
    topology: Annotated[Topology | None, Field(examples=[{"targets": [0, 1], "drafters": [2]}])] = None
    """Overrides `topology` of the run configuration."""
    stages: Annotated[list[Stage], AfterValidator(_unique_stages)] = ["preflight", "train", "evaluate", "export"]
    """Which stages a run has, beside the warm-up; they always run in the order generate, preflight, (warmup,) train,
    evaluate, export. `generate` lets the target answer `generate.prompts` of the run configuration first."""
    max_runtime: Annotated[Duration | None, Field(examples=["12h"])] = None
    """Deadline of a whole run, which is then asked to stop and writes its checkpoint. Unset: none."""
    warmup: Annotated[WarmupConfig, EMPTY] = WarmupConfig()
    """The warm-up stage."""
    stop: Annotated[StopConfig, EMPTY] = StopConfig()
    """How a run is stopped."""
    set: Annotated[dict[str, Any], EMPTY, Field(examples=[{"train.steps": 100}])] = {}
    """Single values of the run configuration to override, by dotted key: `train.steps: 100`."""


class Artefact(Section):
    """Something `dfo pull` brings home."""

    remote: Annotated[InsidePath, AfterValidator(_placeholders)]
    """Folder or file of a run under `deploy.root`; it starts with `runs/{run}/`."""
    local: Annotated[Text, AfterValidator(_placeholders)]
    """Where it goes, relative to the project; {run} and {target} are filled in."""
    keep: Annotated[Annotated[int, Field(ge=1)] | None, Field(examples=[3])] = None
    """Of the numbered folders in it (checkpoints), how many of the newest are copied. Unset: all."""


DEFAULT_ARTEFACTS = (
    Artefact(remote="runs/{run}/checkpoints", local="artefacts/{target}/{run}/checkpoints"),
    Artefact(remote="runs/{run}/export", local="artefacts/{target}/{run}/export"),
)


class Settings(Section):
    """What `defaults`, each group and each target may say. Later ones win, key by key; lists are replaced."""

    python: Text = "auto"
    """Interpreter on the target that trains. On this machine, `auto` is the one that runs dfo, and a relative path
    starts at the project."""
    deploy: Annotated[DeployConfig, EMPTY] = DeployConfig()
    """Which files become a release, and where releases live."""
    env: Annotated[
        dict[Variable, EnvValue],
        EMPTY,
        Field(examples=[{"HF_TOKEN": {"env": "HF_TOKEN"}, "NCCL_DEBUG": "WARN"}]),
    ] = {}
    """Environment of runs. Values are text (quote numbers) or secrets: {env: NAME}, {file: PATH} with mode 0600,
    or {command: [PROGRAM, ARGUMENT]}."""
    gpus: Annotated[
        Annotated[list[Annotated[int, Field(ge=0)]], AfterValidator(_unique)] | None, Field(examples=[[0, 1]])
    ] = None
    """GPUs a run may use, by index. Unset: all the target shows."""
    launch: Annotated[LaunchConfig, EMPTY] = LaunchConfig()
    """What `dfo launch` starts."""
    artefacts: list[Artefact] = list(DEFAULT_ARTEFACTS)
    """What `dfo pull` brings home."""


class LocalTarget(Settings):
    """A target on this machine: the "container" is a folder."""

    transport: Literal["local"]
    """How the target is reached."""
    groups: list[Name] = []
    """Groups whose settings apply, in this order; later ones win."""


#: One class per transport; a target's `transport` key decides which one reads it.
TARGET_KINDS: dict[str, type[LocalTarget]] = {"local": LocalTarget}


class InventoryFile(Section):
    """The whole file."""

    version: Literal[1]
    """Version of this format."""
    defaults: Annotated[Settings, EMPTY] = Settings()
    """Settings of every target."""
    groups: Annotated[dict[Name, Annotated[Settings, EMPTY]], EMPTY] = {}
    """Named settings that targets share."""
    targets: Annotated[dict[Name, LocalTarget], Field(min_length=1)]
    """The places that train, by name."""


@dataclass(frozen=True, kw_only=True)
class ResolvedTarget:
    """One target with every value decided: what commands work with.

    `root` is absolute on the target; `project` is the folder on the laptop that relative paths start from.
    """

    name: str
    transport: str
    root: str
    python: str
    project: Path
    deploy: DeployConfig
    env: Mapping[str, str | Secret]
    gpus: tuple[int, ...] | None
    launch: LaunchConfig
    artefacts: tuple[Artefact, ...]

    def environment(self) -> dict[str, str]:
        """`env` with every secret fetched now. Keep the result out of logs, files and `--json`."""
        return {
            name: value.reveal(name, project=self.project) if isinstance(value, Secret) else value
            for name, value in self.env.items()
        }
