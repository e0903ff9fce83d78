"""What was seen. Plain data, so that every check can be shown to fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from orchestrator.errors import DfoError
from orchestrator.proxmox.gpu import Config, NodeDevices

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """Facts that nobody could collect, and why."""

    why: str


@dataclass(frozen=True)
class Trouble:
    """A `DfoError` as data."""

    kind: str
    what: str
    why: str
    fix: str

    @classmethod
    def of(cls, error: DfoError) -> Trouble:
        return cls(error.kind, error.what, error.why, error.fix)

    @property
    def text(self) -> str:
        return f"{self.what}: {self.why}"


def or_trouble(ask: Callable[[], T]) -> T | Trouble:
    """What `ask` gives, or the error that it raises, as a fact."""
    try:
        return ask()
    except DfoError as error:
        return Trouble.of(error)


@dataclass(frozen=True)
class Wanted:
    """What the inventory expects of the target. `gpus`: indices, `()` for none, None for whatever is there, of which
    `traced` says whether it is anything.
    """

    target: str
    transport: str
    gpus: tuple[int, ...] | None
    vmid: int | None = None
    traced: bool = False

    @property
    def some_gpu(self) -> bool:
        return self.traced if self.gpus is None else bool(self.gpus)


# -- the laptop --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyFile:
    """`mode` is None for a file that is not there. `locked`: it has a passphrase. `problem`: it is no key."""

    path: str
    mode: int | None
    locked: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Agent:
    """The ssh agent. `keys` is None where none answers."""

    wanted: bool
    socket: str | None
    keys: int | None


@dataclass(frozen=True, kw_only=True)
class Laptop:
    """`ssh`: what `ssh -V` says. `needs_ssh`: why the ssh program has to be
    used. `config`: the run configuration.
    """

    wanted: Wanted
    python: tuple[int, int, int]
    dfo: str
    inventory: str
    inventory_mode: int = 0o644
    ssh: str | None = None
    needs_ssh: str | None = None
    keys: tuple[KeyFile, ...] = ()
    agent: Agent | None = None
    secrets: tuple[str, ...] = ()
    lost_secrets: tuple[Trouble, ...] = ()
    config: str | None = None
    config_there: bool = False


# -- the way -----------------------------------------------------------------------------------------------------

Stage = Literal["connection", "host key", "login"]


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One host on the way. `before`: the hop that it is reached through. `key`: where its host key is known from.

    `stopped` is the stage at which the way ended here; `blocked` that it ended before, with the reason.
    """

    label: str
    spoken: str
    address: str
    target: str
    before: str | None = None
    addresses: tuple[str, ...] = ()
    no_name: str | None = None
    connect_ms: float | None = None
    command: str | None = None
    key: str | None = None
    stopped: Stage | None = None
    trouble: Trouble | None = None
    blocked: str | None = None


# -- the node ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Node:
    """`true_ms`: what the shortest command takes on an open connection; `shell_ms`: what the login shell takes of that,
    None if nobody knows; `printed`: what it prints first. `quorate` is None where nobody says. `holder`: the process
    that has the container's flock.
    """

    wanted: Wanted
    sudo: bool
    true_ms: float
    shell_ms: float | None
    printed: str
    user: str
    version: str | None
    clustered: bool
    quorate: bool | None
    status: str | Trouble
    config: Config | Trouble
    holder: str | None
    free_bytes: int
    devices: NodeDevices
    services: Mapping[str, str]


# -- the inside --------------------------------------------------------------------------------------------------


class _Answer(BaseModel):
    # Input from outside, but newer programs may say more than we know.
    model_config = ConfigDict(frozen=True, strict=True)


class PythonThere(_Answer):
    version: tuple[int, int, int]
    executable: str


class Modules(_Answer):
    missing: dict[str, str]
    versions: dict[str, str]


class Init(_Answer):
    name: str | None
    state: str | None
    failed: list[str]


class Place(_Answer):
    path: str
    place: str
    file_system: str | None
    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    writable: bool
    read_only: bool


class Cpu(_Answer):
    usable: int
    quota: float | None


class Memory(_Answer):
    total: int
    available: int
    limit: int | None


class Ended(_Answer):
    code: int | None
    said: str


class Library(_Answer):
    path: str
    version: str | None


class TorchThere(_Answer):
    version: str | None = None
    cuda: str | None = None
    cuda_available: bool = False
    gpu_count: int = 0
    import_error: str | None = None


class GpuThere(_Answer):
    """`devices`: path → None, or the name of the error when the user opens it."""

    module: str | None
    devices: dict[str, str | None]
    library: Library | None
    smi: Ended | None
    cu_init: Ended | None
    torch: TorchThere | None


class Answer(_Answer):
    """What the program `doctor` says."""

    time: float
    user: str
    python: PythonThere
    modules: Modules
    init: Init
    root: Place
    cache: Place
    tmp: Place
    shm: Place
    memlock: int | None
    cpu: Cpu
    memory: Memory
    gpu: GpuThere


@dataclass(frozen=True)
class Inside:
    """`skew`: seconds by which its clock is surely ahead (or, negative, behind); the call itself is no skew."""

    wanted: Wanted
    said: Answer
    skew: float


@dataclass(frozen=True)
class GpuInside:
    """The chain as seen from inside. `driver`: the version that the node has loaded, None if nobody asked it."""

    wanted: Wanted
    said: Answer
    driver: str | None

    @property
    def gpu(self) -> GpuThere:
        return self.said.gpu


# -- the API -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Api:
    """`version`, `lacking` (privileges on the container) and so on are Trouble where the API refused; None where it
    was not asked any more."""

    label: str
    token_id: str
    vmid: int
    version: str | Trouble
    lacking: tuple[str, ...] | Trouble | None = None
    node: str | Trouble | None = None
    lacking_on_node: tuple[str, ...] | Trouble | None = None
