"""One object decides what is printed where: data on stdout, everything else on stderr.

No command looks at `--json`, `--quiet` or a terminal by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from orchestrator.errors import DfoError, UsageError
from orchestrator.terminal import printable_lines

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

JSON_SCHEMA = "dfo/1"


@dataclass
class Step:
    """A line of the runbook while it runs; set `detail` to what was learnt."""

    name: str
    detail: str = ""
    draw: Callable[[str], None] = lambda text: None

    def report(self, text: str) -> None:
        """Show how far it is, where a line may move."""
        self.draw(text)


@dataclass
class Console:
    """Output policy of one command.

    `json`: one object on stdout and nothing else there. `quiet`: errors only. `verbose`: 1 shows each
    remote step, 2 the programs too. `progress`: live output (off when stderr is no terminal).
    """

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    progress: bool = True
    command: str = ""
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)

    @property
    def live(self) -> bool:
        """Whether a moving line may be drawn on stderr."""
        return self.progress and not self.quiet and not self.json and not self.verbose and _can_draw(self.err)

    def rich(self, *, stderr: bool = False) -> RichConsole:
        """A rich console for tables; width is fixed when nobody watches, so output is stable in files."""
        from rich.console import Console as RichConsole

        stream = self.err if stderr else self.out
        return RichConsole(file=stream, highlight=False, soft_wrap=not stream.isatty())

    def say(self, text: str = "") -> None:
        """A line for the person at the terminal (stderr)."""
        if not self.quiet and not self.json:
            _print(text, self.err)

    def debug(self, text: str, level: int = 1) -> None:
        if self.verbose >= level:
            _print(text, self.err)

    def warn(self, text: str) -> None:
        if not self.quiet:
            _print(f"warning: {text}", self.err)

    def data(self, text: str) -> None:
        """A line of the answer itself (stdout); silent under `--json`, which has `result`."""
        if not self.json:
            _print(text, self.out)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A plain table on stdout, columns as wide as their contents."""
        if self.json:
            return
        widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
        for row in [header, *rows]:
            line = "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
            _print(line.rstrip(), self.out)

    def fresh_page(self) -> None:
        """Clear the terminal for a table that is drawn again and again; in a file, an empty line parts them."""
        if self.json:
            return
        print("\033[H\033[J" if _can_draw(self.out) else "", end="" if _can_draw(self.out) else "\n", file=self.out)

    def confirm(self, question: str, *, otherwise: str) -> bool:
        """Ask at the terminal; anything but yes is no. Raises UsageError `usage` where nobody can answer, with
        `otherwise` as the fix.
        """
        if self.json or not sys.stdin.isatty():
            why = "`--json` asks nothing" if self.json else "there is no terminal to ask on"
            raise UsageError("usage", f"cannot ask: {question}", why=why, fix=otherwise)
        print(f"{question} [y/N] ", end="", file=self.err, flush=True)
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Announce a step before it blocks, and close its line with detail and time."""
        step = Step(name)
        started = time.monotonic()
        if self.live:
            step.draw = lambda text: print(f"\r  {name:<10}{text}\033[K", end="", file=self.err, flush=True)
            step.draw("…")
        try:
            yield step
        except BaseException:
            if self.live:
                print(f"\r  {name:<10}failed\033[K", file=self.err, flush=True)
            raise
        took = time.monotonic() - started
        if not self.quiet and not self.json:
            start, end = ("\r", "\033[K") if self.live else ("", "")
            print(f"{start}  {name:<10}{step.detail:<52}{took:6.1f} s{end}", file=self.err, flush=True)

    def result(self, **result: object) -> None:
        """The `--json` object of a command that worked (one line, stdout)."""
        if self.json:
            self._emit({"ok": True, "exit_code": 0, "result": result})

    def event(self, **fields: object) -> None:
        """One line of a `--json` stream, before its `result`: `fields` has the key `event`."""
        if self.json:
            self._emit(fields)

    def error(self, error: DfoError) -> None:
        """The one renderer of errors: three lines, or the JSON object."""
        if self.json:
            self._emit({"ok": False, "exit_code": error.exit_code, "error": error.as_dict()})
            return
        if error.kind == "interrupted":
            # Somebody chose this: no alarm, only what goes on and how to come back.
            _print(f"\n{error.what[:1].upper()}{error.what[1:]}.\n  {error.fix}", self.err)
            return
        red, off = ("\033[31m", "\033[0m") if _can_draw(self.err) and not os.environ.get("NO_COLOR") else ("", "")
        why = error.why.replace("\n", "\n       ")
        print(f"{red}error:{off} ", end="", file=self.err)
        _print(f"{error.what}\n  why: {why}\n  fix: {error.fix}", self.err)

    def _emit(self, body: dict[str, object]) -> None:
        print(json.dumps({"schema": JSON_SCHEMA, "command": self.command, **body}), file=self.out, flush=True)


def _print(text: str, stream: TextIO) -> None:
    """A message may quote the target, and what the target says must not steer the terminal."""
    print(printable_lines(text), file=stream, flush=True)


def _can_draw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
