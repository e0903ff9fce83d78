"""The command line: one file per command, each body reads like the runbook."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (docs/commands.md lists them)."""
    from orchestrator.cli.entry import run

    return run(argv)


__all__ = ["main"]
