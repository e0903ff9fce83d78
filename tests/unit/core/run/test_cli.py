"""The command line: stages in order, three-line errors, exit codes, events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.cli import main
from dflash_core.events import read_events


@pytest.fixture(autouse=True)
def keep_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line takes over signals and the environment of its process; give both back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = dict(os.environ)
    forget_caches()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(before)


def forget_caches() -> None:
    """As in a new process, which looks for the compile cache where DFLASH_CACHE_DIR says."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name, None)


def call(run: Any, stage: str, *options: str) -> int:
    return main([stage, "--config", str(run.config_path), "--run-dir", str(run.run_dir), *options])


def core(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_core", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.strip().splitlines()
    return lines[-3:]


def test_the_whole_life_of_a_run(tiny_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ("preflight", "warmup", "train", "evaluate", "export"):
        assert call(tiny_run, stage) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for part in ("devices", "12; first 12: 12 usable", "none in both", "step 6/6", "identical outputs", "exported"):
        assert part in out
    events = list(read_events(tiny_run.run_dir / "events.jsonl"))
    ends = [(event["stage"], event["exit_code"]) for event in events if event["event"] == "stage_end"]
    assert ends == [("preflight", 0), ("warmup", 0), ("train", 0), ("evaluate", 0), ("export", 0)]
    assert {"run_start", "stage_start", "warmup", "step", "eval", "checkpoint", "decode", "evaluation", "export"} <= {
        event["event"] for event in events
    }
    assert all(event["v"] == 1 and isinstance(event["t"], float) for event in events)
    names = {path.name for path in tiny_run.run_dir.iterdir()}
    assert {"run.yaml", "events.jsonl", "checkpoints", "evaluation.json", "export", "warmup.json"} <= names


def test_check_is_quick_and_imports_no_torch(tiny_run: Any) -> None:
    code = (
        "import sys, time; from dflash_core.cli import main; begin = time.process_time(); "
        f"code = main(['check', '--config', {str(tiny_run.config_path)!r}]); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules); "
        "print(time.process_time()); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1


def test_check_reads_standard_input(tiny_run: Any) -> None:
    text = tiny_run.config_path.read_text()
    assert core("check", "--config", "/dev/stdin", input=text).returncode == 0
    done = core("check", "--config", "/dev/stdin", input=text.replace("block_size", "blocksize"))
    assert done.returncode == 2 and "did you mean" in done.stderr


def test_a_configuration_error_is_three_lines_with_its_place(tiny_run: Any, capsys: Any) -> None:
    tiny_run.change(train={"stepz": 3})
    assert call(tiny_run, "train") == 2
    what, why, fix = error_lines(capsys)
    assert what.startswith("error: ") and f"{tiny_run.config_path}:" in what and "stepz" in what
    assert why.startswith("  why: ") and fix.startswith("  fix: ")


@pytest.mark.parametrize("stage", ["preflight", "train"])
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"target": {"path": "/nowhere"}}, 5, "/nowhere"),
        ({"data": {"train": ["/nowhere.jsonl"]}}, 3, "/nowhere.jsonl"),
        ({"drafter": {"target_layer_ids": [1, 9]}}, 2, "target_layer_ids"),
        ({"drafter": {"mask_token_id": 99999}}, 2, "mask_token_id"),
    ],
)
def test_what_cannot_run_is_refused_with_its_code(
    tiny_run: Any, capsys: Any, stage: str, change: dict[str, Any], code: int, words: str
) -> None:
    tiny_run.change(**change)
    assert call(tiny_run, stage) == code
    assert words in error_lines(capsys)[0]
    events = list(read_events(tiny_run.run_dir / "events.jsonl"))
    [error] = [event for event in events if event["event"] == "error"]
    assert words in error["what"] and error["stage"] == stage
    assert events[-1]["event"] == "stage_end" and events[-1]["exit_code"] == code


@pytest.mark.parametrize(
    ("line", "words"),
    [("{not json", "train.jsonl:3"), ('{"messages": []}', "train.jsonl:3"), ('{"text": "x"}', "train.jsonl:3")],
)
def test_preflight_finds_a_broken_chat_with_its_line(tiny_run: Any, capsys: Any, line: str, words: str) -> None:
    chats = tiny_run.folder / "train.jsonl"
    lines = chats.read_text().splitlines()
    lines[2] = line
    chats.write_text("\n".join(lines) + "\n")
    assert call(tiny_run, "preflight") == 3
    assert words in error_lines(capsys)[0]


def test_preflight_finds_overlap_devices_space_and_old_checkpoints(
    tiny_run: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(tiny_run, "train") == 0
    assert call(tiny_run, "preflight") == 5
    assert "already holds" in error_lines(capsys)[0]
    assert call(tiny_run, "preflight", "--resume") == 0
    assert "goes on from step-000006" in capsys.readouterr().out
    tiny_run.change(drafter={"block_size": 3})
    assert call(tiny_run, "preflight", "--resume") == 5
    assert "drafter.block_size was 4 and is 3" in error_lines(capsys)[1]
    tiny_run.change(topology={"drafters": ["cuda:99"]})
    assert call(tiny_run, "preflight") == 5
    assert "cuda:99" in error_lines(capsys)[0]
    tiny_run.change(topology={"drafters": ["cpu"]}, train={"keep_checkpoints": 10**12})
    assert call(tiny_run, "preflight") == 5
    assert "too little disk space" in error_lines(capsys)[0]
    tiny_run.change(train={"keep_checkpoints": 2}, data={"heldout": tiny_run.settings["data"]["train"]})
    assert call(tiny_run, "preflight") == 3
    assert "also in data.train" in error_lines(capsys)[0]


def test_train_without_data_says_so(tiny_run: Any, capsys: Any) -> None:
    tiny_run.change(data={"train": []})
    assert call(tiny_run, "preflight") == 2
    assert "data.train" in error_lines(capsys)[0]
    (tiny_run.folder / "empty.jsonl").write_text("")
    tiny_run.change(data={"train": [str(tiny_run.folder / "empty.jsonl")]})
    assert call(tiny_run, "train") == 3
    assert "empty.jsonl" in error_lines(capsys)[0]


def test_a_second_warm_up_does_nothing(tiny_run: Any, capsys: Any) -> None:
    assert call(tiny_run, "warmup") == 0
    first = json.loads((tiny_run.run_dir / "warmup.json").read_text())
    assert [entry["worker"] for entry in first["entries"]] == ["target-0 (cpu)", "drafter-0 (cpu)", "held-out (cpu)"]
    capsys.readouterr()
    other = tiny_run.in_dir("other")
    assert call(other, "warmup") == 0
    assert "already warm" in capsys.readouterr().out
    assert json.loads((other.run_dir / "warmup.json").read_text()) == first
    other.change(train={"anchors_per_batch": 13})
    assert call(other, "warmup") == 0
    assert "already warm" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "worker"), [("dflash_core.pipeline.roles", "drafter-0 (cpu)"), ("dflash_core.heldout", "held-out (cpu)")]
)
def test_a_failed_warm_up_is_exit_code_10(
    tiny_run: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, module: str, worker: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this shape")

    monkeypatch.setattr(f"{module}.block_terms", broken)
    assert call(tiny_run, "warmup") == 10
    what, why, _ = error_lines(capsys)
    assert worker in what and "no kernel for this shape" in why
    assert not (tiny_run.run_dir / "warmup.json").exists()


def test_two_processes_do_not_share_a_run_directory(tiny_run: Any) -> None:
    tiny_run.change(train={"steps": 100_000})
    options = ["train", "--config", str(tiny_run.config_path), "--run-dir", str(tiny_run.run_dir)]
    first = subprocess.Popen([sys.executable, "-m", "dflash_core", *options], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (tiny_run.run_dir / "events.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.02)
        second = core(*options)
        assert second.returncode == 5 and "another process works in" in second.stderr
    finally:
        first.kill()
        first.wait()


def test_generate_then_train_on_the_answers(tiny_run: Any, capsys: Any) -> None:
    prompts = tiny_run.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(3)))
    assert call(tiny_run, "generate") == 2
    tiny_run.change(
        generate={
            "prompts": [str(prompts)],
            "output": "run:answers.jsonl",
            "max_new_tokens": 6,
            "batch_size": 2,
        },
        data={"train": [*tiny_run.settings["data"]["train"], "run:answers.jsonl"]},
    )
    assert call(tiny_run, "generate") == 0
    assert len((tiny_run.run_dir / "answers.jsonl").read_text().splitlines()) == 3
    assert call(tiny_run, "generate") == 0
    assert "0 new answers" in capsys.readouterr().out
    assert call(tiny_run, "train") == 0


def test_a_bug_is_reported_without_a_traceback_unless_asked(
    tiny_run: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("dflash_core.export.export", bug)
    assert call(tiny_run, "export") == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err and "ZeroDivisionError: oh" in err and "test_cli.py:" in err
    monkeypatch.setenv("DFO_DEBUG", "1")
    assert call(tiny_run, "export") == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unwritable_run_directory_is_an_error_not_a_traceback(tiny_run: Any, capsys: Any) -> None:
    Path(tiny_run.run_dir).write_text("a file")
    assert call(tiny_run, "export") == 5
    assert str(tiny_run.run_dir) in error_lines(capsys)[0]


def test_a_full_disk_is_no_bug(tiny_run: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", str(tiny_run.run_dir / "evaluation.json"))

    monkeypatch.setattr("dflash_core.evaluate.evaluate", full)
    assert call(tiny_run, "evaluate") == 5
    what, _, fix = error_lines(capsys)
    assert what == f"error: {tiny_run.run_dir / 'evaluation.json'}: No space left on device" and "free space" in fix


def test_questions_answer_in_json_and_change_nothing(tiny_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*words: str) -> dict[str, Any]:
        forget_caches()
        capsys.readouterr()
        assert main(list(words)) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    variables = ask("environment")
    assert Path(variables["TRITON_CACHE_DIR"]).parent.parent == tiny_run.folder / "cache" / "compile"
    assert variables["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES"] == "0"
    cold = ask("cache", "--config", str(tiny_run.config_path))
    assert (cold["state"], cold["changes"], cold["compiles"]) == ("missing", [], False)
    assert not (tiny_run.folder / "cache").exists()
    assert call(tiny_run, "warmup") == 0
    warm = ask("cache", "--config", str(tiny_run.config_path))
    assert (warm["state"], warm["digest"]) == ("valid", cold["digest"])
    assert Path(warm["folder"]) == Path(variables["TORCHINDUCTOR_CACHE_DIR"])


def test_a_cold_cache_is_refused_when_warmth_is_required(tiny_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run.change(train={"attention": "flex"})  # would compile, and is refused before anything is loaded
    assert call(tiny_run, "train", "--require-warm") == 10
    what, why, fix = error_lines(capsys)
    assert "not warm" in what and "missing: no warm-up is recorded" in why and "--warmup-first" in fix
    events = list(read_events(tiny_run.run_dir / "events.jsonl"))
    assert [event["kind"] for event in events if event["event"] == "error"] == ["warmup"]


def test_training_fills_a_cold_cache_for_the_next_run(
    tiny_run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("trainer", "warmth"):  # as on a GPU, where something compiles
        monkeypatch.setattr(f"dflash_core.{module}.needs_rehearsal", lambda config: True)
    found = []
    for run, options in ((tiny_run, []), (tiny_run.in_dir("other"), ["--require-warm"])):
        assert call(run, "train", *options) == 0, capsys.readouterr().err
        events = {event["event"]: event for event in read_events(run.run_dir / "events.jsonl")}
        found.append(events["warm"]["state"])
        assert (events["compiles"]["after_warm"], events["compiles"]["refused"]) == (0, 0)
        assert events["warmup_step"]["misses"] == 0 and "TRITON_CACHE_DIR" in events["environment"]["variables"]
        step = events["step"]
        assert step["targets_tokens_per_s"] >= 0 and step["drafters_tokens_per_s"] == step["tokens_per_s"] > 0
        assert step["device_idle"].keys() == {"cpu"} and 0 <= step["device_idle"]["cpu"] < 1
    assert found == ["missing", "valid"]
