"""Every key of the inventory: its type, its default and its explanation.

The text under each field is what `dfo config docs`, the JSON schema and `inventory/example.yaml` say, so there
is one place to change. Nothing is converted silently: text for a number, a number for text, or an unknown key
is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.inventory.reach import PctConfig, SshConfig
from orchestrator.inventory.secrets import Secret
from orchestrator.inventory.types import (
    EMPTY,
    Device,
    Duration,
    EnvValue,
    Gpus,
    InsidePath,
    Name,
    PlacedPath,
    PlacedText,
    PythonVersion,
    Section,
    Size,
    Stages,
    Text,
    Variable,
)


class DeployConfig(Section):
    """Which files become a release, and where releases live."""

    root: Annotated[Text | None, Field(examples=["/opt/dfo"])] = None
    """Folder on the target for releases, runs and caches. Unset: `.dfo/target` under the project for the local
    transport, else `/opt/dfo`. Only the local one may have a relative path, which starts at the project."""
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
    method: Literal["auto", "pct-push", "stream"] = "auto"
    """How the archive gets into a container with `transport: pct`: `pct-push` lays it on the node and lets `pct push`
    copy it, `stream` sends it through `pct exec`. `auto` pushes, unless something speaks against it (`--dry-run` says
    what), and streams if a push fails. Other transports always stream."""
    python_version: Annotated[PythonVersion | None, Field(examples=["3.11"])] = None
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
    when_cold: Literal["warm", "refuse"] = "warm"
    """What training does with a cold compile cache: warm it by itself, or refuse."""


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
    stages: Stages = ["preflight", "train", "evaluate", "export"]
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

    remote: PlacedPath
    """Folder or file of a run under `deploy.root`; it starts with `runs/{run}/`."""
    local: PlacedText
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
    """Interpreter on the target that trains. `auto` is the one that runs dfo for the local transport, else `python3`
    as the PATH there finds it. A relative path starts at the project and is for the local transport only."""
    ssh: Annotated[SshConfig, EMPTY] = SshConfig()
    """How to reach a host: the container itself for `transport: ssh`, its Proxmox VE node for `transport: pct`. What is
    unset here is as `ssh HOST` has it, ~/.ssh/config included."""
    pct: Annotated[PctConfig, EMPTY] = PctConfig()
    """The container, as its node knows it, for `transport: pct`."""
    deploy: Annotated[DeployConfig, EMPTY] = DeployConfig()
    """Which files become a release, and where releases live."""
    env: Annotated[
        dict[Variable, EnvValue],
        EMPTY,
        Field(examples=[{"HF_TOKEN": {"env": "HF_TOKEN"}, "NCCL_DEBUG": "WARN"}]),
    ] = {}
    """Environment of runs. Values are text (quote numbers) or secrets: {env: NAME}, {file: PATH} with mode 0600,
    or {command: [PROGRAM, ARGUMENT]}."""
    gpus: Annotated[Gpus | None, Field(examples=[[0, 1]])] = None
    """GPUs a run may use, by index. Unset: all the target shows."""
    launch: Annotated[LaunchConfig, EMPTY] = LaunchConfig()
    """What `dfo launch` starts."""
    artefacts: list[Artefact] = list(DEFAULT_ARTEFACTS)
    """What `dfo pull` brings home."""


class Target(Settings):
    """One place that trains."""

    transport: Literal["local", "ssh", "pct"]
    """How the target is reached: `local` is a folder on this machine, `ssh` a container (or any Linux) with an sshd of
    its own, `pct` a container through its Proxmox VE node, with nothing but Python in it."""
    groups: list[Name] = []
    """Groups whose settings apply, in this order; later ones win."""


#: The sections that say how a target is reached, by transport; the others mean nothing to it.
REACHED_BY: dict[str, tuple[str, ...]] = {"local": (), "ssh": ("ssh",), "pct": ("ssh", "pct")}


class InventoryFile(Section):
    """The whole file."""

    version: Literal[1]
    """Version of this format."""
    defaults: Annotated[Settings, EMPTY] = Settings()
    """Settings of every target."""
    groups: Annotated[dict[Name, Annotated[Settings, EMPTY]], EMPTY] = {}
    """Named settings that targets share."""
    targets: Annotated[dict[Name, Target], Field(min_length=1)]
    """The places that train, by name."""


@dataclass(frozen=True, kw_only=True)
class ResolvedTarget:
    """One target with every value decided: what commands work with.

    `root` is absolute on the target; `project` is the folder on the laptop that relative paths start from. `ssh` and
    `pct` are there for the transports that use them, with absolute paths; `ssh.host` and `pct.container` are then set.
    """

    name: str
    transport: str
    ssh: SshConfig | None = None
    pct: PctConfig | None = None
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
