"""What to do with an exception nobody expected: keep all of it in a file, show one sentence."""

from __future__ import annotations

import platform
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from orchestrator import __version__
from orchestrator.errors import DfoError


def bug(error: Exception, arguments: Sequence[str]) -> DfoError:
    """A `bug` error that names the report file it has written."""
    path = _write(
        "\n".join(
            [
                f"dfo {__version__}, Python {platform.python_version()}, {platform.platform()}",
                f"arguments: {list(arguments)}",
                "",
                # No local variables: they may hold secrets.
                *traceback.format_exception(error),
            ]
        )
    )
    last = traceback.extract_tb(error.__traceback__)[-1]
    report = DfoError(
        "bug",
        f"dfo made a mistake: {type(error).__name__}: {error}",
        why=f"unexpected in {Path(last.filename).name}:{last.lineno}; the whole story is in {path}",
        fix="run it again; if it repeats, report it with that file",
        report=str(path),
    )
    report.__cause__ = error
    return report


def _write(text: str) -> Path:
    import platformdirs

    name = f"dfo-report-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}.txt"
    path = platformdirs.user_state_path("dfo") / "reports" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="dfo-")) / name
    path.write_text(text)
    return path
