"""The one place that turns whatever happens in a command into words and an exit code."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer

from orchestrator.console import Console
from orchestrator.errors import DfoError, Interrupted, UsageError

#: click's base class of bad calls, reached through typer, which may bring a click of its own.
CLICK_EXCEPTION: type[Exception] = typer.BadParameter.__mro__[2]
COMMON_FLAGS = frozenset({"--inventory", "-i", "--json", "--verbose", "-v", "--quiet", "-q", "--no-progress"})
BROKEN_PIPE = 128 + signal.SIGPIPE


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and never raises for what a user can meet."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console(json="--json" in arguments)
    if argv is None:
        _prepare_process()
    try:
        return _invoke(arguments, console)
    except DfoError as error:
        return _show(console, error)
    except (KeyboardInterrupt, typer.Abort) as error:
        return _show(console, _interrupted(error))
    except BrokenPipeError:
        # The reader of our output is gone (`dfo logs | head`). Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        from orchestrator.cli.report_bug import bug

        return _show(console, bug(error, arguments))


def _prepare_process() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        # So that `finally` blocks run: connections close, locks go back. What `nohup` ignores stays ignored.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not turn it into a crash.
            stream.reconfigure(errors="replace")


def _invoke(arguments: list[str], console: Console) -> int:
    from orchestrator.cli.app import app

    command = typer.main.get_command(app)
    if "_DFO_COMPLETE" in os.environ:
        command.main(arguments, prog_name="dfo")
    try:
        with command.make_context("dfo", arguments or ["--help"], obj=console) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except CLICK_EXCEPTION as error:
        raise _usage(error, console) from error
    return 0


def _show(console: Console, error: DfoError) -> int:
    console.error(error)
    if os.environ.get("DFO_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    return error.exit_code


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _interrupted(cause: BaseException) -> Interrupted:
    error = Interrupted(
        "interrupted",
        "interrupted",
        why="Ctrl-C was pressed",
        fix="nothing half-done stays in place; a detached run goes on (`dfo status`)",
    )
    error.__cause__ = cause
    return error


def _usage(error: Exception, console: Console) -> UsageError:
    """A call that click refuses, in our three lines."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "dfo"
    console.command = path.removeprefix("dfo").strip()
    message = str(getattr(error, "format_message", error.__str__)())
    what, _, guess = re.sub(r"'([^']*)'", r"`\1`", message).partition("Did you mean ")
    usage = context.get_usage().removeprefix("Usage: ") if context is not None else "dfo COMMAND"
    option = getattr(error, "option_name", None)
    fix = f"`{path} --help`"
    if what.startswith("No such option") and path == "dfo" and option in COMMON_FLAGS:
        fix = f"options follow the command: `dfo COMMAND {option}`"
    elif guess:
        fix = f"did you mean {guess.rstrip('?')}?"
    return UsageError("usage", what.strip(" .").replace("\n", " "), why=f"the usage is `{usage}`", fix=fix)
