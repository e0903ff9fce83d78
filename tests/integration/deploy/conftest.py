from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from .bench import Bench, make_bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A small project and an empty target; nothing deployed yet."""
    return make_bench(tmp_path)


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases are there, the older one is to be pruned next, and the project has moved on by a big file."""
    bench = make_bench(tmp_path_factory.mktemp("pattern"))
    bench.deploy()
    bench.write("pkg/model.py", "x = 2\n")
    bench.deploy()
    bench.write("pkg/model.py", "x = 3\n")
    bench.write("pkg/noise.bin", os.urandom(300_000))
    return bench.root.parent


@pytest.fixture
def deployed(pattern: Path, tmp_path: Path) -> Bench:
    shutil.copytree(pattern, tmp_path, symlinks=True, dirs_exist_ok=True)
    bench = Bench(tmp_path / "project", tmp_path / "target")
    bench.config = bench.config.model_copy(update={"keep": 2})
    return bench
