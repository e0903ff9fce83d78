"""This machine."""

from __future__ import annotations

import shlex

from orchestrator.doctor.facts import Laptop
from orchestrator.doctor.verdict import Checks, Verdict, failed, ok, skipped, warning
from orchestrator.words import count

OLDEST_PYTHON = (3, 11)
_NO_SSH = "nothing here needs ssh"


def python(laptop: Laptop) -> Verdict:
    version = ".".join(map(str, laptop.python))
    if laptop.python[:2] < OLDEST_PYTHON:
        return failed(
            f"Python {version}; dfo needs 3.11", "install dfo with a newer one: `pipx install --python 3.11 …`"
        )
    return ok(f"dfo {laptop.dfo}, Python {version}")


def inventory(laptop: Laptop) -> Verdict:
    if laptop.inventory_mode & 0o002:
        why = f"anybody on this machine may write to {laptop.inventory}, and it can name commands to run"
        return warning(why, f"`chmod o-w {shlex.quote(laptop.inventory.partition(' (')[0])}`")
    return ok(f"{laptop.inventory}, target `{laptop.wanted.target}` by {laptop.wanted.transport}")


def ssh_program(laptop: Laptop) -> Verdict:
    if laptop.wanted.transport == "local":
        return skipped(_NO_SSH)
    if laptop.ssh is not None:
        return ok(laptop.ssh + (f", for {laptop.needs_ssh}" if laptop.needs_ssh else ""))
    install = "`apt install openssh-client` (macOS has it)"
    if laptop.needs_ssh:
        return failed(f"there is no ssh program, and {laptop.needs_ssh} needs it", install)
    return warning("there is no ssh program: ~/.ssh/config is read without Include and Match", install)


def key_files(laptop: Laptop) -> Verdict:
    if laptop.wanted.transport == "local":
        return skipped(_NO_SSH)
    for key in laptop.keys:
        path = shlex.quote(key.path)
        if key.mode is None:
            return failed(
                f"there is no {key.path}", f"correct `ssh.keys`, or make it: `ssh-keygen -t ed25519 -f {path}`"
            )
        if key.mode & 0o077:
            why = f"{key.path} has mode {key.mode:04o}: others of this machine may read it, and ssh refuses it"
            return warning(why, f"`chmod 600 {path}`")
        if key.problem and not laptop.needs_ssh:
            fix = "name the private half of another in `ssh.keys`, or set `ssh.client` to openssh"
            return warning(f"{key.path} cannot be used: {key.problem}", fix)
    return ok(f"{count(len(laptop.keys), 'key file')}, readable by you alone" if laptop.keys else "no key files")


def agent(laptop: Laptop) -> Verdict:
    if laptop.agent is None:
        return skipped(_NO_SSH)
    if laptop.needs_ssh:
        return skipped("the ssh program finds its keys by itself")
    locked = [key.path for key in laptop.keys if key.locked]
    usable = [key for key in laptop.keys if not key.locked and not key.problem and key.mode is not None]
    held = laptop.agent.keys
    if held:
        return ok(f"the agent holds {count(held, 'key')}")
    why = "no agent answers" if held is None else "the agent holds no key"
    if not laptop.agent.wanted:
        why = "`ssh.agent` is off"
    if locked and not usable:
        return failed(f"{why}, and {locked[0]} has a passphrase", f"`eval $(ssh-agent)`, then `ssh-add {locked[0]}`")
    if not usable:
        return failed(f"{why}, and there is no key file", "`ssh-add`, or name a key in `ssh.keys`")
    return skipped(f"{why}; the key files do without")


def secrets(laptop: Laptop) -> Verdict:
    if laptop.lost_secrets:
        first = laptop.lost_secrets[0]
        return failed(first.text, first.fix)
    if not laptop.secrets:
        return skipped("the inventory has no secret that can be read without running a command")
    return ok(f"{', '.join(laptop.secrets)} can be read")


def run_config(laptop: Laptop) -> Verdict:
    if laptop.config is None:
        return skipped("`launch.config` is not set")
    if not laptop.config_there:
        return failed(f"there is no {laptop.config}", "correct `launch.config`, which starts at the project")
    return ok(f"{laptop.config} is there")


CHECKS: Checks[Laptop] = (
    ("python", python),
    ("inventory", inventory),
    ("ssh program", ssh_program),
    ("key files", key_files),
    ("ssh agent", agent),
    ("secrets", secrets),
    ("run config", run_config),
)
