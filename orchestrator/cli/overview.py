"""`dfo status --all` and `--watch`: targets side by side, each in a thread; who does not answer hides nobody."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.errors import DfoError
    from orchestrator.runs.status import TargetStatus

#: Between two looks at a target, and between two drawings (seconds).
EVERY, REDRAW = 2.0, 1.0
#: How long connections may take to say goodbye after Ctrl-C (seconds).
LEAVE = 0.5


@dataclass
class Seen:
    """One target as the newest look at it found it."""

    rt: Runtime
    found: TargetStatus | None = None
    error: DfoError | None = None

    @property
    def name(self) -> str:
        assert self.rt.target_option is not None
        return self.rt.target_option

    def look(self) -> None:
        from orchestrator.runs.status import fetch_status

        with self._noting_trouble():
            self.found, self.error = fetch_status(self.rt.session, last=1), None

    def keep_looking(self) -> None:
        from orchestrator.runs.status import watch_status

        while True:
            with self._noting_trouble():
                for found in watch_status(self.rt.session, every=EVERY):
                    self.found, self.error = found, None
            time.sleep(EVERY)

    @contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        from orchestrator.errors import DfoError

        try:
            yield
        except DfoError as error:
            self.found, self.error = None, error
        except Exception as error:
            from orchestrator.cli.report_bug import bug

            self.found, self.error = None, bug(error, sys.argv[1:])

    def rows(self) -> list[list[str]]:
        from orchestrator.runs.status import overview, trouble

        if self.error is not None:
            return [trouble(self.error, self.name)]
        return overview(self.found, self.name)

    def as_dict(self) -> dict[str, object]:
        if self.error is not None:
            return {"target": self.name, "ok": False, "error": self.error.as_dict()}
        return {"target": self.name, "ok": True, "result": self.found.as_dict(self.name) if self.found else None}


def show_once(rt: Runtime, names: Sequence[str]) -> None:
    """One table of all; raises only when no target answered, and then for the first."""
    seen = _all(rt, names)
    threads = [threading.Thread(target=one.look, daemon=True) for one in seen]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _leave(seen)
    _draw(rt, seen)
    for one in seen:
        if one.error is not None:
            rt.console.say(f"`{one.name}`: {one.error.what}: {one.error.why}\n  fix: {one.error.fix}")
    if all(one.error is not None for one in seen) and seen[0].error is not None:
        raise seen[0].error
    rt.console.result(targets=[one.as_dict() for one in seen])


def keep_showing(rt: Runtime, names: Sequence[str]) -> None:
    """Draw the table anew every second until Ctrl-C. With `--json`, an event each time."""
    seen = _all(rt, names)
    for one in seen:
        threading.Thread(target=one.keep_looking, daemon=True).start()
    try:
        while True:
            rt.console.fresh_page()
            _draw(rt, seen)
            rt.console.say(f"{time.strftime('%H:%M:%S')}  Ctrl-C leaves; runs go on.")
            rt.console.event(event="status", targets=[one.as_dict() for one in seen])
            time.sleep(REDRAW)
    except KeyboardInterrupt:
        rt.console.result(targets=[one.as_dict() for one in seen])
    finally:
        _leave(seen)


def _all(rt: Runtime, names: Sequence[str]) -> list[Seen]:
    quiet = replace(rt.console, quiet=True, progress=False)
    return [Seen(rt.beside(name, quiet)) for name in names]


def _draw(rt: Runtime, seen: Sequence[Seen]) -> None:
    from orchestrator.runs.status import OVERVIEW

    rt.console.table(OVERVIEW, [row for one in seen for row in one.rows()])


def _leave(seen: Sequence[Seen]) -> None:
    """All at once and not for long: a dead connection answers no goodbye."""
    threads = [threading.Thread(target=one.rt.close, daemon=True) for one in seen]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + LEAVE
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
