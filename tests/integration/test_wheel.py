"""The wheel, installed outside the clone, is the whole product: it can write an inventory, plan and show a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as `pip install` lays them out; the dependencies are ours."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(CLONE)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def dfo(installed: Path, project: Path, *words: str) -> dict[str, object]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DFO_")}
    done = subprocess.run(
        # -P: neither the current folder nor the clone stands before the wheel.
        [sys.executable, "-P", "-m", "orchestrator", *words, "--json"],
        cwd=project,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, object] = json.loads(done.stdout)["result"]
    return answer


def test_it_holds_both_halves_and_what_they_read(installed: Path) -> None:
    names = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert {
        "orchestrator/remote/programs/_base.py",
        "orchestrator/_bundled/templates/launch.sh.j2",
        "orchestrator/_bundled/templates/report.html.j2",
        "orchestrator/_bundled/inventory/example.yaml",
        "orchestrator/_bundled/inventory/local.yaml",
        "dflash_core/drafter/model.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "demo", "docs"))]
    assert not [name for name in names if name.endswith("dfo.yaml")], "a developer's own inventory stays at home"


def test_the_plain_install_brings_no_torch(installed: Path) -> None:
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text()
    plain = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    names = {line.split()[1].split(">")[0].split(";")[0] for line in plain}
    assert {"typer", "pydantic", "pyyaml", "fabric", "paramiko", "proxmoxer", "jinja2"} <= names
    assert not names & {"torch", "triton", "transformers", "numpy", "safetensors"}


def test_init_deploy_and_launch_from_it(installed: Path, tmp_path: Path) -> None:
    dfo(installed, tmp_path, "init")
    assert (tmp_path / "inventory" / "dfo.yaml").exists()
    deploy = dfo(installed, tmp_path, "deploy", "--dry-run")
    assert "dflash_core/drafter/model.py" in json.dumps(deploy)
    assert str(CLONE) not in json.dumps(deploy), "the sources are the wheel's, not the clone's"
    launch = dfo(installed, tmp_path, "launch", "--dry-run", "--warmup-first")
    files = launch["files"]
    assert isinstance(files, dict) and "stage warmup" in files["launch.sh"]
    assert not (tmp_path / ".dfo").exists(), "a dry run changes nothing"
