"""What it takes to get 500 files into a container: dfo, a bare tar stream, a copy per file, Ansible.

    python benchmarks/deploy.py --out benchmarks/results/deploy-NAME.json [--ansible peers/bin] [--repeats 3]

On the Proxmox bench of the tests (tests/bench/README.md: a real sshd, a real container, a stand-in for `pct`), so as
root on Debian. Every way goes through a relay that makes a round trip take 10 ms. Twice: with a `pct` that starts at
once, and with one that takes 0.5 s to start, as the real one does. Medians; the ways alternate, so that a busy moment
meets all of them.

dfo is measured twice: the whole command with the start of Python and the checks of all sources, and its remote part
from the first packet of the connection until the release is current, which is what a tar stream does.

A copy per file is what is measured for 20 files, times 25; Ansible's `copy` is the time for 10 files and 49 times what
10 more take. `--ansible` names the `bin` of an environment with requirements/peers-deploy.txt.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from bench.node import Node
from bench.relay import Relay
from bench.sshd import Endpoint
from fabric import Connection
from proxmox.site import Site, counted

from orchestrator.deploy import release
from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.resolve import load_inventory
from orchestrator.session import Session
from orchestrator.transport import open_transport

FILES, SAMPLE = 500, 20
ROUND_TRIP_S, PCT_S = 0.010, 0.5
INSIDE = "/opt/copied"


# The files


class NoImports(ast.NodeTransformer):
    """The container has not all that the standard library wants, and `dfo deploy` would say so."""

    def visit_Import(self, node: ast.Import) -> ast.Pass:
        return ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.Pass:
        return ast.Pass()


def write_tree(folder: Path) -> int:
    """500 modules of the standard library, without their imports; returns their size in bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "lib2to3", "__pycache__"}
    names = [
        path
        for path in sorted(library.rglob("*.py"))
        if not skipped & set(path.parts) and 2000 < path.stat().st_size < 25_000 and "bad" not in path.name
    ]
    assert len(names) >= FILES, f"{library} has only {len(names)} modules"
    size = 0
    for name in names[:: len(names) // FILES][:FILES]:
        source = ast.unparse(NoImports().visit(ast.parse(name.read_bytes()))) + "\n"
        path = folder / "pkg" / name.relative_to(library)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        size += len(source)
    (folder / "pkg/salt.py").write_text("salt = 0\n")
    return size


# The ways. Each returns seconds for all files.


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    started = time.perf_counter()
    yield lambda: time.perf_counter() - started


def ours(site: Site, method: str) -> float:
    """`dfo deploy` from the start of its process, everything new."""
    site.container.run(["rm", "-rf", site.root])
    argv = [sys.executable, "-m", "orchestrator", *site.argv("deploy", "lab", "--json", "--method", method)]
    with stopwatch() as took:
        done = subprocess.run(argv, capture_output=True, check=True)
    assert json.loads(done.stdout)["result"]["changed"]
    return took()


def remote_part(site: Site) -> float:
    """Connect, take facts, decide, ship, verify, switch: what remains when the sources are checked."""
    site.container.run(["rm", "-rf", site.root])
    site.argv()
    inventory = load_inventory(find_inventory(site.project / "inventory.yaml", environ={}))
    target = inventory.resolve("lab", environ={}).target
    sources, examined = release.read_sources(target.project, target.deploy)
    with stopwatch() as took:
        session = Session("lab", open_transport(target), target.root, target.python)
        plan = release.plan_deploy(session, sources, examined, target.deploy)
        release.apply(session, plan)
        session.transport.close()
    assert plan.method is not None and plan.method.name == "pct-push"
    return took()


def nothing_changed(site: Site) -> float:
    argv = [sys.executable, "-m", "orchestrator", *site.argv("deploy", "lab", "--json")]
    with stopwatch() as took:
        done = subprocess.run(argv, capture_output=True, check=True)
    assert not json.loads(done.stdout)["result"]["changed"]
    return took()


def tar_stream(site: Site, endpoint: Endpoint, compressed: bool) -> float:
    """tar | ssh node pct exec tar: the least that anybody can do, without any check."""
    site.container.run(["sh", "-c", f"rm -rf {INSIDE}; mkdir {INSIDE}"])
    z = "z" if compressed else ""
    remote = f"pct exec 200 -- tar -x{z}f - -C {INSIDE}"
    line = f"tar -C {shlex.quote(str(site.project))} -c{z}f - pkg | {shlex.join([*endpoint.command(), remote])}"
    with stopwatch() as took:
        subprocess.run(["sh", "-c", line], check=True)
    return took()


def copy_each(site: Site, endpoint: Endpoint) -> float:
    """`fabric.put` and `pct push` for each of 20 files, on one connection that is open already; for 500 of them."""
    files = sorted(path for path in (site.project / "pkg").rglob("*.py"))[:: FILES // SAMPLE][:SAMPLE]
    names = [str(path.relative_to(site.project)) for path in files]
    folders = sorted({str(Path(INSIDE, name).parent) for name in names})
    site.container.run(["sh", "-c", f"rm -rf {INSIDE}; mkdir -p {shlex.join(folders)}"])
    login = {"key_filename": str(endpoint.key), "look_for_keys": False, "allow_agent": False}
    with Connection(endpoint.host, user=endpoint.user, port=endpoint.port, connect_kwargs=login) as connection:
        connection.run("mkdir -p /root/staging", hide=True)
        with stopwatch() as took:
            for path, name in zip(files, names, strict=True):
                connection.put(str(path), "/root/staging/file")
                connection.run(f"pct push 200 /root/staging/file {shlex.quote(f'{INSIDE}/{name}')}", hide=True)
        seconds = took()
        connection.run("rm -r /root/staging", hide=True)
    return seconds * FILES / SAMPLE


# Ansible


class Ansible:
    """Its connection plugin for containers of Proxmox, with the defaults of both."""

    def __init__(self, site: Site, endpoint: Endpoint, programs: Path, folder: Path) -> None:
        self._site, self._folder = site, folder
        self._program = programs / "ansible-playbook"
        known = Path(os.environ["HOME"]) / ".ssh/known_hosts"
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(endpoint.known_hosts, known)
        login = {
            "ansible_host": endpoint.host, "ansible_port": endpoint.port, "ansible_user": endpoint.user,
            "ansible_ssh_private_key_file": str(endpoint.key), "ansible_private_key_file": str(endpoint.key),
            "ansible_connection": "community.proxmox.proxmox_pct_remote", "proxmox_vmid": 200,
            "ansible_python_interpreter": "/usr/bin/python3",
        }  # fmt: skip
        (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": {"ct": login}}}))

    def play(self, task: dict[str, Any], *, keep: bool = False) -> float:
        if not keep:
            self._site.container.run(["sh", "-c", f"rm -rf {INSIDE}; mkdir {INSIDE}"])
        play = [{"hosts": "ct", "gather_facts": False, "tasks": [task]}]
        (self._folder / "play.json").write_text(json.dumps(play))
        argv = [str(self._program), "-i", str(self._folder / "hosts.json"), str(self._folder / "play.json")]
        with stopwatch() as took:
            done = subprocess.run(argv, capture_output=True, text=True, cwd=self._folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return took()

    def copy(self, number: int) -> float:
        """`ansible.builtin.copy` of a folder with so many of the files."""
        source = self._folder / f"first-{number}"
        if not source.exists():
            for path in sorted((self._site.project / "pkg").rglob("*.py"))[:: FILES // number][:number]:
                target = source / path.relative_to(self._site.project)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        return self.play({"ansible.builtin.copy": {"src": f"{source}/", "dest": INSIDE}})

    def unarchive(self) -> float:
        """`ansible.builtin.unarchive` of one archive with all of them, made beforehand."""
        archive = self._folder / "all.tar.gz"
        subprocess.run(["tar", "-C", str(self._site.project), "-czf", str(archive), "pkg"], check=True)
        return self.play({"ansible.builtin.unarchive": {"src": str(archive), "dest": INSIDE}})

    def measure(self) -> dict[str, float]:
        """Takes minutes, so once; `copy` is extrapolated."""
        ten, twenty = self.copy(10), self.copy(20)
        each = (twenty - ten) / 10
        return {"copy_10": ten, "copy_20": twenty, "copy": ten + each * (FILES - 10), "unarchive": self.unarchive()}


# All of it


def series(site: Site, endpoint: Endpoint, repeats: int) -> dict[str, Any]:
    """Every way, alternating. Medians, and all values beside them."""
    ways: dict[str, Callable[[], float]] = {
        "dfo_pct_push": lambda: ours(site, "pct-push"),
        "dfo_pct_push_remote_part": lambda: remote_part(site),
        "tar_stream": lambda: tar_stream(site, endpoint, compressed=False),
        "dfo_stream": lambda: ours(site, "stream"),
        "tar_stream_gzip": lambda: tar_stream(site, endpoint, compressed=True),
        "dfo_nothing_changed": lambda: nothing_changed(site),
        "fabric_put_and_pct_push": lambda: copy_each(site, endpoint),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            seconds[name].append(round(way(), 3))
    return {name: {"s": median(values), "all_s": values} for name, values in seconds.items()}


def calls(site: Site) -> dict[str, list[str]]:
    counts = {}
    with counted(site.node) as made:
        ours(site, "pct-push")
    counts["dfo_pct_push"] = list(made)
    with counted(site.node) as made:
        nothing_changed(site)
    counts["dfo_nothing_changed"] = list(made)
    return counts


def verdict(fast: dict[str, Any], slow: dict[str, Any], made: dict[str, list[str]]) -> dict[str, Any]:
    """What was promised, and what came out."""
    remote, late = fast["dfo_pct_push_remote_part"]["s"], slow["dfo_pct_push_remote_part"]["s"]
    stream, late_stream = fast["tar_stream"]["s"], slow["tar_stream"]["s"]
    executed = sum(call.startswith("exec") for call in made["dfo_nothing_changed"])
    return {
        "faster_than_a_copy_per_file": {
            "pct at once": round(fast["fabric_put_and_pct_push"]["s"] / fast["dfo_pct_push"]["s"], 1),
            "pct 0.5 s": round(slow["fabric_put_and_pct_push"]["s"] / slow["dfo_pct_push"]["s"], 1),
            "at least": 40,
        },
        "remote_part_in_tar_streams": {"pct at once": round(remote / stream, 2), "at most": 2},
        "remote_part_more_than_a_tar_stream_in_pct_calls": {
            "pct 0.5 s": round((late - late_stream) / PCT_S, 2),
            "at most": 4,
        },
        "pct_exec_when_nothing_changed": {"calls": executed, "at most": 2},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--ansible", type=Path, help="folder with ansible-playbook")
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as home, Node() as node:
        os.environ["HOME"] = home  # nobody's own ssh or Ansible settings
        folder = Path(home)
        node.create(200)
        relay = Relay(node.ssh, delay=ROUND_TRIP_S / 2)
        endpoint = relay.endpoint
        site = Site(node, folder / "project", "/opt/dfo")
        shutil.rmtree(site.project / "pkg")
        size = write_tree(site.project)
        site.targets = {"lab": site.target(endpoint)}
        results: dict[str, Any] = {"pct at once": series(site, endpoint, given.repeats)}
        with node.delay(PCT_S):
            results["pct 0.5 s"] = series(site, endpoint, given.repeats)
            if given.ansible:
                ansible = Ansible(site, endpoint, given.ansible.absolute(), folder)
                results["pct 0.5 s"]["ansible"] = {name: round(s, 1) for name, s in ansible.measure().items()}
        made = calls(site)
        relay.close()
    report = {
        "benchmark": "deploy",
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{os.cpu_count()} CPU cores, {platform.platform()}",
        "versions": versions(given.ansible),
        "files": FILES,
        "bytes": size,
        "round_trip_ms": ROUND_TRIP_S * 1000,
        "repeats": given.repeats,
        "extrapolated": {"fabric_put_and_pct_push": f"from {SAMPLE} files", "ansible copy": "from 10 and 20 files"},
        "results": results,
        "pct_calls": made,
        "verdict": verdict(results["pct at once"], results["pct 0.5 s"], made),
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["verdict"], indent=1))


def versions(ansible: Path | None) -> dict[str, str]:
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.strip()
    found = {"python": platform.python_version(), "ssh": ssh}
    found |= {name: importlib.metadata.version(name) for name in ("dflash-orchestrator", "fabric", "paramiko")}
    if ansible:
        shown = subprocess.run([ansible / "ansible-community", "--version"], capture_output=True, text=True)
        found["ansible"] = shown.stdout.split()[-1]
    return found


if __name__ == "__main__":
    main()
