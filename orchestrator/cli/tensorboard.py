"""`dfo tensorboard`"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from orchestrator.cli.common import EVERYDAY, TargetOpt, command
from orchestrator.cli.run_argument import RunWords, choose_run
from orchestrator.cli.runtime import Runtime

PortOpt = Annotated[
    int | None,
    typer.Option("--port", metavar="N", min=1, max=65535, help="Port of this machine [default: 6006, or a free one]"),
]


@command("tensorboard", panel=EVERYDAY)
def tensorboard(rt: Runtime, words: RunWords = None, target: TargetOpt = None, port: PortOpt = None) -> None:
    """Show the curves of a run, or of all, in a browser here"""
    from orchestrator.runs.board import listen_here, serve_board

    run, console = choose_run(rt, words), rt.console
    listener = listen_here(port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"

    def ready(version: str) -> None:
        shown = "all runs" if run is None else f"run {run}"
        console.say(f"TensorBoard {version} on `{rt.target.name}` shows {shown}; Ctrl-C ends it.")
        console.data(url)
        console.event(event="ready", url=url, version=version)

    with suppress(KeyboardInterrupt):
        serve_board(rt.session, run, listener, on_ready=ready)
    console.say("TensorBoard was ended; runs go on.")
    console.result(target=rt.target.name, run=run, url=url)
