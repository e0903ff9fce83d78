"""The keys of `result` under `--json`, frozen per command in tests/data/json_keys.json.

UPDATE_SNAPSHOTS=1 rewrites the file; a changed key is a decision and belongs into the CHANGELOG.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "json_keys.json"


def check_keys(words: Sequence[str], answer: dict[str, Any]) -> None:
    """Compare a successful answer with what is frozen for its command; a dry run and `--all` are forms of their own."""
    dry = " --dry-run" if {"-n", "--dry-run"} & set(words) else ""
    every = " --all" if "--all" in words else ""
    form = f"{answer['command']}{every}{dry}"
    keys = sorted(answer["result"])
    frozen: dict[str, list[str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        frozen[form] = keys
        FILE.write_text(json.dumps(dict(sorted(frozen.items())), indent=1) + "\n")
    assert frozen.get(form) == keys, f"`{form} --json` has other keys than {FILE.name} says"
