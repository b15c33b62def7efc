# SPDX-License-Identifier: Apache-2.0
"""A newcomer found no `-h`, no completion and no list of runs. `podium show` did not say how a run was doing, nor what
to type next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import rl_recipe
from helpers.processes import wait_until
from helpers.recipes import make_recipe
from helpers.workspace import Workspace
from podium import api
from podium.cli import app
from podium.commands.completion import complete_data, complete_folder, complete_recipe, complete_run
from podium.errors import RunFolderError
from podium.recipe import Recipe
from podium.runs.folder import RunFolder

COMMANDS = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]


def make_run(runs: Path, name: str, lines: list[dict[str, Any]], *overrides: str, **state: Any) -> RunFolder:
    """A run folder as a run leaves it, without the run."""
    recipe: Recipe = make_recipe(f"run.folder={runs}", f"run.name={name}", *overrides)
    run = RunFolder.create(recipe)
    run.metrics_file.write_text("".join(json.dumps({"time_s": 1.0, **line}) + "\n" for line in lines))
    run.update(**state)
    return run


def age(path: Path, hours: float) -> None:
    """Moves the last change of a run into the past."""
    for file in path.iterdir():
        os.utime(file, (time.time() - 3600 * hours,) * 2)


def cells(lines: list[str]) -> list[list[str]]:
    """Words of the table below its header."""
    return [line.split() for line in lines[1:]]


# --- help and completion ---


@pytest.mark.slow
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_h_is_help(workspace: Workspace, command: str) -> None:
    outcome = workspace.podium(*command.split(), "-h")

    assert outcome.code == 0
    assert "Usage" in outcome.out
    assert outcome.out == workspace.podium(*command.split(), "--help").out


def test_every_command_is_known() -> None:
    assert {"train", "resume", "check", "evaluate", "export", "list", "show", "init"} <= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_a_shell(tmp_path: Path, shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "podium", "--show-completion", shell],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done
    assert "COMPLETE" in done.stdout


@pytest.mark.slow
def test_a_shell_completes_commands_and_run_folders(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "first", [])
    make_run(tmp_path / "runs", "second", [])

    def completed(words: str, last: int) -> list[str]:
        program = "import sys; sys.argv[0] = 'podium'; from podium.cli import main; main()"
        environment = {**os.environ, "_PODIUM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(last)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split()

    assert completed("podium exp", 1) == ["export"]
    assert completed("podium resume runs/f", 2) == ["runs/first"]


def test_paths_complete_to_what_a_command_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs"), "first", [])
    Path("runs", "chain").mkdir()
    Path("runs", "chain", "pipeline.json").write_text("{}")
    for name in ("a.yaml", "b.yml", "c.jsonl", "d.txt", ".hidden.yaml"):
        Path(name).touch()

    assert complete_run("") == ["runs/chain/", "runs/first"]
    assert complete_run("runs/f") == ["runs/first"]
    assert complete_recipe("") == ["a.yaml", "b.yml", "runs/"]
    assert complete_data("c") == ["c.jsonl"]
    assert complete_folder("r") == ["runs/"]
    assert complete_run("no/where/") == []


# --- list ---


def test_runs_are_listed_with_the_last_changed_first(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    sft = make_run(runs, "sums", [{"step": 4, "step_s": 1.0, "loss": 2.5}, {"step": 4, "heldout/loss": 2.25}],
                   "steps=4", status="finished", step=4)  # fmt: skip
    rl = make_run(
        runs, "agent", [{"step": 7, "step_s": 1, "reward/mean": 0.375, "loss": 1}, {"step": 7, "heldout/score": 0.5}],
        "program=grpo", "reward=[{verifier: numeric}]", status="stopped", step=7,
    )  # fmt: skip
    age(sft.path, 2)
    age(rl.path, 1)
    (runs / ".cache").mkdir()
    (runs / "notes").mkdir()

    rows = cells(api.list_runs(runs))

    assert [row[:8] for row in rows] == [
        ["agent", "grpo", "stopped", "7/100", "reward", "0.375", "score", "0.5"],
        ["sums", "sft", "finished", "4/4", "loss", "2.5", "loss", "2.25"],
    ]
    hour_ago = time.localtime(time.time() - 3600)
    assert rows[0][8:] in (time.strftime("%m-%d %H:%M", hour_ago).split(), [time.strftime("%Y-%m-%d", hour_ago)])


@pytest.mark.parametrize("name", ["mine", "my-agents"])
def test_a_list_with_custom_programs_fits_80_columns(tmp_path: Path, name: str) -> None:
    figures = [{"step": 137, "step_s": 1, "reward/mean": -0.3751, "loss": 1}, {"step": 137, "heldout/score": 0.5125}]
    for number, program in enumerate((f"{tmp_path}/research/my_method.py:train", "our.methods.second:train")):
        make_run(
            tmp_path, f"{name}-{number}", figures, f"program={program}", "signal=on_policy",
            "reward=[{verifier: numeric}]", status="finished", step=137,
        )  # fmt: skip

    lines = api.list_runs(tmp_path)

    assert max(map(len, lines)) <= 80
    programs = {row[0]: row[1] for row in cells(lines)}
    assert programs.keys() == {f"{name}-0", f"{name}-1"}
    assert programs[f"{name}-1"].startswith("second")
    assert programs[f"{name}-0"].startswith("my_meth")
    if name == "mine":
        assert programs[f"{name}-0"] == "my_method.py"


def test_a_custom_program_is_listed_by_file_and_function_where_there_is_room(tmp_path: Path) -> None:
    make_run(tmp_path, "mine", [], f"program={tmp_path}/my_method.py:train", "signal=fixed")

    assert cells(api.list_runs(tmp_path))[0][1] == "my_method.py:train"


def test_a_run_is_running_while_its_folder_is_held_and_dead_after(tmp_path: Path) -> None:
    run = make_run(tmp_path, "sums", [{"step": 3, "step_s": 2.0, "loss": 2.0}], status="running")

    with run.held():
        assert cells(api.list_runs(tmp_path))[0][2:4] == ["running", "3/100"]
    assert cells(api.list_runs(tmp_path))[0][2:4] == ["dead", "3/100"]


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path, "whole", [], status="failed")
    (make_run(tmp_path, "broken", []).path / "run.json").write_text("{")

    assert {row[0]: row[2] for row in cells(api.list_runs(tmp_path))} == {"whole": "failed", "broken": "damaged"}


def test_a_folder_without_runs_says_so(workspace: Workspace) -> None:
    (workspace.path / "empty").mkdir()
    for folder in ("runs", "empty"):
        outcome = workspace.podium("list", *([] if folder == "runs" else [folder]))
        assert outcome.code == 0
        assert "no runs" in outcome.out
        assert folder in outcome.out


def test_a_run_itself_is_not_a_list(tmp_path: Path) -> None:
    run = make_run(tmp_path, "sums", [])
    with pytest.raises(RunFolderError, match="podium show"):
        api.list_runs(run.path)


@pytest.mark.slow
def test_a_pipeline_is_one_line(workspace: Workspace) -> None:
    (workspace.path / "chain.yaml").write_text(
        f"""
program: pipeline
defaults: {{model: {{path: {workspace.model}}}, data: {{train: [{{path: train.jsonl}}]}}, optimizer: {{lr: 1e-3}},
  steps: 1, tokens_per_step: 256, placement: {{device: cpu, threads: 1, onednn: false}}}}
stages:
  a: {{program: sft}}
  b: {{program: sft, model: "${{stage.a}}"}}
"""
    )
    assert workspace.podium("train", "chain.yaml").code == 0

    assert cells(api.list_runs("runs"))[0][:5] == ["chain", "pipeline", "finished", "2/2", "stages"]
    assert sorted(row[0] for row in cells(api.list_runs("runs/chain"))) == ["a", "b"]


# --- show ---


def facts(folder: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in api.show(folder))
    return {label: value.strip() for label, _, value in lines}


def test_a_running_run_shows_its_figures_speed_and_remaining_time(tmp_path: Path) -> None:
    lines = [{"step": n, "step_s": 2.0, "reward/mean": n / 100, "loss": 0.5, "lr": 1e-6} for n in range(1, 41)]
    run = make_run(tmp_path, "agent", lines, "program=grpo", "reward=[{verifier: numeric}]", status="running")

    with run.held():
        shown = facts(run.path)

    assert shown["status"] == "running, step 40 of 100"
    assert shown["reward"] == "0.4 at step 40"
    assert shown["loss"] == "0.5 at step 40"
    assert shown["speed"] == "2.00 s/step, ETA 2:00"
    assert "ETA" not in facts(run.path)["speed"]


def test_a_finished_run_says_how_to_go_on(workspace: Workspace) -> None:
    heldout = {"heldout": [{"path": "heldout.jsonl"}]}
    workspace.podium("train", workspace.recipe(data=heldout, checkpoint={"every": 2}))

    shown = facts(Path("runs/sums"))

    assert shown["status"] == "finished, step 4 of 4"
    assert "at step 4" in shown["heldout/loss"]
    assert shown["checkpoints"].startswith("step 2, 4 (")
    assert shown["export"] == "podium export runs/sums OUT"
    assert shown["evaluate"] == "podium evaluate runs/sums"
    assert "continue" not in shown


@pytest.mark.parametrize("saved", [False, True])
def test_a_dead_run_says_whether_it_can_be_continued(tmp_path: Path, saved: bool) -> None:
    run = make_run(tmp_path, "sums", [{"step": 3, "step_s": 0.25, "loss": 2.0}], status="running")
    if saved:
        (run.checkpoints / "step-00000002").mkdir()

    shown = facts(run.path)

    assert shown["status"].startswith("dead")
    assert ("podium resume" in shown["status"]) == saved
    assert shown["speed"] == "4.00 steps/s"


@pytest.mark.slow
def test_a_killed_run_is_dead(workspace: Workspace) -> None:
    recipe = rl_recipe(workspace, steps=500, checkpoint={"every": 1, "background": False})
    process = subprocess.Popen([sys.executable, "-m", "podium", "train", recipe], cwd=workspace.path)
    try:
        wait_until(lambda: bool(list(workspace.path.glob("runs/sums/checkpoints/step-*"))), "a checkpoint")
        assert cells(api.list_runs("runs"))[0][2] == "running"
        assert facts(Path("runs/sums"))["status"].startswith("running")
    finally:
        process.kill()
        process.wait()

    # The kernel ends the controller with the process that was killed, a moment later.
    wait_until(lambda: cells(api.list_runs("runs"))[0][2] == "dead", "the end of the run")
    assert "podium resume runs/sums" in facts(Path("runs/sums"))["status"]
