# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a disk that fills up, and in a folder that somebody removes: training goes on, and nothing is lost that
could be kept."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.disks import fill, mounted
from helpers.on_policy import rl_recipe
from helpers.workspace import Outcome, Workspace
from podium.engine.checkpoint import newest_usable
from podium.engine.checkpoint_files import saved_steps
from podium.runs.log import RunLog
from podium.runs.step_files import verify_steps

STEPS = 8
AtStep = Callable[[int], None]


@pytest.fixture
def runs(workspace: Workspace) -> Iterator[Path]:
    """The folder of runs is a small disk of its own."""
    with mounted(workspace.path / "runs", size="16m") as folder:
        yield folder


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[AtStep], None]:
    """Calls a function after the metrics of every step were written."""

    def install(function: AtStep) -> None:
        real = RunLog.step

        def step(log: RunLog, view: Any, values: Any) -> None:
            real(log, view, values)
            function(view.step)

        monkeypatch.setattr(RunLog, "step", step)

    return install


def sft(workspace: Workspace, name: str = "sums", **checkpoint: Any) -> str:
    return workspace.recipe(name, steps=STEPS, checkpoint={"every": 2, "keep": 2, **checkpoint})


def train(workspace: Workspace, recipe: str) -> Outcome:
    return workspace.podium("train", recipe)


def text_of(outcome: Outcome) -> str:
    """What was printed, with line breaks of the console removed."""
    assert "Traceback" not in outcome.out + outcome.err
    return " ".join((outcome.out + outcome.err).split())


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_training_goes_on_over_a_full_disk_and_saves_when_there_is_room_again(
    workspace: Workspace, runs: Path, after_step: Callable[[AtStep], None], background: bool
) -> None:
    assert train(workspace, sft(workspace, "healthy")).code == 0
    seen: list[list[int]] = []

    def disturb(step: int) -> None:
        if step == 3:
            fill(runs)
        if step == 7:
            seen.append([each.step for each in saved_steps(runs / "sums" / "checkpoints")])
            (runs / "filler").unlink()

    after_step(disturb)
    outcome = train(workspace, sft(workspace, background=background))

    text = text_of(outcome)
    assert outcome.code == 0, text
    assert "the checkpoint of step 4 cannot be written: No space left on device" in text
    assert "It needs" in text
    assert "is free" in text
    assert "The newest whole checkpoint is that of step 2" in text
    assert seen == [[2]]  # nothing whole was removed for what did not become whole
    checkpoints = runs / "sums" / "checkpoints"
    assert newest_usable(checkpoints).step == STEPS
    assert not list(checkpoints.glob(".partial-*"))
    assert workspace.metric("sums", "loss") == workspace.metric("healthy", "loss")
    assert sorted(workspace.metric("sums", "loss")) == list(range(1, STEPS + 1))
    assert "metrics.jsonl can be written again" in text or "metrics.jsonl cannot be written" not in text
    assert json.loads((runs / "sums" / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_last_step_that_cannot_be_saved_is_an_error_and_is_repeated_by_resume(
    workspace: Workspace, runs: Path, after_step: Callable[[AtStep], None]
) -> None:
    assert train(workspace, sft(workspace, "healthy")).code == 0
    healthy = workspace.metric("healthy", "loss")
    steps_to_fill_at = [3]  # once: the resumed run comes there again

    def disturb(step: int) -> None:
        if step in steps_to_fill_at:
            steps_to_fill_at.remove(step)
            fill(runs)

    after_step(disturb)
    outcome = train(workspace, sft(workspace))
    text = text_of(outcome)
    assert outcome.code == 2
    assert f"the checkpoint of step {STEPS} cannot be written: No space left on device" in " ".join(outcome.err.split())
    assert "step 2" in outcome.err
    assert "podium resume" in text
    assert [each.step for each in saved_steps(runs / "sums" / "checkpoints")] == [2]
    assert not list((runs / "sums" / "checkpoints").glob(".partial-*"))

    (runs / "filler").unlink()
    resumed = workspace.podium("resume", "runs/sums")
    assert resumed.code == 0, resumed
    assert workspace.metric("sums", "loss") == healthy


def remove(folder: Path) -> None:
    """At once: a save may be writing into it, and move what it has written."""
    gone = folder.with_name(f"{folder.name}-gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def test_a_removed_run_folder_is_made_again(workspace: Workspace, after_step: Callable[[AtStep], None]) -> None:
    run = workspace.path / "runs" / "sums"
    after_step(lambda step: remove(run) if step == 5 else None)
    outcome = train(workspace, sft(workspace))

    text = text_of(outcome)
    assert outcome.code == 0, text
    assert text.count("somebody removed the run folder runs/sums") == 1
    assert newest_usable(run / "checkpoints").step == STEPS
    assert sorted(workspace.metric("sums", "loss")) == list(range(1, STEPS + 1))
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    shown = workspace.podium("show", "runs/sums")
    assert shown.code == 0
    assert workspace.podium("export", "runs/sums", "out").code == 0


def test_a_run_folder_that_is_removed_after_the_last_save_is_saved_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podium.spmd.run import SpmdRun

    run, real = workspace.path / "runs" / "sums", SpmdRun._save_last

    def save_last(self: SpmdRun[Any]) -> None:
        self._end_save()
        assert newest_usable(run / "checkpoints").step == STEPS
        shutil.rmtree(run)
        real(self)

    monkeypatch.setattr(SpmdRun, "_save_last", save_last)
    outcome = train(workspace, sft(workspace))
    assert outcome.code == 0, text_of(outcome)
    assert newest_usable(run / "checkpoints").step == STEPS


def episodes(run: Path) -> list[tuple[Any, ...]]:
    file = sqlite3.connect(run / "episodes.sqlite")
    try:
        return file.execute("SELECT prompt_index, sample, step, state FROM episodes ORDER BY 1, 2").fetchall()
    finally:
        file.close()


@pytest.mark.slow
def test_an_on_policy_run_goes_on_over_a_full_disk_with_every_episode_in_the_ledger_once(
    workspace: Workspace, runs: Path, after_step: Callable[[AtStep], None]
) -> None:
    settings: dict[str, Any] = {"steps": 7, "checkpoint": {"every": 2}, "rollout": {"record": True}}
    assert train(workspace, rl_recipe(workspace, "healthy", **settings)).code == 0

    def disturb(step: int) -> None:
        if step == 3:
            fill(runs)
        if step == 6:
            (runs / "filler").unlink()

    after_step(disturb)
    outcome = train(workspace, rl_recipe(workspace, "full", **settings))

    text, run = text_of(outcome), runs / "full"
    assert outcome.code == 0, text
    assert "the checkpoint of step 4 cannot be written" in text
    reader = newest_usable(run / "checkpoints")
    assert reader.step == 7
    assert episodes(run) == episodes(runs / "healthy")
    assert reader.record["extras"]["episodes"] == len(episodes(run))
    assert sorted(workspace.metric("full", "reward/mean")) == list(range(1, 8))
    verify_steps(run / "steps", 7, reader.record["extras"]["record"])


@pytest.mark.slow
def test_an_on_policy_run_makes_its_removed_folder_again(
    workspace: Workspace, after_step: Callable[[AtStep], None]
) -> None:
    run = workspace.path / "runs" / "gone"
    after_step(lambda step: remove(run) if step == 3 else None)
    outcome = train(workspace, rl_recipe(workspace, "gone", steps=5, checkpoint={"every": 2}))

    text = text_of(outcome)
    assert outcome.code == 0, text
    assert text.count("somebody removed the run folder") == 1
    assert newest_usable(run / "checkpoints").step == 5
    assert {row[2] for row in episodes(run)} == {1, 2, 3, 4, 5}
    assert sorted(workspace.metric("gone", "reward/mean")) == [1, 2, 3, 4, 5]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "grpo"])
@pytest.mark.parametrize("damage", [flip, truncate])
def test_every_command_that_reads_a_checkpoint_notices_a_damaged_one(
    workspace: Workspace, program: str, damage: Callable[[Path], None]
) -> None:
    data = {"train": [{"path": "train.jsonl"}], "heldout": [{"path": "heldout.jsonl"}]}
    changes: dict[str, Any] = {"steps": 4, "checkpoint": {"every": 2}, "data": data}
    recipe = workspace.recipe(**changes) if program == "sft" else rl_recipe(workspace, **changes)
    assert train(workspace, recipe).code == 0
    damage(workspace.path / "runs/sums/checkpoints/step-00000004/rank-00000.safetensors")

    for command in (("resume", "runs/sums", "--set", "steps=6"), ("export", "runs/sums", "out"),
                    ("evaluate", "runs/sums")):  # fmt: skip
        outcome = workspace.podium(*command)
        workspace.refused(outcome, "step-00000004/rank-00000.safetensors", "damaged", "--step 2", left=("sums",))
    assert not (workspace.path / "out").exists()
    # Weights of a run are generated with after they were exported, so a damaged checkpoint never gets that far.
    outcome = workspace.podium("generate", "runs/sums", "--prompts", "heldout.jsonl", "--out", "answers.jsonl")
    assert outcome.code == 2
    assert "podium export runs/sums OUT" in " ".join(outcome.err.split())
    assert workspace.podium("evaluate", "runs/sums", "--step", "2").code == 0


# A logger is called inside rank 0, with the metrics of every step.
DISTURBED = f"""
import shutil, sys
from pathlib import Path
sys.path.append({str(Path(__file__).parents[1])!r})
from helpers.disks import fill

def disturb(metrics):
    runs = Path("runs").resolve()
    if metrics.step == 3:
        fill(runs)
    if metrics.step == 6:
        (runs / "filler").unlink()

def remove(metrics):
    if metrics.step == 5:
        shutil.rmtree(Path("runs/sums").resolve())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logger", "said"),
    [("disturb", "the checkpoint of step 4 cannot be written: No space left"), ("remove", "removed the run folder")],
)
def test_two_ranks_go_on_together(workspace: Workspace, runs: Path, logger: str, said: str) -> None:
    (workspace.path / "hooks.py").write_text(DISTURBED)
    recipe = workspace.recipe(
        steps=STEPS, checkpoint={"every": 2}, placement={"devices": 2, "device": "cpu", "timeout_s": 100},
        run={"loggers": [f"hooks.py:{logger}"]},
    )  # fmt: skip
    outcome = workspace.process("train", recipe)

    assert outcome.code == 0, text_of(outcome)
    assert said in text_of(outcome)
    checkpoints = runs / "sums" / "checkpoints"
    assert newest_usable(checkpoints).record["ranks"] == 2
    assert newest_usable(checkpoints).step == STEPS
    assert not list(checkpoints.glob(".partial-*"))
    assert sorted(workspace.metric("sums", "loss")) == list(range(1, STEPS + 1))
