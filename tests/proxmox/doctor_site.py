"""What `dfo doctor` says of a site of the bench, and a site where it has nothing to say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from bench.container import Container
from bench.node import Node

from .site import Site, site_on

VERSIONS = {"torch": "2.11.0", "transformers": "5.0", "safetensors": "0.5", "numpy": "1.26", "yaml": "6.0"}


def give_modules(container: Container) -> None:
    """What wheels of the trainer leave behind; no check imports them."""
    place = container.root / "usr/lib/python3/dist-packages"
    for name, version in VERSIONS.items():
        info = place / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (place / name).mkdir()
        (place / name / "__init__.py").touch()


@contextmanager
def healthy_site(node: Node, container: Container, folder: Path) -> Iterator[Site]:
    """Target `lab`, healthy: a container with the trainer's modules, that wants no GPU."""
    give_modules(container)
    with site_on(node, folder) as made:
        made.targets["lab"] = made.target(node.ssh, gpus=[])
        yield made


def examine(site: Site) -> SimpleNamespace:
    """`code`, `error` (None when nothing failed), `checks`: `node: lock` → (status, saw, fix), and `seconds`."""
    done = site.dfo("doctor", "lab", "--json")
    answer = json.loads(done.out)
    found = answer.get("result") or answer["error"]
    checks: dict[str, tuple[str, str, str]] = {
        f"{check['group'].split()[0]}: {check['check']}": (check["status"], check["saw"], check["fix"] or "")
        for check in found["checks"]
    }
    return SimpleNamespace(code=done.code, error=answer.get("error"), checks=checks, seconds=found["seconds"])


def of(seen: SimpleNamespace, *statuses: str) -> dict[str, tuple[str, str, str]]:
    return {name: check for name, check in seen.checks.items() if check[0] in statuses}


def one_fails(site: Site, name: str, saw: str, fix: str = "") -> SimpleNamespace:
    """Exactly this check fails, and what depends on it is skipped."""
    seen = examine(site)
    assert list(of(seen, "failed")) == [name], of(seen, "failed")
    _, said, cure = seen.checks[name]
    assert saw in said and fix in cure, (said, cure)
    assert (seen.code, seen.error["kind"], seen.error["why"]) == (5, "target_unfit", said)
    return seen


def one_warns(site: Site, name: str, saw: str, fix: str = "") -> None:
    """Exactly this check warns, and none fails."""
    seen = examine(site)
    assert list(of(seen, "failed", "warning")) == [name], of(seen, "failed", "warning")
    _, said, cure = seen.checks[name]
    assert saw in said and fix in cure, (said, cure)
    assert seen.code == 0


def skipped(seen: SimpleNamespace, group: str) -> set[str]:
    """Why the checks of a group were skipped; all of them must have been."""
    found = [check for name, check in seen.checks.items() if name.startswith(f"{group}: ")]
    assert {status for status, _, _ in found} == {"skipped"}
    return {saw for _, saw, _ in found}
