# SPDX-License-Identifier: Apache-2.0
"""Pipelines as a user runs them: stages in order, nothing run twice, and an interrupted one resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.on_policy import REWARDS
from helpers.processes import started, wait_until
from helpers.runs import losses
from helpers.tiny import write_chats
from helpers.workspace import Workspace
from podium import api
from podium.programs.pipeline import PipelineResult

# Holds the run at step 3 for as long as the file `wait` is there.
WAITING = """
import time
from pathlib import Path

class Waiting:
    def __init__(self, folder):
        pass
    def log(self, metrics):
        if metrics.step == 3 and Path("wait").exists():
            Path("here").touch()
            while Path("wait").exists():
                time.sleep(0.01)
    def text(self, step, name, text):
        pass
    def close(self):
        pass
"""


def write_pipeline(workspace: Workspace, stages: dict[str, Any], name: str = "chain") -> str:
    """NAME.yaml: stages of four steps of SFT on chats, saved every two, unless they say otherwise."""
    values = {
        "program": "pipeline",
        "defaults": {
            "program": "sft",
            "data": {"train": [{"path": "train.jsonl"}], "heldout": [{"path": "heldout.jsonl"}]},
            "optimizer": {"lr": 3e-3},
            "steps": 4,
            "checkpoint": {"every": 2, "background": False},
            "evaluation": {"at_start": True},
            "placement": {"device": "cpu", "threads": 1, "onednn": False},
        },
        "stages": {name: _small(stage) for name, stage in stages.items()},
    }
    (workspace.path / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return f"{name}.yaml"


def _small(stage: dict[str, Any]) -> dict[str, Any]:
    """With steps of few tokens; on-policy programs count prompts."""
    if stage.get("program") == "grpo":
        return stage
    return {"tokens_per_step": 256, **stage, "data": {"packing_window": 16, **stage.get("data", {})}}


def chain(workspace: Workspace, **second: Any) -> str:
    """Two stages, the second on the weights of the first."""
    return write_pipeline(workspace, {"a": {"model": str(workspace.model)}, "b": {"model": "${stage.a}", **second}})


def done(folder: str | Path, **options: Any) -> dict[str, str]:
    """Trains or resumes; stage -> what was done about it."""
    verb = api.resume if Path(folder).is_dir() else api.train
    result = verb(folder, **options)
    assert isinstance(result, PipelineResult)
    return {stage.name: stage.done for stage in result.stages}


def heldout(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["heldout/loss"] for line in lines if "heldout/loss" in line}


# --- running ---


def test_a_stage_begins_with_what_the_one_before_made_and_is_not_run_again(workspace: Workspace) -> None:
    outcome = workspace.podium("train", chain(workspace))

    assert outcome.code == 0, outcome
    assert re.search("finished.* runs/chain", outcome.out)
    runs = workspace.path / "runs" / "chain"
    assert heldout(runs / "b")[0] == pytest.approx(heldout(runs / "a")[4], rel=1e-6)
    assert heldout(runs / "b")[4] < heldout(runs / "b")[0]
    before = (runs / "a" / "run.json").stat().st_mtime_ns, (runs / "b" / "metrics.jsonl").stat().st_mtime_ns

    again = workspace.podium("train", "chain.yaml")

    assert again.code == 0, again
    fingerprints = [json.loads((runs / "pipeline.json").read_text())["stages"][name]["fingerprint"] for name in "ab"]
    for number, (name, fingerprint) in enumerate(zip("ab", fingerprints, strict=True), start=1):
        assert re.search(f"stage {number} of 2, {name}: .*{fingerprint[:12]}", again.out)
    assert before == ((runs / "a" / "run.json").stat().st_mtime_ns, (runs / "b" / "metrics.jsonl").stat().st_mtime_ns)


@pytest.mark.slow
def test_what_changed_is_run_again_with_all_that_depends_on_it_and_nothing_else(workspace: Workspace) -> None:
    stages = {
        "a": {"model": str(workspace.model), "steps": 2},
        "b": {"model": "${stage.a}", "steps": 2},
        "c": {"model": "${stage.b}", "steps": 2},
        "beside": {"model": "${stage.a}", "steps": 2, "data": {"train": [{"path": "other.jsonl"}]}},
    }
    write_chats(workspace.path / "other.jsonl", count=64, seed=3)
    file = write_pipeline(workspace, stages)
    assert set(done(file).values()) == {"trained"}
    runs = workspace.path / "runs" / "chain"
    before = (runs / "b" / "metrics.jsonl").read_text()

    slower = {"a": "skipped", "b": "trained", "c": "trained", "beside": "skipped"}
    assert done(file, overrides=["stages.b.optimizer.lr=1e-3"]) == slower
    assert (runs / ".earlier" / "b-1" / "metrics.jsonl").read_text() == before
    assert sorted(path.name for path in (runs / ".earlier").iterdir()) == ["b-1", "c-1"]

    write_chats(workspace.path / "other.jsonl", count=64, seed=4)
    only_beside = {"a": "skipped", "b": "skipped", "c": "skipped", "beside": "trained"}
    assert done(file, overrides=["stages.b.optimizer.lr=1e-3"]) == only_beside

    # What cannot change the weights runs nothing again, and what comes to the same weights nothing behind it.
    write_chats(workspace.path / "heldout.jsonl", count=8, seed=5)
    harmless = ["stages.b.optimizer.lr=1e-3", "stages.b.checkpoint.every=1", "stages.a.evaluation.at_start=false"]
    assert set(done(file, overrides=harmless).values()) == {"skipped"}


@pytest.mark.slow
def test_a_stage_that_comes_to_the_same_weights_again_runs_nothing_behind_it(workspace: Workspace) -> None:
    file = chain(workspace, steps=2)
    unshuffled = ["stages.a.data.shuffle=false", "stages.a.steps=2"]
    assert done(file, overrides=unshuffled) == {"a": "trained", "b": "trained"}

    # Nothing is drawn at random in stage a, so its seed makes another fingerprint and the same weights.
    assert done(file, overrides=[*unshuffled, "stages.a.run.seed=7"]) == {"a": "trained", "b": "skipped"}


@pytest.mark.slow  # tests/golden runs SFT and GRPO as a pipeline
def test_stages_may_mix_programs_of_both_kinds(workspace: Workspace) -> None:
    (workspace.path / "rewards.py").write_text(REWARDS)
    grpo = {
        "program": "grpo", "model": "${stage.a}", "reward": [{"function": "rewards.py:digits"}], "steps": 2,
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
        "algorithm": {"kl": {"coefficient": 0.1, "reference": "${stage.a}"}},
        "placement": {"launcher": "inline"}, "data": {"heldout": []}, "evaluation": {"at_start": False},
    }  # fmt: skip
    last = {"model": "${stage.b}", "steps": 2}
    file = write_pipeline(workspace, {"a": {"model": str(workspace.model), "steps": 2}, "b": grpo, "c": last})

    assert done(file) == {"a": "trained", "b": "trained", "c": "trained"}
    assert done(file, overrides=["stages.b.algorithm.kl.coefficient=0.2"]) == {
        "a": "skipped", "b": "trained", "c": "trained",
    }  # fmt: skip
    assert done(file, overrides=["stages.b.algorithm.kl.coefficient=0.2", "stages.b.grading.timeout_s=9"]) == {
        "a": "skipped", "b": "skipped", "c": "skipped",
    }  # fmt: skip


# --- broken off ---


@pytest.fixture
def waiting(workspace: Workspace) -> str:
    """A pipeline whose second stage stays at step 3."""
    (workspace.path / "mine.py").write_text(WAITING)
    (workspace.path / "wait").touch()
    return chain(workspace, run={"loggers": ["mine.py:Waiting"]}, steps=6)


def _unbroken(workspace: Workspace) -> dict[int, float]:
    """Losses of the second stage where nothing broke it off."""
    (workspace.path / "wait").unlink(missing_ok=True)
    done("chain.yaml", overrides=["run.name=unbroken"])
    return losses(workspace.path / "runs" / "unbroken" / "b")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pipeline_that_is_killed_in_a_stage_continues_in_it(workspace: Workspace, waiting: str) -> None:
    with started(["-m", "podium", "train", waiting], workspace.path / "said") as process:
        wait_until((workspace.path / "here").exists, "step 3 of the second stage")
        refused = workspace.podium("train", waiting)
        assert refused.code == 2, refused
        assert "process " in refused.err
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
    shown = workspace.podium("show", "runs/chain")
    assert "podium resume runs/chain)" in shown.out
    (workspace.path / "wait").unlink()
    (workspace.path / "elsewhere").mkdir()
    workspace.monkeypatch.chdir(workspace.path / "elsewhere")

    assert done("../runs/chain") == {"a": "skipped", "b": "resumed"}

    workspace.monkeypatch.chdir(workspace.path)
    runs = workspace.path / "runs" / "chain"
    assert losses(runs / "b") == _unbroken(workspace)
    weights = [json.loads((workspace.path / "runs" / name / "pipeline.json").read_text())["stages"]["b"]["weights"]
               for name in ("chain", "unbroken")]  # fmt: skip
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctrl_c_stops_the_pipeline_and_says_how_to_go_on(workspace: Workspace, waiting: str) -> None:
    with started(["-m", "podium", "train", waiting], workspace.path / "said") as process:
        wait_until((workspace.path / "here").exists, "step 3 of the second stage")
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: "Ctrl-C" in (workspace.path / "said").read_text(), "the answer to Ctrl-C")
        (workspace.path / "wait").unlink()
        assert process.wait(60) == 0
    assert re.search(r"stage b\b.*podium resume runs/chain", (workspace.path / "said").read_text())
    assert json.loads((workspace.path / "runs/chain/pipeline.json").read_text())["status"] == "stopped"

    outcome = workspace.podium("resume", "runs/chain")

    assert outcome.code == 0, outcome
    assert "stage 2 of 2, b: resume" in outcome.out
    assert losses(workspace.path / "runs" / "chain" / "b") == _unbroken(workspace)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before the export", marks=pytest.mark.slow),
        "in the export",
        pytest.param("before the note", marks=pytest.mark.slow),
        # fast: tests/unit/programs/test_pipeline_decisions.py
        pytest.param("before the record", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_that_is_killed_around_an_export_trains_nothing_again(moment: str, workspace: Workspace) -> None:
    file = chain(workspace, steps=2)
    done(file)
    runs = workspace.path / "runs" / "chain"
    state = json.loads((runs / "pipeline.json").read_text())
    known = state["stages"]["a"]["weights"]
    state["stages"]["a"].update(status="running", weights=None)
    (runs / "pipeline.json").write_text(json.dumps(state))
    if moment == "before the note":
        (runs / "a" / "export" / "podium.json").unlink()
    elif moment != "before the record":
        (runs / "a" / "export").rename(runs / "a" / "export.partial")
    if moment == "in the export":
        (runs / "a" / "export.partial" / "model.safetensors").unlink()
    if moment == "before the export":
        shutil.rmtree(runs / "a" / "export.partial")

    assert done("runs/chain") == {"a": "exported", "b": "skipped"}

    assert json.loads((runs / "pipeline.json").read_text())["stages"]["a"]["weights"] == known
    assert not (runs / "a" / "export.partial").exists()


@pytest.mark.slow
def test_weights_that_somebody_changed_are_exported_again(workspace: Workspace) -> None:
    file = chain(workspace, steps=2)
    done(file)
    (workspace.path / "runs/chain/a/export/config.json").write_text("{}")

    assert done(file) == {"a": "exported", "b": "skipped"}


@pytest.mark.slow
def test_a_stage_that_was_killed_before_its_first_checkpoint_begins_again(workspace: Workspace) -> None:
    file = chain(workspace, steps=2)
    done(file)
    runs = workspace.path / "runs" / "chain"
    state = json.loads((runs / "pipeline.json").read_text())
    state["stages"]["b"].update(status="running", weights=None)
    (runs / "pipeline.json").write_text(json.dumps(state))
    shutil.rmtree(runs / "b" / "export")
    shutil.rmtree(runs / "b" / "checkpoints")

    outcome = workspace.podium("resume", "runs/chain")

    assert outcome.code == 0, outcome
    assert re.search(r"stage 2 of 2, b: .*no checkpoint\b.* runs/chain/\.earlier/b-1", " ".join(outcome.out.split()))
    assert (runs / "b" / "export" / "config.json").is_file()


# --- mistakes ---


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"b": {"model": "${stage.c}"}}, ("stages.b.model: ", "stage 'c'")),
        ({"b": {"model": "${stage.c}"}, "c": {"model": "${stage.b}"}}, ("b -> c -> b",)),
        ({"b": {"model": "${stage.a}", "data": {"train": [{"path": "no"}]}}}, ("stages.b.data.train.0: ", "no")),
        ({"b": {"model": "none"}, "c": {"steps": 0, "model": "none"}}, ("stages.c.steps: ", " 0")),
        ({"b": {"model": "none"}}, ("stages.b.model.path: ", "folder none")),
        ({"b": {"model": "${stage.a}", "placement": {"devices": 4096}}}, ("placement.devices: 4096 ",)),
    ],
)  # fmt: skip
def test_mistakes_of_any_stage_are_reported_before_the_first_one_runs(
    stages: dict[str, Any], message: tuple[str, ...], workspace: Workspace
) -> None:
    file = write_pipeline(workspace, {"a": {"model": str(workspace.model)}, **stages})

    workspace.refused(workspace.podium("train", file), *message)


@pytest.mark.slow
def test_a_stage_that_fails_is_named_with_how_to_go_on(workspace: Workspace) -> None:
    rows = (workspace.path / "train.jsonl").read_text().splitlines()
    (workspace.path / "bad.jsonl").write_text("\n".join([*rows[:9], "{oops"]))
    file = chain(workspace, data={"train": [{"path": "bad.jsonl"}]})

    outcome = workspace.podium("train", file)

    workspace.refused(outcome, "bad.jsonl, line 10", left=("chain",))
    assert re.search(r"stage b\b.*podium resume runs/chain", outcome.err)
    assert outcome.err.count("podium resume") == 1
    shown = workspace.podium("show", "runs/chain").out
    assert "failed" in shown
    (workspace.path / "bad.jsonl").write_text("\n".join(rows))
    assert done("runs/chain") == {"a": "skipped", "b": "trained"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resume", "runs/chain", "--step", "2"), ("--step: runs/chain ", "pipeline")),
        (("resume", "runs/chain", "--set", "defaults.steps=9"), ("--set defaults.steps=9: ", "stages.NAME.KEY")),
        (("resume", "runs/chain", "--set", "stages.b.model=${stage.z}"), ("stages.b.model: ", "stage 'z'")),
        (("export", "runs/chain", "out", "--stage", "z"), ("--stage: runs/chain ", "stage 'z'", ": a, b")),
        (("export", "runs/chain/a", "out", "--stage", "a"), ("--stage: runs/chain/a ", "pipeline")),
        (("show", "chain.yaml"), ("run folder chain.yaml",)),
        (("show", "."), ("recipe.yaml", "run.json")),
    ],
)
def test_what_a_finished_pipeline_cannot_do_is_said(
    arguments: tuple[str, ...], message: tuple[str, ...], finished: Workspace
) -> None:
    finished.refused(finished.podium(*arguments), *message, left=("chain",))
    assert not (finished.path / "out").exists()


# --- looking and exporting ---


@pytest.fixture(scope="module")
def chain_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A finished pipeline `chain`, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        write_chats(folder / "train.jsonl", count=64)
        write_chats(folder / "heldout.jsonl", count=8, seed=1)
        at = Workspace(path=folder, model=tiny_folder, capture=None, monkeypatch=patch)  # type: ignore[arg-type]
        done(chain(at, steps=2))
    return folder


@pytest.fixture
def finished(workspace: Workspace, chain_folder: Path) -> Workspace:
    shutil.copytree(chain_folder, workspace.path, dirs_exist_ok=True)
    return workspace


def test_check_tells_the_order_and_looks_at_every_stage(workspace: Workspace) -> None:
    file = write_pipeline(workspace, {"b": {"model": "${stage.a}"}, "a": {"model": str(workspace.model)}})

    outcome = workspace.podium("check", file, "--deep")

    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    assert re.search(r"pipeline: 2 stages.* a, b$", lines[0])
    assert any(re.search(r"^stage b: .*\bsft\b.*\b4 steps", line) for line in lines)
    assert any(re.search(r"^  model\.path: .*stage a\b", line) for line in lines)
    assert sum(bool(re.search(r"data\.train\.0: 64 rows .*64 documents", line)) for line in lines) == 2
    assert not (workspace.path / "runs").exists()


@pytest.mark.slow
def test_a_pipelines_folder_may_be_moved(finished: Workspace) -> None:
    (finished.path / "elsewhere").mkdir()
    (finished.path / "runs/chain").rename(finished.path / "elsewhere/moved")

    assert done("elsewhere/moved") == {"a": "skipped", "b": "skipped"}


def test_export_takes_the_last_stage_or_the_named_one(finished: Workspace) -> None:
    for arguments, stage in ((("last",), "b"), (("first", "--stage", "a"), "a")):
        outcome = finished.podium("export", "runs/chain", *arguments)
        assert outcome.code == 0, outcome
        exported = finished.path / arguments[0] / "model.safetensors"
        assert exported.read_bytes() == (finished.path / "runs/chain" / stage / "export/model.safetensors").read_bytes()


def test_show_tells_stages_data_weights_and_code(finished: Workspace) -> None:
    said = finished.podium("show", "runs/chain").out
    state = json.loads((finished.path / "runs/chain/pipeline.json").read_text())["stages"]

    rows = [line.split() for line in said.splitlines() if line.startswith(("  a ", "  b "))]
    for row, name, steps, parents in zip(rows, "ab", ("4/4", "2/2"), ("-", "a"), strict=True):
        record = state[name]
        assert row == [name, "sft", "done", steps, record["fingerprint"][:12], record["weights"][:12], parents]
    assert "heldout/loss:" in said
    assert re.search(r"(?m)^ *code: +podium 0\.1\.0, source ", said)
    assert re.search(r"(?m)^    .*\bsft, step 4\b", said)


def test_a_run_on_exported_weights_shows_their_whole_descent(finished: Workspace) -> None:
    finished.podium("export", "runs/chain", "mine")
    shutil.rmtree(finished.path / "runs/chain")  # the note in the exported folder knows enough
    outcome = finished.podium("train", finished.recipe("last", model={"path": "mine"}, steps=1))
    assert outcome.code == 0, outcome

    said = finished.podium("show", "runs/last").out

    assert re.search("(?m)^status: +finished, step 1 of 1$", said)
    descent = [line.strip() for line in said.splitlines() if line.strip().startswith(("weights", "made by"))]
    ends = [line.split(" (")[0].rpartition("/")[2] for line in descent]
    assert ends == ["mine", "b", "export", "a", finished.model.name]
    assert finished.podium("show", "mine").out.startswith("exported model: mine\nmade by:        sft, step 2 of ")


@pytest.mark.slow
def test_show_imports_nothing_heavy(finished: Workspace) -> None:
    script = (
        "import sys, podium.cli; podium.cli.app(['show', 'runs/chain'], standalone_mode=False); "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'ray', 'pyarrow'}))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=finished.path, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.splitlines()[-1] == "[]", answer
