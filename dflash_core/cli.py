"""The command line of the core: `python -m dflash_core STAGE --config run.yaml --run-dir DIR`.

Errors are three lines on stderr (what, why, fix) and an `error` event. Exit codes: 0 done; 1 a bug of ours; 2
configuration; 3 data; 5 preflight, checkpoint or target; 8 training failed; 10 warm-up failed; 130 and 143 stopped by
SIGINT and SIGTERM, with a checkpoint when training had begun. DFO_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.config import RunConfig, load_run_config
from dflash_core.errors import ConfigError, CoreError, PreflightError
from dflash_core.events import EventLog
from dflash_core.signals import StopRequested, StopSignals

if TYPE_CHECKING:
    from dflash_core.data.generate import GenerationProgress

Stage = Callable[[argparse.Namespace, RunConfig, EventLog, StopSignals], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    signals = StopSignals()
    signals.install()
    try:
        if arguments.stage == "environment":
            return _print_environment()
        config = load_run_config(arguments.config)
        if arguments.stage == "check":
            print(f"{arguments.config} is valid")
            return 0
        if arguments.stage == "cache":
            return _print_cache(config)
        with _run_folder(arguments) as events:
            return _run_stage(arguments, config.placed(arguments.run_dir), events, signals)
    except (CoreError, StopRequested) as error:
        return _report(error)
    except OSError as error:
        return _report(_refused(error, arguments.run_dir))


def _run_stage(arguments: argparse.Namespace, config: RunConfig, events: EventLog, signals: StopSignals) -> int:
    """One stage between its `stage_start` and `stage_end` events."""
    stage, begin, code = arguments.stage, time.monotonic(), 0
    events.emit("stage_start", stage=stage, pid=os.getpid())
    try:
        STAGES[stage](arguments, config, events, signals)
    except StopRequested as stop:
        events.emit("stopped", stage=stage, signal=stop.signal_number, note=str(stop))
        code = _report(stop)
    except Exception as error:
        shown = _as_core_error(stage, error)
        events.emit("error", stage=stage, kind=shown.kind, what=shown.what, why=shown.why, fix=shown.fix)
        code = _report(shown)
    events.emit("stage_end", stage=stage, exit_code=code, seconds=time.monotonic() - begin)
    return code


def _as_core_error(stage: str, error: Exception) -> CoreError:
    """What the user is told: our own errors as they are, refusals of the system as such, the rest as bugs."""
    if isinstance(error, CoreError):
        return error
    if isinstance(error, OSError):
        shown: CoreError = _refused(error, stage)
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        shown = CoreError(
            f"{stage} failed with {type(error).__name__}: {error}",
            f"this is a bug; it happened at {place.filename}:{place.lineno}",
            "run it again with DFO_DEBUG=1 and report the traceback",
        )
    shown.__cause__ = error
    return shown


def _refused(error: OSError, place: object) -> PreflightError:
    return PreflightError(
        f"{error.filename or place}: {error.strerror or error}",
        f"the system refused it ({type(error).__name__})",
        "look at the free space and the rights of that path",
    )


# -- questions: one JSON object on stdout, nothing is changed ---------------------------------------------------


def _print_environment() -> int:
    """The variables a stage would run with: what is set now, and what it sets itself. Needs no torch."""
    from dflash_core.compile.environment import compile_home, compile_options, prepare_process

    print(json.dumps(prepare_process(compile_home(), create=False) | compile_options()))
    return 0


def _print_cache(config: RunConfig) -> int:
    """Whether the compile cache is warm for a configuration, and why not."""
    from dflash_core.compile.environment import compile_home, prepare_process

    prepare_process(compile_home(), create=False)
    from dflash_core.compile.fingerprint import differences, digest
    from dflash_core.compile.warmup import cache_root, check, read_records
    from dflash_core.warmth import needs_rehearsal, run_fingerprint

    config = config.placed(Path())
    found = run_fingerprint(config)
    answer = check(found)
    facts = {
        "state": answer.state,
        "changes": answer.changes,
        "compiles": needs_rehearsal(config),
        "folder": str(cache_root()),
        "digest": digest(found),
        "fingerprint": found,
        "records": {record["digest"]: differences(record["fingerprint"], found) for record in read_records()},
    }
    print(json.dumps({"v": 1, **facts}))
    return 0


# -- stages: everything that needs torch is imported inside ---------------------------------------------------


def _preflight(arguments: argparse.Namespace, config: RunConfig, events: EventLog, signals: StopSignals) -> None:
    from dflash_core.preflight import preflight

    preflight(config, arguments.run_dir, events, resume=arguments.resume, say=_say)


def _warmup(arguments: argparse.Namespace, config: RunConfig, events: EventLog, signals: StopSignals) -> None:
    from dflash_core.warm_up import warm_up

    warm_up(config, arguments.run_dir, events, signals=signals, say=_say)


def _train(arguments: argparse.Namespace, config: RunConfig, events: EventLog, signals: StopSignals) -> None:
    from dflash_core.trainer import train

    events.emit("run_start", config=config.to_dict(), resume=arguments.resume)
    wishes = {"resume": arguments.resume, "require_warm": arguments.require_warm}
    train(config, arguments.run_dir, events, **wishes, signals=signals, say=_say)


def _evaluate(arguments: argparse.Namespace, config: RunConfig, events: EventLog, signals: StopSignals) -> None:
    from dflash_core.evaluate import evaluate

    evaluate(config, arguments.run_dir, events, say=_say)


def _export(arguments: argparse.Namespace, config: RunConfig, events: EventLog, signals: StopSignals) -> None:
    from dflash_core.export import export

    export(config, arguments.run_dir, events, say=_say)


def _generate(arguments: argparse.Namespace, config: RunConfig, events: EventLog, signals: StopSignals) -> None:
    if not config.generate.prompts or config.generate.output is None:
        raise ConfigError(
            "generate.prompts and generate.output are needed to generate answers",
            "the target answers the prompts of those files and the chats go into that file",
            "set both in the generate section",
            key="generate",
        )
    from dflash_core.data.generate import generate_answers
    from dflash_core.target import load_target, load_tokenizer

    target = load_target(config.target, config.topology.targets[0])
    tokenizer = load_tokenizer(config.target)

    def tell(progress: GenerationProgress) -> None:
        done = progress.before + progress.answered
        _say(f"{done}/{progress.total} prompts answered  {progress.tokens_per_second:.1f} tok/s")

    progress = generate_answers(
        config.generate, target, tokenizer, config.generate.output, seed=config.seed, on_progress=tell
    )
    events.emit(
        "generate", answered=progress.answered, before=progress.before, too_long=progress.too_long,
        tokens=progress.tokens, seconds=progress.seconds, output=config.generate.output,
    )  # fmt: skip
    _say(f"{progress.answered} new answers in {config.generate.output}, {progress.before} were there")


STAGES: dict[str, Stage] = {
    "preflight": _preflight,
    "warmup": _warmup,
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "generate": _generate,
}


# -- around a stage ---------------------------------------------------------------------------------------------


@contextmanager
def _run_folder(arguments: argparse.Namespace) -> Iterator[EventLog]:
    """The run's folder with its event log, used by one process at a time, and the environment of the stages."""
    run_dir: Path = arguments.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    kept = run_dir / "run.yaml"
    if not kept.exists():
        shutil.copyfile(arguments.config, kept)
    from dflash_core.compile.environment import compile_home, prepare_process

    prepare_process(compile_home())
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PreflightError(
                f"another process works in {run_dir}",
                "two stages at once would write the same checkpoints and events",
                "wait for it, or choose another --run-dir",
            ) from error
        tensorboard = run_dir / "tensorboard" if arguments.stage == "train" else None
        with EventLog(run_dir / "events.jsonl", tensorboard=tensorboard) as events:
            yield events


def _report(error: CoreError | StopRequested) -> int:
    if os.environ.get("DFO_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, StopRequested):
        print(error, file=sys.stderr)
        return error.exit_code
    lines = [f"error: {error.what}", f"  why: {error.why or 'see above'}", f"  fix: {error.fix or 'see above'}"]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return error.exit_code


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dflash_core", description="Train a DFlash drafter.")
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    helps = {
        "check": "check run.yaml without loading anything",
        "preflight": "check everything the run depends on and print the facts",
        "warmup": "compile once, in order, what the run will need",
        "train": "train, or go on with --resume",
        "evaluate": "decode held-out prompts and write evaluation.json",
        "export": "write the drafter and its model card to RUN_DIR/export",
        "generate": "let the target answer prompts",
        "cache": "say as JSON whether the compile cache is warm for a run.yaml, and why not",
        "environment": "print the variables of a stage as JSON",
    }
    for name, text in helps.items():
        stage = stages.add_parser(name, help=text, description=text)
        if name == "environment":
            continue
        stage.add_argument("--config", type=Path, required=True, help="the run.yaml")
        stage.add_argument("--run-dir", type=Path, required=name in STAGES, help="the folder of this run")
        if name in ("preflight", "train"):
            stage.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
        if name == "train":
            stage.add_argument("--require-warm", action="store_true", help="refuse to train on a cold compile cache")
    return parser


def exit_process(code: int) -> Any:
    """Leave the process, past worker threads that hang in a device call and would hold the interpreter up."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.daemon and thread.is_alive() for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)
