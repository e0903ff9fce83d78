"""A healthy GPU box with two GPUs as `dfo doctor` sees it, and the same with something wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.doctor.facts import Agent, Answer, Api, GpuInside, Hop, Inside, KeyFile, Laptop, Node, Trouble, Wanted
from orchestrator.proxmox.gpu import Config, NodeDevices

DRIVER = "580.95.05"
TROUBLE = Trouble("unreachable", "cannot reach `pve1`", "no answer in 10 s", "check the network")


WANTED = Wanted("lab", "pct", (0, 1), 101)
LAPTOP = Laptop(
    wanted=WANTED,
    python=(3, 12, 3),
    dfo="0.1.0",
    inventory="inventory/dfo.yaml",
    ssh="OpenSSH_9.6p1",
    keys=(KeyFile("/home/ada/.ssh/id_ed25519", 0o600),),
    agent=Agent(True, "/run/agent", 2),
    secrets=("HF_TOKEN",),
    config="run.yaml",
    config_there=True,
)
HOP = Hop(
    label="root@pve1",
    spoken="pve1",
    address="192.0.2.10:22",
    target="lab",
    addresses=("192.0.2.10",),
    connect_ms=3.0,
    key="known from /home/ada/.config/dfo/known_hosts",
)
FILES = {
    "/dev/nvidia0": (195, 0),
    "/dev/nvidia1": (195, 1),
    "/dev/nvidiactl": (195, 255),
    "/dev/nvidia-uvm": (511, 0),
    "/dev/nvidia-uvm-tools": (511, 1),
}
DEVICES = NodeDevices("6.14.8-2-pve", DRIVER, FILES, {1: "mem", 195: "nvidia", 511: "nvidia-uvm"})
KEYS = {
    "features": "nesting=1",
    "memory": "65536",
    "cores": "16",
    "ostype": "debian",
    "unprivileged": "1",
    **{f"dev{index}": f"{path},mode=0666" for index, path in enumerate(FILES)},
}
CONFIG = Config(KEYS, ())
NODE = Node(
    wanted=WANTED,
    sudo=False,
    true_ms=12.0,
    shell_ms=4.0,
    printed="",
    user="root",
    version="9.2.11",
    clustered=True,
    quorate=True,
    status="running",
    config=CONFIG,
    holder=None,
    free_bytes=40_000_000_000,
    devices=DEVICES,
    services={"nvidia-persistenced": "active", "nvidia-fabricmanager": "inactive"},
)
PLACE = {
    "path": "/opt/dfo",
    "place": "/opt",
    "file_system": "ext4",
    "free_bytes": 200_000_000_000,
    "total_bytes": 400_000_000_000,
    "free_inodes": 9_000_000,
    "writable": True,
    "read_only": False,
}
ANSWER: dict[str, Any] = {
    "time": 1.8e9,
    "user": "root",
    "python": {"version": [3, 12, 3], "executable": "/opt/venv/bin/python"},
    "modules": {
        "missing": {},
        "versions": {"torch": "2.11.0+cu130", "transformers": "5.4", "triton": "3.6.0", "numpy": "2.1"},
    },
    "init": {"name": "systemd", "state": "running", "failed": []},
    "root": PLACE,
    "cache": PLACE,
    "tmp": {**PLACE, "path": "/tmp", "place": "/tmp"},
    "shm": {**PLACE, "path": "/dev/shm", "place": "/dev/shm", "file_system": "tmpfs"},
    "memlock": None,
    "cpu": {"usable": 16, "quota": None},
    "memory": {"total": 68_000_000_000, "available": 60_000_000_000, "limit": 68_000_000_000},
    "gpu": {
        "module": DRIVER,
        "devices": dict.fromkeys(FILES),
        "library": {"path": f"/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}", "version": DRIVER},
        "smi": {"code": 0, "said": "GPU 0: NVIDIA H200"},
        "cu_init": {"code": 0, "said": ""},
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "cuda_available": True, "gpu_count": 2},
    },
}
API = Api(
    label="pve1:8006",
    token_id="dfo@pve!deploy",
    vmid=101,
    version="9.2.11",
    lacking=(),
    node="pve1",
    lacking_on_node=(),
)


def said(**changes: Any) -> Answer:
    """The healthy answer with some keys changed; dicts are merged."""
    body = {k: {**v, **changes.get(k, {})} if isinstance(v, dict) else changes.get(k, v) for k, v in ANSWER.items()}
    body["python"] = {**body["python"], "version": tuple(body["python"]["version"])}
    return Answer.model_validate(body)


def inside(wanted: Wanted = WANTED, skew: float = 0.0, **changes: Any) -> Inside:
    return Inside(wanted, said(**changes), skew)


def chain(wanted: Wanted = WANTED, driver: str | None = DRIVER, **changes: Any) -> GpuInside:
    """The healthy chain with some links changed."""
    return GpuInside(wanted, said(gpu=changes), driver)


def on_node(**changes: Any) -> Node:
    return replace(NODE, **changes)


def configured(raw: tuple[str, ...] = (), **keys: str | None) -> Node:
    """The healthy node with some keys of the container's configuration changed (None: taken out)."""
    kept = {key: value for key, value in {**KEYS, **keys}.items() if value is not None}
    return on_node(config=Config(kept, raw))


def without_devs(*raw: str, **more: Any) -> Node:
    """The old way: no `dev` entries, these raw lines."""
    kept = {key: value for key, value in KEYS.items() if not key.startswith("dev")}
    return on_node(config=Config(kept, raw), **more)


def refused(kind: str, what: str = "no", why: str = "because", fix: str = "do that") -> Node:
    trouble = Trouble(kind, what, why, fix)
    return on_node(config=trouble, status=trouble)


ALL_WANTED = replace(WANTED, gpus=None, traced=True)
NO_GPU = replace(WANTED, gpus=())
MOUNTS = tuple(f"lxc.mount.entry: {path} {path[1:]} none bind,optional,create=file" for path in FILES)
RULES = ("lxc.cgroup2.devices.allow: c 195:* rwm", "lxc.cgroup2.devices.allow: c 511:* rwm")
