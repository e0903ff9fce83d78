"""The examples of docs/inventory.md are real."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.inventory.locate import find_inventory
from orchestrator.inventory.resolve import load_inventory
from orchestrator.inventory.show import rows

PAGE = (Path(__file__).parents[3] / "docs" / "inventory.md").read_text(encoding="utf-8")


def test_the_example_loads_and_shows_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "inventory").mkdir()
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    (tmp_path / "inventory" / "dfo.yaml").write_text(example[1])
    loaded = load_inventory(find_inventory(environ={}, cwd=tmp_path))
    resolution = loaded.resolve("lab", environ={"DFO_DEPLOY__KEEP": "3"})
    shown = {row.key: (row.text, row.origin) for row in rows(resolution)}
    table = re.search(r"KEY +VALUE +ORIGIN\n(.*?)```", PAGE, re.DOTALL)
    assert table is not None
    for line in table[1].splitlines():
        key, text, origin = re.split(r"  +", line.strip())
        assert shown[key] == (text, origin)


def test_the_variables_of_the_page_are_keys(tmp_path: Path) -> None:
    loaded = load_inventory(find_inventory(environ={}, cwd=tmp_path))
    named = re.findall(r"^\| `(DFO_\w+)=([^`]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)
    assert len(named) == 4
    for name, text, key in named:
        resolution = loaded.resolve("local", environ={name: text.strip("'")})
        assert next(row.origin for row in rows(resolution) if row.key == key) == name
