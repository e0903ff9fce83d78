"""What a transport asks of the values of its target, and the target that comes out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.inventory.models import REACHED_BY, InventoryFile, ResolvedTarget, Target
from orchestrator.inventory.problems import Problem
from orchestrator.inventory.reach import PctConfig, SshConfig
from orchestrator.inventory.strict_yaml import KeyPath

LOCAL_ROOT, REMOTE_ROOT = ".dfo/target", "/opt/dfo"
REMOTE_PYTHON = "python3"
#: What `env` on the other side takes for a program: no option, no assignment, nothing relative.
_PROGRAM = re.compile(r"/[^=\n\0]*|[^-/=~\n\0][^/=\n\0]*")


def idle_sections(file: InventoryFile, where: Callable[[KeyPath], str]) -> Iterator[Problem]:
    """Sections of a target that its transport never looks at."""
    for name, target in file.targets.items():
        for section in sorted(_idle(target.transport) & target.model_fields_set):
            users = " and ".join(f"`{kind}`" for kind, used in REACHED_BY.items() if section in used)
            yield Problem(
                where(("targets", name, section)),
                f"`{section}` means nothing to `transport: {target.transport}`",
                f"under `targets.{name}`; it is for {users}",
            )


def means_something(path: KeyPath, transport: str) -> bool:
    """Whether a value, perhaps of `defaults` or a group, matters to a transport."""
    return path[0] not in _idle(transport)


def _idle(transport: str) -> set[str]:
    return {section for used in REACHED_BY.values() for section in used} - set(REACHED_BY[transport])


def misfits(name: str, target: Target, where: Callable[[KeyPath], str]) -> Iterator[Problem]:
    """What is missing, or cannot be meant, for the transport of a target."""
    if target.transport == "local":
        return
    needed = {"ssh.host": target.ssh.host}
    if target.transport == "pct":
        needed["pct.container"] = target.pct.container  # type: ignore[assignment]
    for dotted, value in needed.items():
        if value is None:
            section, key = dotted.split(".")
            why = f"it is needed under `targets.{name}.{section}` for `transport: {target.transport}`"
            yield Problem(where(("transport",)), f"missing key `{key}`", why)
    if target.transport == "pct" and target.pct.api.token_id is not None and target.pct.api.token is None:
        why = f"it is needed under `targets.{name}.pct.api`, beside `token_id`"
        yield Problem(where(("pct", "api", "token_id")), "missing key `token`", why)
    root = target.deploy.root
    if root is not None and (not root.startswith("/") or "\0" in root):
        yield Problem(
            where(("deploy", "root")),
            f"`targets.{name}.deploy.root` must be an absolute path",
            f"it is `{root}`, and `transport: {target.transport}` has no folder to start from",
        )
    if target.python != "auto" and not _PROGRAM.fullmatch(target.python):
        yield Problem(
            where(("python",)),
            f"`targets.{name}.python` must be an absolute path or a name in PATH",
            f"it is `{target.python}`, and `transport: {target.transport}` has no folder to start from",
        )


def resolved(name: str, target: Target, project: Path) -> ResolvedTarget:
    """The target as commands use it, after `misfits` found nothing."""
    local = target.transport == "local"
    root = target.deploy.root or (LOCAL_ROOT if local else REMOTE_ROOT)
    used = REACHED_BY[target.transport]
    return ResolvedTarget(
        name=name,
        transport=target.transport,
        ssh=_rooted(target.ssh, project) if "ssh" in used else None,
        pct=_with_api(target, project) if "pct" in used else None,
        root=str(project / Path(root).expanduser()) if local else root,
        python=_local_python(target.python, project) if local else _remote_python(target.python),
        project=project,
        deploy=target.deploy,
        env=target.env,
        gpus=None if target.gpus is None else tuple(target.gpus),
        launch=target.launch,
        artefacts=tuple(target.artefacts),
    )


def _with_api(target: Target, project: Path) -> PctConfig:
    """`pct` with the API's host decided, and its authority by an absolute path."""
    api = target.pct.api
    ca = str(project / Path(api.ca).expanduser()) if api.ca else None
    host = api.host or target.ssh.host
    return target.pct.model_copy(update={"api": api.model_copy(update={"ca": ca, "host": host})})


def _rooted(ssh: SshConfig, project: Path) -> SshConfig:
    """The same with absolute paths on the laptop."""

    def absolute(text: str) -> str:
        return str(project / Path(text).expanduser())

    paths = {
        "keys": [absolute(key) for key in ssh.keys],
        "known_hosts": absolute(ssh.known_hosts) if ssh.known_hosts else None,
        "config": absolute(ssh.config) if ssh.config and ssh.config != "none" else ssh.config,
    }
    return ssh.model_copy(update=paths)


def _local_python(wanted: str, project: Path) -> str:
    """A bare name is looked up in PATH; a path may be relative to the project, as `.venv/bin/python`."""
    if wanted == "auto":
        return sys.executable
    return str(project / Path(wanted).expanduser()) if "/" in wanted else wanted


def _remote_python(wanted: str) -> str:
    return REMOTE_PYTHON if wanted == "auto" else wanted
