"""Starting a run: read the configuration, ask the target, render the script, start it detached.

A `LaunchPlan` is everything that will be sent, as data; `--dry-run` shows it and `start` sends the same object.
The target checks again, under its lock, what may have changed in between.
"""

from __future__ import annotations

import getpass
import hashlib
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import DfoError, PreflightError, UsageError, from_dict
from orchestrator.inventory.models import ResolvedTarget
from orchestrator.inventory.secrets import MASK, Secret
from orchestrator.owner import owner_for
from orchestrator.remote.wire import Record, source_of
from orchestrator.resources import locate
from orchestrator.runs.run_config import RunConfigText, devices_of, read_run_config
from orchestrator.runs.script import render_script
from orchestrator.session import Session

STAGES = ("generate", "preflight", "warmup", "train", "evaluate", "export")
#: Stands for the release in a script that is only shown.
NO_RELEASE = "not-deployed-yet"
PREPARE_DEADLINE = 150.0
START_DEADLINE = 90.0


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The checkpoint a run goes on from. `path` is on the target; `release` is the earlier run's."""

    run: int
    release: str
    path: str


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What will be started. `problem` is why the devices are not free, if they are not; `gpus` what was seen there.

    `environment` is what the inventory sets, secrets masked; `variables` what the core of the release adds to it.
    `spec` becomes run.json (the target adds number and time), `files` the run's folder.
    """

    release: str
    config: RunConfigText
    devices: tuple[str, ...]
    stages: tuple[str, ...]
    resumed: Resumed | None
    problem: DfoError | None
    gpus: Sequence[Mapping[str, Any]]
    environment: Mapping[str, str]
    variables: Mapping[str, str]
    spec: Mapping[str, object]
    files: Mapping[str, str]

    def as_dict(self) -> dict[str, object]:
        """For `--json`; secrets are masked."""
        return {
            "release": self.release,
            "devices": list(self.devices),
            "stages": list(self.stages),
            "resume_from": None if self.resumed is None else self.resumed.run,
            "config": self.config.origin,
            "overrides": dict(self.config.overrides),
            "environment": dict(self.environment),
            "variables": dict(self.variables),
            "problem": None if self.problem is None else self.problem.as_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run whose supervisor has reported. `folder` is on the target."""

    run: int
    folder: str
    state: str


def find_resumed(session: Session, run: int) -> tuple[Resumed, tuple[str, str]]:
    """The newest checkpoint of an earlier run, and its configuration as (text, name).

    Raises `unknown_run`, `resume_impossible`.
    """
    answer = session.call("launch", {"op": "resume", "run": run, "target": session.name})
    resumed = Resumed(run=run, release=str(answer["release"]), path=str(answer["checkpoint"]))
    return resumed, (str(answer["config"]), f"run.yaml of run {run}")


def prepare(
    session: Session,
    target: ResolvedTarget,
    *,
    warmup: bool,
    sets: Sequence[str] = (),
    resume: int | None = None,
    dry_run: bool = False,
) -> LaunchPlan:
    """Decide everything, changing nothing.

    Raises UsageError (configuration, template), PreflightError (`nothing_deployed`, `resume_impossible`). Busy
    devices are not raised but kept in the plan, because `--dry-run` and `--force` look at them differently; with
    `dry_run` so is `nothing_deployed`, and `release` is then `NO_RELEASE`.
    """
    resumed, earlier = (None, None) if resume is None else find_resumed(session, resume)
    config = read_run_config(target, sets=sets, resumed=earlier)
    devices = devices_of(config, target.gpus)
    request = {
        "op": "prepare",
        "target": target.name,
        "devices": devices,
        "config": config.text,
        "written": config.written,
        "environment": core_environment(session, target),
        "dry_run": dry_run,
    }
    answer: dict[str, Any] = session.call("launch", request, deadline=PREPARE_DEADLINE)
    _judge_check(answer, config, target)
    release = answer["release"] or NO_RELEASE
    wanted = {*target.launch.stages, *(["warmup"] if warmup else [])}
    stages = tuple(name for name in STAGES if name in wanted)
    files = {
        "run.yaml": config.text,
        "launch.sh": _script(session, target, release, stages, resumed),
        "supervisor.py": source_of("supervisor").decode(),
    }
    return LaunchPlan(
        release=release,
        config=config,
        devices=devices,
        stages=stages,
        resumed=resumed,
        problem=None if answer["problem"] is None else from_dict(answer["problem"]),
        gpus=answer["gpus"],
        environment={name: MASK if isinstance(value, Secret) else value for name, value in target.env.items()},
        variables={str(name): str(value) for name, value in (answer["variables"] or {}).items()},
        spec=_spec(target, release, devices, stages, resumed, files),
        files=files,
    )


def start(
    session: Session,
    target: ResolvedTarget,
    plan: LaunchPlan,
    *,
    force: bool = False,
    lock_wait: float = 0.0,
    on_record: Callable[[Record], None] | None = None,
) -> Started:
    """Start what the plan says and return once the run itself has reported.

    Secrets are fetched now and travel on stdin into the supervisor's environment; no file and no argv has them.
    Raises LockError, PreflightError (`run_alive`, `device_in_use`, …), TransferError `plan_stale`.
    """
    if plan.problem is not None and not force:
        raise plan.problem
    revealed = {
        name: value.reveal(name, project=target.project)
        for name, value in target.env.items()
        if isinstance(value, Secret)
    }
    request = {
        "op": "start",
        "target": target.name,
        "owner": owner_for(session, "dfo launch"),
        "wait_s": lock_wait,
        "release": plan.release,
        "spec": plan.spec,
        "files": plan.files,
        "hashes": _hashes(plan.files),
        "secrets": revealed,
        # On our own machine a run is ours, not the system's.
        "units": target.transport != "local",
        "force": force,
    }
    answer: dict[str, Any] = session.call("launch", request, deadline=START_DEADLINE + lock_wait, on_record=on_record)
    return Started(run=answer["run"], folder=answer["folder"], state=answer["state"]["state"])


def cache_folder(session: Session) -> str:
    """The folder on the target that outlives releases and runs. Everything else about caches is the core's business."""
    return f"{session.root}/shared/cache"


def core_environment(session: Session, target: ResolvedTarget) -> dict[str, str]:
    """What the script sets for the stages of a run, as far as questions to the core depend on it; no secrets."""
    return {"DFLASH_CACHE_DIR": cache_folder(session), **_visible(target), **_plain(target)}


def _visible(target: ResolvedTarget) -> dict[str, str]:
    """The GPUs of the target, under the numbers that nvidia-smi uses."""
    if target.gpus is None:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, target.gpus))}


def _plain(target: ResolvedTarget) -> dict[str, str]:
    return {name: value for name, value in target.env.items() if isinstance(value, str)}


def _script(
    session: Session,
    target: ResolvedTarget,
    release: str,
    stages: Sequence[str],
    resumed: Resumed | None,
) -> str:
    plain = _plain(target)
    values = {
        "release": f"{session.root}/releases/{release}",
        "python": session.python,
        "cache": cache_folder(session),
        "visible": _visible(target),
        "env": plain,
        "secrets": [name for name in target.env if name not in plain],
        "stages": stages,
        "warmup_required": target.launch.warmup.require,
        "warmth_required": target.launch.warmup.when_cold == "refuse",
        "resume": resumed is not None,
    }
    return render_script(_template(target), values, name=target.launch.template)


def _template(target: ResolvedTarget) -> str:
    path = locate(target.launch.template, project=target.project)
    try:
        if path is None:
            raise FileNotFoundError(f"it is neither in {target.project} nor part of the installation")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "template_invalid",
            f"cannot read the template `{target.launch.template}`",
            why=str(error),
            fix=f"correct `launch.template` of target `{target.name}`",
        ) from error


def _spec(
    target: ResolvedTarget,
    release: str,
    devices: Sequence[str],
    stages: Sequence[str],
    resumed: Resumed | None,
    files: Mapping[str, str],
) -> dict[str, object]:
    launch = target.launch
    return {
        "v": 1,
        "release": release,
        "target": target.name,
        "created_by": f"{getpass.getuser()}@{socket.gethostname()}",
        "devices": list(devices),
        "stages": list(stages),
        "resume_from": None if resumed is None else resumed.run,
        "resume_path": None if resumed is None else resumed.path,
        # In the environment of every process of the run; a number alone would not be unique on the machine.
        "marker": secrets.token_hex(8),
        "stop": {"signal": launch.stop.signal, "grace": launch.stop.grace},
        "limits": {"max_runtime": launch.max_runtime, "warmup_timeout": launch.warmup.timeout},
        "files": _hashes(files),
    }


def _hashes(files: Mapping[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}


def _judge_check(answer: Mapping[str, Any], config: RunConfigText, target: ResolvedTarget) -> None:
    """Turn what the release's own check said into our error; silent when it found nothing."""
    check, plain = answer["check"], answer["plain_check"]
    if check["exit_code"] == 0:
        return
    what, why, fix = _three_lines(check["stderr"])
    if not any(line.startswith("error: ") for line in check["stderr"].splitlines()):
        raise PreflightError(
            "release_broken",
            f"release {answer['release']} cannot check a run configuration",
            why=f"`python -m dflash_core check` ended with code {check['exit_code']}: {what}",
            fix=f"`dfo deploy {target.name}` a complete `dflash_core`, or correct `python` of the target",
        )
    origin = config.origin
    if plain is not None:
        at_file = _three_lines(plain["stderr"])[0]
        if _PLACE.sub("", at_file) == _PLACE.sub("", what):
            what = at_file
        else:
            # Line numbers of a text that the user has never seen would only mislead.
            origin += " with " + ", ".join(f"{key}={value}" for key, value in config.overrides.items())
            what = _PLACE.sub("/dev/stdin", what)
    raise UsageError("config_invalid", what.replace("/dev/stdin", origin), why=why, fix=fix)


_PLACE = re.compile(r"/dev/stdin(:\d+)*")


def _three_lines(stderr: str) -> tuple[str, str, str]:
    """`error: …`, `why: …`, `fix: …` as the core prints them; the last line of anything else."""
    found = {
        name: text
        for name, _, text in (line.strip().partition(": ") for line in stderr.splitlines())
        if name in {"error", "why", "fix"}
    }
    last = stderr.strip().splitlines()[-1:] or ["no message"]
    return (
        found.get("error", last[0]),
        found.get("why", "the core of the release refuses it"),
        found.get("fix", "correct the run configuration; nothing was started"),
    )
