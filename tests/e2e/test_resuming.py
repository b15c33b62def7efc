# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around a resume, and what it leaves of the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.workspace import Workspace

STOP_AT_ONCE = """
from pathlib import Path

class StopAtOnce:
    def __init__(self, folder):
        (Path(folder) / "stop-requested").touch()
    def log(self, metrics):
        pass
    def text(self, step, name, text):
        pass
    def close(self):
        pass
"""


@pytest.fixture
def trained(workspace: Workspace) -> Workspace:
    """A run `sums` with checkpoints of steps 2 and 4, on a model of its own."""
    shutil.copytree(workspace.model, workspace.path / "model")
    outcome = workspace.podium("train", workspace.recipe(model={"path": "model"}, checkpoint={"every": 2}))
    assert outcome.code == 0, outcome
    return workspace


def _files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_more_ranks_than_devices_start_no_process(trained: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: object, **options: object) -> object:
        raise AssertionError("processes would be started")

    monkeypatch.setattr("podium.spmd.launch.launch", launch)

    outcome = trained.podium("resume", "runs/sums", "--step", "2", "--devices", "4096")

    trained.refused(outcome, "placement.devices: 4096 ", left=("sums",))


def test_a_refused_resume_leaves_the_run_as_it_was(trained: Workspace) -> None:
    before = _files(trained.path / "runs/sums")

    outcome = trained.podium("resume", "runs/sums", "--step", "2", "--set", "run.loggers=['none.py:Logger']")

    trained.refused(outcome, "run.loggers.0: ", "none.py", left=("sums",))
    assert _files(trained.path / "runs/sums") == before


def test_a_run_whose_state_is_damaged_is_named(trained: Workspace) -> None:
    (trained.path / "runs/sums/run.json").write_text("{")

    trained.refused(trained.podium("resume", "runs/sums", "--step", "2"), "run.json", left=("sums",))


def test_a_run_whose_recipe_was_edited_says_what_changed(trained: Workspace) -> None:
    file = trained.path / "runs/sums/recipe.yaml"
    file.write_text(file.read_text().replace("lr: 0.003", "lr: 0.004"))

    outcome = trained.podium("resume", "runs/sums", "--step", "2")

    trained.refused(outcome, "optimizer.lr: 0.003 -> 0.004", left=("sums",))


def test_a_run_without_checkpoints_cannot_go_on(trained: Workspace) -> None:
    shutil.rmtree(trained.path / "runs/sums/checkpoints")

    for arguments in (("resume", "runs/sums"), ("export", "runs/sums", "out")):
        trained.refused(trained.podium(*arguments), "runs/sums", "complete checkpoint", left=("sums",))


@pytest.mark.parametrize(("gone", "message"), [("model", "model.path: "), ("train.jsonl", "data.train.0")])
def test_what_a_run_reads_must_still_be_there(trained: Workspace, gone: str, message: str) -> None:
    (trained.path / gone).rename(trained.path / "elsewhere")

    trained.refused(trained.podium("resume", "runs/sums", "--step", "2"), message, gone, left=("sums",))


def test_another_tokenizer_is_noticed(trained: Workspace) -> None:
    file = trained.path / "model/tokenizer.json"
    file.write_bytes(file.read_bytes() + b"\n")

    outcome = trained.podium("resume", "runs/sums", "--step", "2")

    trained.refused(outcome, "tokenizer.json: its content ", left=("sums",))


def test_a_resume_works_from_another_folder(trained: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = trained.metric("sums", "loss")
    (trained.path / "elsewhere").mkdir()
    monkeypatch.chdir(trained.path / "elsewhere")

    outcome = trained.podium("resume", "../runs/sums", "--step", "2")

    assert outcome.code == 0, outcome
    assert trained.metric("sums", "loss") == before


def test_a_request_to_stop_during_start_up_is_heard(workspace: Workspace) -> None:
    """The launcher of several ranks turns Ctrl-C into the stop file, at whatever moment it comes."""
    (workspace.path / "mine.py").write_text(STOP_AT_ONCE)

    outcome = workspace.podium("train", workspace.recipe(run={"loggers": ["mine.py:StopAtOnce"]}))

    assert "podium resume runs/sums" in outcome.out
