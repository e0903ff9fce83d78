"""`dfo launch`: what it refuses, what survives it, and how runs keep out of each other's way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.errors import PreflightError, TransferError, UsageError
from orchestrator.runs.launch import prepare, start
from orchestrator.runs.run import RunState

from .conftest import NEW, OLD, until

if TYPE_CHECKING:
    from .conftest import Bench


def test_the_command_says_what_it_did(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 60"])
    done = bench.dfo("launch", "lab", "--warmup-first")
    out, err = done.communicate(timeout=30)
    assert done.returncode == 0 and out == ""
    assert "run.yaml accepted by release" in err and "run 1: warmup → train" in err
    assert "Run 1 is detached on `lab`; you can close the laptop." in err
    listed = bench.dfo("status", "--json")
    result = json.loads(listed.communicate(timeout=30)[0])["result"]
    assert [(run["run"], run["release"], run["devices"]) for run in result["runs"]] == [(1, OLD, ["cpu"])]


def test_dry_run_shows_everything_and_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPTOP_TOKEN", "s3cr3t-value")
    bench.env = {"TOKEN": {"env": "LAPTOP_TOKEN"}, "PLAIN": "a b"}
    bench.configure(train=["print hello"])

    def tree() -> list[tuple[str, float]]:
        return sorted((str(path), path.lstat().st_mtime) for path in bench.root.rglob("*"))

    before = tree()
    for words in (["launch", "-n"], ["launch", "-n", "--json"]):
        done = bench.dfo(*words)
        out, err = done.communicate(timeout=30)
        assert done.returncode == 0 and tree() == before
        assert "s3cr3t-value" not in out + err
        assert "***" in out and "print hello" in out and "stage train || exit" in out
        assert f"{bench.root}/shared/cache/compile/fake/triton" in out
    plan = json.loads(out)["result"]["plan"]
    assert plan["environment"] == {"TOKEN": "***", "PLAIN": "a b"}
    assert plan["variables"] == {"TRITON_CACHE_DIR": f"{bench.root}/shared/cache/compile/fake/triton"}


def test_a_cold_cache_is_refused_by_flag_or_by_the_inventory(bench: Bench) -> None:
    bench.configure(train=[])
    done = bench.dfo("launch", "--require-warm")
    assert done.communicate(timeout=30) and done.returncode == 0
    bench.wait(1)
    bench.run()
    bench.launch["warmup"] = {"when_cold": "refuse"}
    bench.run()
    assert ["requiring a warm cache" in bench.log(run, "train") for run in (1, 2, 3)] == [True, False, True]


def test_a_typo_in_the_configuration_is_found_before_anything_starts(bench: Bench) -> None:
    (bench.project / "run.yaml").write_text("version: 1\n# a comment\ntrian: []\n")
    with pytest.raises(UsageError) as typo:
        bench.start()
    assert (typo.value.kind, typo.value.what) == ("config_invalid", "run.yaml:3:1: trian: unknown key")
    assert (typo.value.why, typo.value.fix) == ("a misspelt key would do nothing", "correct it")
    # With an override the text is another one, but the place in the user's file is still the useful one.
    with pytest.raises(UsageError) as typo:
        bench.start(sets=["train=[]"])
    assert typo.value.what == "run.yaml:3:1: trian: unknown key"
    assert bench.numbers() == []


def test_a_typo_in_an_override(bench: Bench) -> None:
    bench.configure(train=[])
    with pytest.raises(UsageError) as typo:
        bench.start(sets=["trian=[1]"])
    assert typo.value.what == "run.yaml with trian=[1]: trian: unknown key"


def test_overrides_reach_the_run(bench: Bench) -> None:
    bench.configure(train=["print from the file"])
    bench.launch["set"] = {"train": ["print from the inventory"]}
    bench.run()
    assert "from the inventory" in bench.log(1, "train")
    bench.run(sets=['train=["print from the command line"]'])
    assert "from the command line" in bench.log(2, "train")


def test_nothing_deployed(bench: Bench) -> None:
    bench.configure(train=[])
    (bench.root / "current").unlink()
    with pytest.raises(PreflightError) as nothing:
        bench.start()
    assert nothing.value.kind == "nothing_deployed" and "dfo deploy lab" in nothing.value.fix


def test_a_release_without_the_core(bench: Bench) -> None:
    bench.configure(train=[])
    (bench.root / "releases" / OLD / "dflash_core" / "__main__.py").unlink()
    with pytest.raises(PreflightError) as broken:
        bench.start()
    assert broken.value.kind == "release_broken" and "__main__" in broken.value.why


def test_another_deploy_between_plan_and_start(bench: Bench) -> None:
    bench.configure(train=[])
    plan = prepare(bench.session, bench.target, warmup=False)
    bench.deploy(NEW)
    with pytest.raises(TransferError) as stale:
        start(bench.session, bench.target, plan)
    assert stale.value.kind == "plan_stale" and bench.numbers() == []


def test_a_run_keeps_its_release_when_another_is_deployed(bench: Bench) -> None:
    bench.configure(preflight=["print ready", "sleep 1"], train=[], export=[])
    bench.start()
    bench.await_log(1, "ready", "preflight")
    bench.deploy(NEW)
    status = bench.wait(1)
    assert status.state is RunState.SUCCEEDED and status.release == OLD
    assert {bench.log(1, stage) for stage in ("train", "export")} == {
        f"train of {OLD} in {OLD}\n",
        f"export of {OLD} in {OLD}\n",
    }
    assert bench.run().release == NEW
    assert bench.log(2, "train") == f"train of {NEW} in {NEW}\n"


def test_a_device_in_use_is_refused(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 60"])
    bench.start()
    with pytest.raises(PreflightError) as refused:
        bench.start()
    assert refused.value.kind == "run_alive" and refused.value.details["run"] == 1
    assert "on cpu" in refused.value.what and "dfo stop 1" in refused.value.fix
    assert bench.numbers() == [1]
    dry = bench.dfo("launch", "-n")
    _, err = dry.communicate(timeout=30)
    assert dry.returncode == 0 and "a launch would be refused now: run 1 is" in err
    forced = bench.start(force=True)
    assert forced.run == 2
    bench.configure(train=[], topology=TWO_GPUS)
    assert bench.start().run == 3, "other devices are free"


def test_two_launches_at_once(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 60"])
    racers = [bench.dfo("launch", "--json") for _ in range(4)]
    answers = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert [answer["ok"] for answer in answers].count(True) == 1
    assert {answer["error"]["kind"] for answer in answers if not answer["ok"]} == {"run_alive"}
    assert bench.numbers() == [1]
    racers = [bench.dfo("launch", "--json", "--force") for _ in range(3)]
    answers = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sorted(answer["result"]["run"] for answer in answers) == [2, 3, 4] and bench.numbers() == [1, 2, 3, 4]


def test_the_run_outlives_the_laptop(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 3", "print done"])
    laptop = bench.dfo("launch")
    until(lambda: bench.numbers() == [1])
    laptop.kill()
    laptop.wait()
    status = bench.wait(1)
    assert status.state is RunState.SUCCEEDED and "done" in bench.log(1, "train")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killing_the_laptop_at_any_moment(bench: Bench, number: signal.Signals) -> None:
    """Either there is no run, or one that lives; never a lock or a half-made folder that stays in the way."""
    bench.configure(train=["print ready", "sleep 60"])
    for moment in (0.3, 0.5, 0.7, 0.9, 1.2):
        laptop = bench.dfo("launch", "--lock-wait", "0s")
        time.sleep(moment)
        laptop.send_signal(number)
        laptop.communicate()
        time.sleep(0.3)
        for run in bench.numbers():
            until(lambda run=run: bench.status(run).state is not RunState.QUEUED, 5)
            if bench.status(run).alive:
                bench.stop(run, grace=0)
        assert bench.end() == []
    assert bench.run(sets=["train=[]"]).state is RunState.SUCCEEDED
    assert all(entry.name.isdigit() for entry in (bench.root / "runs").iterdir())


def test_resume_goes_on_from_the_newest_checkpoint(bench: Bench) -> None:
    bench.configure(train=["checkpoint 120", "exit 3"])
    bench.run(sets=["evaluate=[]"])
    (bench.folder(1) / "answers.jsonl").write_text("generated\n")
    bench.deploy(NEW)
    (bench.project / "run.yaml").write_text("version: 1\nexport: []\n")
    plan = prepare(bench.session, bench.target, warmup=False, resume=1, sets=["train=[]"])
    assert plan.resumed is not None and plan.resumed.release == OLD and plan.release == NEW
    status = bench.wait(start(bench.session, bench.target, plan).run)
    path = bench.folder(1) / "checkpoints" / "step-000120"
    assert status.state is RunState.SUCCEEDED and status.resume_from == 1
    assert "resuming step-000120\n" in bench.log(2, "train")
    assert bench.spec(2)["resume_path"] == str(path)
    shutil.rmtree(bench.folder(1))
    assert (bench.folder(2) / "answers.jsonl").read_text() == "generated\n", "the same data, so the same positions"
    weights = bench.folder(2) / "checkpoints" / "step-000120" / "drafter" / "model.safetensors"
    assert weights.read_bytes() == b"weights of 120", "it does not need the earlier run's folder any more"
    config = (bench.folder(2) / "run.yaml").read_text()
    assert "evaluate: []" in config and "export" not in config, "the earlier run's configuration is continued"


def test_resume_is_refused_where_it_makes_no_sense(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 60"])
    with pytest.raises(UsageError) as unknown:
        bench.start(resume=7)
    assert unknown.value.kind == "unknown_run"
    bench.start()
    with pytest.raises(PreflightError) as alive:
        bench.start(resume=1)
    assert alive.value.kind == "resume_impossible" and "it is still" in alive.value.why
    bench.stop(1, grace=0)
    with pytest.raises(PreflightError) as empty:
        bench.start(resume=1)
    assert empty.value.kind == "resume_impossible" and "holds no checkpoint" in empty.value.why


def test_damage_on_the_way_is_noticed(bench: Bench) -> None:
    bench.configure(train=[])
    plan = prepare(bench.session, bench.target, warmup=False)
    plan.files["run.yaml"] += "# damaged\n"  # type: ignore[index]
    request = {"op": "start", "target": "lab", "owner": {"command": "dfo launch"}, "release": plan.release}
    rest = {"spec": plan.spec, "files": plan.files, "hashes": plan.spec["files"], "secrets": {}, "force": False}
    with pytest.raises(TransferError, match="1 of 3 files of the run arrived damaged"):
        bench.session.call("launch", request | rest)
    assert bench.numbers() == [] and list((bench.root / "runs").iterdir()) == []


SMI = """\
#!/bin/sh
case "$1" in
--query-gpu*)
    echo '0, GPU-aaa, NVIDIA H200, {used0}, 143771, 0'
    echo '1, GPU-bbb, NVIDIA H200, 4, 143771, [N/A]' ;;
*) printf '{apps}' ;;
esac
"""
TWO_GPUS = {"targets": ["cuda:0"], "drafters": ["cuda:1"]}


@pytest.fixture
def smi(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine with two GPUs, as its nvidia-smi would tell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(used0: int = 4, apps: str = "") -> None:
        path = folder / "nvidia-smi"
        path.write_text(SMI.format(used0=used0, apps=apps))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    write()
    return write


def test_gpus_of_others_are_respected(bench: Bench, smi) -> None:
    bench.configure(train=["environ CUDA_VISIBLE_DEVICES"], topology={"targets": ["cuda:0"], "drafters": ["cuda:0"]})
    smi(used0=61000, apps="GPU-aaa, 4121, python train.py, 60800\\n")
    with pytest.raises(PreflightError) as busy:
        bench.start()
    assert (busy.value.kind, busy.value.what) == ("device_in_use", "GPU 0 is in use")
    assert busy.value.why == "pid 4121 (python train.py); 61000 MB of it are used"
    smi(used0=61000)
    with pytest.raises(PreflightError, match="GPU 0 is in use") as hidden:
        bench.start()
    assert "cannot be seen from here" in hidden.value.why
    bench.gpus = [1]
    assert bench.run().state is RunState.SUCCEEDED, "GPU 1 is free, and it is the first one the run sees"
    assert "CUDA_VISIBLE_DEVICES=1\n" in bench.log(1, "train")
    assert bench.spec(1)["devices"] == ["cuda:1"]


def test_a_gpu_that_is_not_there(bench: Bench, smi) -> None:
    bench.configure(train=[], topology={"targets": ["cuda:0"], "drafters": ["cuda:2"]})
    with pytest.raises(PreflightError) as missing:
        bench.start()
    assert (missing.value.kind, missing.value.what) == ("device_missing", "there is no GPU 2")
    bench.gpus = [0, 1]
    with pytest.raises(UsageError, match="uses `cuda:2`, which the target does not give it"):
        bench.start()


def test_status_shows_the_gpus_of_a_living_run(bench: Bench, smi) -> None:
    bench.configure(train=["events 140", "print ready", "sleep 60"], topology=TWO_GPUS)
    bench.start()
    bench.await_log(1, "ready")
    out, _ = bench.dfo("status").communicate(timeout=30)
    header, row = out.splitlines()
    assert header.split() == ["TARGET", "RUN", "STATE", "STAGE", "RELEASE", "SINCE", "DEVICES", "LAST", "LINE"]
    assert "2 GPU 0% 0 GB" in row and "step 140  loss 2.500  41.2k tok/s" in row and "running" in row
    out, _ = bench.dfo("status", "1", "lab").communicate(timeout=30)
    assert "run       1 on lab: running" in out.splitlines()
    smi(used0=61000)
    assert bench.stop(1, grace=0).warnings == ("GPU 0 still has 61000 MB in use by others",)


def test_many_ended_runs_do_not_hide_a_living_one(bench: Bench) -> None:
    bench.configure(train=["print ready", "sleep 60"])
    bench.start()
    for _ in range(3):
        bench.start(force=True, sets=["train=[]"])
    until(lambda: all(bench.status(run).state.ended for run in (2, 3, 4)))
    out, _ = bench.dfo("status", "--last", "2", "--json").communicate(timeout=30)
    assert [(run["run"], run["state"]) for run in json.loads(out)["result"]["runs"]] == [
        (1, "running"),
        (3, "succeeded"),
        (4, "succeeded"),
    ]


def test_a_held_lock_stops_a_launch(bench: Bench) -> None:
    bench.configure(train=[])
    taken = bench.dfo("lock", "take", "--message", "moving house")
    assert taken.wait(30) == 0, taken.stderr.read()
    refused = bench.dfo("launch", "--json")
    answer = json.loads(refused.communicate(timeout=30)[0])
    assert (answer["exit_code"], answer["error"]["kind"]) == (6, "lock_held") and bench.numbers() == []
