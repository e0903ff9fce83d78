"""`python -m dflash_core STAGE --config FILE --run-dir DIR`: does the actions that run.yaml lists for the stage.

An action is a word or a word with an argument: print TEXT, sleep SECONDS, exit CODE, die SIGNAL, stubborn (ignore
TERM), polite CODE (exit with it on TERM), daemon SECONDS (a grandchild in a session of its own that ignores TERM and
holds our output open), scrubbed SECONDS (one without our environment), chatter MB and stream MB (of output, at once or
slowly), hog MB (of memory), lines N (with the time of each), events N, checkpoint STEP, environ NAME.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

KEYS = {"version", "topology", *("preflight", "warmup", "train", "evaluate", "export")}


def check(path: str) -> dict[str, object]:
    text = Path(path).read_text()
    config = yaml.safe_load(text)
    unknown = sorted(set(config) - KEYS)
    if unknown:
        line = next(n for n, written in enumerate(text.splitlines(), 1) if unknown[0] in written)
        fail(2, f"{path}:{line}:1: {unknown[0]}: unknown key", "a misspelt key would do nothing", "correct it")
    return config


def fail(code: int, what: str, why: str, fix: str) -> None:
    print(f"error: {what}\n  why: {why}\n  fix: {fix}", file=sys.stderr)
    raise SystemExit(code)


def daemon(seconds: str) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(float(seconds))
        os._exit(0)


def scrubbed(seconds: str) -> None:
    if os.fork() == 0:
        os.setsid()
        os.execve("/bin/sleep", ["sleep", seconds], {})


def hog(megabytes: str) -> None:
    held = [b"x" * (1 << 20) for _ in range(int(megabytes))]
    print(len(held), flush=True)


def lines(count: str) -> None:
    for _ in range(int(count)):
        print(f"{time.time():.6f}", flush=True)
        time.sleep(0.07)


def chatter(megabytes: str) -> None:
    for _ in range(int(megabytes) * 1024):
        os.write(1, b"x" * 1023 + b"\n")


def stream(megabytes: str) -> None:
    """Lines that are all different, in bursts that take half a minute for 50 MB."""
    for part in range(int(megabytes) * 4):
        os.write(1, b"".join(b"%08d " % part + os.urandom(507).hex().encode() + b"\n" for _ in range(256)))
        time.sleep(0.02)


def events(run: Path, count: str) -> None:
    with (run / "events.jsonl").open("a") as file:
        for step in range(1, int(count) + 1):
            line = {"v": 1, "t": time.time(), "event": "step", "step": step, "loss": 2.5, "tokens_per_s": 41200.0}
            file.write(json.dumps(line) + "\n")


def checkpoint(run: Path, step: str) -> None:
    name = f"step-{int(step):06d}"
    (run / "checkpoints" / name / "drafter").mkdir(parents=True)
    (run / "checkpoints" / name / "drafter" / "model.safetensors").write_bytes(b"weights of " + step.encode())
    (run / "checkpoints" / "latest").write_text(name + "\n")


def act(action: str, run: Path) -> None:
    word, _, argument = action.partition(" ")
    if word == "print":
        print(argument, flush=True)
    elif word == "sleep":
        time.sleep(float(argument))
    elif word == "exit":
        raise SystemExit(int(argument))
    elif word == "die":
        os.kill(os.getpid(), int(argument))
    elif word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif word == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(argument)))
    elif word == "environ":
        print(f"{argument}={os.environ.get(argument)}", flush=True)
    elif word in {"daemon", "scrubbed", "chatter", "stream", "hog", "lines"}:
        globals()[word](argument)
    else:
        globals()[word](run, argument)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage")
    parser.add_argument("--config")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--require-warm", action="store_true")
    arguments = parser.parse_args()
    if arguments.stage == "environment":
        print(json.dumps({"TRITON_CACHE_DIR": os.environ["DFLASH_CACHE_DIR"] + "/compile/fake/triton"}))
        return
    config = check(arguments.config)
    if arguments.stage == "check":
        return
    print(f"{arguments.stage} of {Path(__file__).parent.parent.name} in {Path.cwd().name}", flush=True)
    if arguments.stage in {"preflight", "train"} and not arguments.resume:
        # As the real core: a folder with checkpoints is only entered when that was asked for.
        assert not (arguments.run_dir / "checkpoints" / "latest").exists(), "unannounced checkpoint"
    if arguments.require_warm:
        print("requiring a warm cache", flush=True)
    if arguments.resume:
        print("resuming", (arguments.run_dir / "checkpoints" / "latest").read_text().strip(), flush=True)
    for action in config.get(arguments.stage) or []:
        act(str(action), arguments.run_dir)


main()
