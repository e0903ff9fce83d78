"""What every command shares: how it is registered, its common options, and its `Runtime`.

A command file holds functions like this one and imports everything heavy inside them:

    @command("deploy", panel=EVERYDAY)
    def deploy(rt: Runtime, target: TargetArg = None, dry_run: DryRunOpt = False) -> None:
        \"\"\"Check the sources and ship them as a new release\"\"\"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from orchestrator.cli.help import COMMON_PANEL, ORDER, Group, Leaf
from orchestrator.cli.runtime import Runtime
from orchestrator.console import Console

EVERYDAY = "Everyday"
LOOK = "Look before you leap"
TROUBLE = "When something went wrong"
PANELS = (EVERYDAY, LOOK, TROUBLE)

F = TypeVar("F", bound=Callable[..., None])

app = typer.Typer(
    name="dfo",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start here: `dfo init`, then `dfo doctor`.",
)
_groups: dict[str, typer.Typer] = {}


def complete_target(incomplete: str) -> list[str]:
    """Target names for the shell; silent when there is no readable inventory."""
    from orchestrator.inventory.locate import target_names

    return [name for name in target_names() if name.startswith(incomplete)]


def duration(text: str) -> float:
    """Parser of options such as `--lock-wait 5m`; the value is in seconds."""
    from orchestrator.inventory.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"`{text}` {error}") from error


_TARGET_HELP = "Target of the inventory [default: DFO_TARGET, else the only one]"
TargetArg = Annotated[
    str | None,
    typer.Argument(metavar="TARGET", help=_TARGET_HELP, autocompletion=complete_target, show_default=False),
]
#: For commands whose argument is a run. The parameter must be called `target`.
TargetOpt = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="NAME", help=_TARGET_HELP, autocompletion=complete_target),
]
AllOpt = Annotated[bool, typer.Option("--all", help="Every target of the inventory, side by side")]
GroupOpt = Annotated[str | None, typer.Option("--group", metavar="NAME", help="Every target of this group")]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", "-n", help="Show the plan and stop")]

_COMMON: dict[str, tuple[Any, object]] = {
    "inventory": (
        Annotated[
            Path | None,
            typer.Option(
                "--inventory",
                "-i",
                metavar="PATH",
                help="Inventory file [default: DFO_INVENTORY, inventory/dfo.yaml, inventory/local.yaml]",
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        None,
    ),
    "json_": (
        Annotated[
            bool,
            typer.Option("--json", help="One JSON object on stdout, nothing else there", rich_help_panel=COMMON_PANEL),
        ],
        False,
    ),
    "verbose": (
        Annotated[
            int,
            typer.Option(
                "--verbose",
                "-v",
                count=True,
                help="Show each remote step; twice: the programs too",
                show_default=False,
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        0,
    ),
    "quiet": (
        Annotated[bool, typer.Option("--quiet", "-q", help="Errors only", rich_help_panel=COMMON_PANEL)],
        False,
    ),
    "no_progress": (
        Annotated[
            bool,
            typer.Option(
                "--no-progress",
                help="No live output (also when stderr is no terminal)",
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        False,
    ),
}


def group(name: str, help: str, *, panel: str) -> None:
    """Announce a command that has subcommands; they register as `command("name sub")`."""
    ORDER.append(name)
    _groups[name] = typer.Typer(cls=Group, rich_markup_mode=None, help=help)
    app.add_typer(_groups[name], name=name, rich_help_panel=panel)


def command(name: str, *, panel: str = "") -> Callable[[F], F]:
    """Register a command. `panel` is its heading in `dfo --help`; subcommands (`"lock break"`) have none."""
    parent, _, leaf = name.rpartition(" ")

    def register(function: F) -> F:
        owner = _groups[parent] if parent else app
        if not parent:
            ORDER.append(name)
        owner.command(leaf, cls=Leaf, rich_help_panel=panel or None)(_with_common_options(name, function))
        return function

    return register


def _with_common_options(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """`function` as typer sees it: without `rt`, with the common options behind its own."""

    def run(ctx: typer.Context, **values: Any) -> None:
        common = {key: values.pop(key) for key in _COMMON}
        with _runtime(ctx.obj, name, values.get("target"), common) as rt:
            function(rt, **values)

    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    ]
    shared = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for key, (annotation, default) in _COMMON.items()
    ]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    run.__signature__ = inspect.Signature([context, *own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [context, *own, *shared]}
    run.__doc__ = function.__doc__
    return run


@contextmanager
def _runtime(console: Console, name: str, target: str | None, common: dict[str, Any]) -> Iterator[Runtime]:
    console.command = name
    console.json = common["json_"]
    console.quiet = common["quiet"]
    console.verbose = common["verbose"]
    console.progress = not common["no_progress"]
    runtime = Runtime(console, inventory_option=common["inventory"], target_option=target)
    try:
        yield runtime
    finally:
        runtime.close()
