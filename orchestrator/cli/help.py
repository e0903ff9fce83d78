"""Help pages as plain text, in the order of the runbook. No rich: its import alone costs more than the rest."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from typer.core import TyperCommand, TyperGroup

COMMON_PANEL = "Options of every command"
#: Top-level commands in the order they were registered.
ORDER: list[str] = []
#: typer's own names for what it formats; they differ between the releases we support.
Formatter = Any
ClickContext = Any


class Leaf(TyperCommand):
    """A command: its own options first, those of every command below."""

    def format_options(self, ctx: ClickContext, formatter: Formatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], COMMON_PANEL: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            title = "Arguments" if param.param_type_name == "argument" else "Options"
            sections[getattr(param, "rich_help_panel", None) or title].append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """`dfo` itself, or a command with subcommands, listed under their headings."""

    def list_commands(self, ctx: ClickContext) -> list[str]:
        # typer lists commands before groups; the runbook knows no such difference.
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def format_options(self, ctx: ClickContext, formatter: Formatter) -> None:
        self.format_commands(ctx, formatter)
        rows = [row for param in self.get_params(ctx) if (row := param.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(rows)

    def format_commands(self, ctx: ClickContext, formatter: Formatter) -> None:
        commands = [self.commands[name] for name in self.list_commands(ctx) if not self.commands[name].hidden]
        width = max((len(command.name or "") for command in commands), default=0)
        for panel, members in groupby(commands, key=lambda command: getattr(command, "rich_help_panel", None)):
            with formatter.section(panel or "Commands"):
                formatter.write_dl(
                    [((command.name or "").ljust(width), command.get_short_help_str(90)) for command in members]
                )
