# SPDX-License-Identifier: Apache-2.0
"""What is done about a stage follows from what is on disk: skipped, exported, gone on with, or trained anew."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from podium.errors import RunFolderError
from podium.programs.pipeline import Action, StageFacts, decide
from podium.recipe.pipeline_loading import parse_pipeline
from podium.runs.folder import RunFolder, held
from podium.runs.pipeline_folder import PipelineFolder, StageRecord

DONE = StageFacts(
    record=StageRecord(status="done", fingerprint="f", weights="w"),
    fingerprint="f",
    folder_fingerprint="f",
    saved_step=4,
    steps=4,
    export_fingerprint="w",
)
BROKEN_OFF = replace(
    DONE, record=StageRecord(status="running", fingerprint="f"), saved_step=2, export_fingerprint=None
)  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "action"),
    [
        (DONE, "skip"),
        (replace(DONE, fingerprint="other"), "train"),
        (replace(DONE, export_fingerprint=None), "export"),
        (replace(DONE, export_fingerprint="meddled with"), "export"),
        (replace(DONE, record=replace(DONE.record, status="running")), "export"),
        (BROKEN_OFF, "resume"),
        (replace(BROKEN_OFF, record=replace(BROKEN_OFF.record, status="stopped")), "resume"),
        (replace(BROKEN_OFF, record=replace(BROKEN_OFF.record, status="failed")), "resume"),
        (replace(BROKEN_OFF, saved_step=None), "train"),
        (replace(BROKEN_OFF, saved_step=4), "export"),
        (replace(BROKEN_OFF, fingerprint="other"), "train"),
        (replace(BROKEN_OFF, folder_fingerprint="set by hand"), "train"),
        (replace(BROKEN_OFF, record=StageRecord()), "train"),
    ],
)
def test_each_state_of_a_stage_has_its_action(facts: StageFacts, action: Action) -> None:
    assert decide(facts) == action


def test_nothing_that_another_fingerprint_made_is_ever_used() -> None:
    """Over every combination of what may lie on the disk of a stage that is to be `f` now."""
    for recorded, status, folder, saved, exported in product(
        (None, "f", "g"), ("waiting", "running", "stopped", "failed", "done"), (None, "f", "g"), (None, 2, 4),
        (None, "w", "v"),
    ):  # fmt: skip
        record = StageRecord(status=status, fingerprint=recorded, weights="w")  # type: ignore[arg-type]
        facts = StageFacts(
            record=record, fingerprint="f", folder_fingerprint=folder, saved_step=saved, steps=4,
            export_fingerprint=exported,
        )  # fmt: skip
        match decide(facts):
            case "skip":
                assert (recorded, status, exported) == ("f", "done", "w")
            case "resume" | "export":
                assert recorded == folder == "f"
                assert saved is not None


# --- the folder ---


@pytest.fixture
def folder(tmp_path: Path) -> PipelineFolder:
    stage = {"program": "sft", "model": "base", "data": {"train": [{"path": "a"}]}, "optimizer": {"lr": 1}, "steps": 1}
    recipe = parse_pipeline(
        {"program": "pipeline", "stages": {"sft": stage}, "run": {"name": "p", "folder": str(tmp_path)}}
    )
    made = PipelineFolder.at(recipe)
    with made.create_and_hold():
        made.begin(recipe)
    return made


def test_what_is_known_of_a_stage_is_kept_over_another_beginning(folder: PipelineFolder) -> None:
    assert folder.record("sft") == StageRecord()
    known = StageRecord(status="done", fingerprint="f", weights="w")
    folder.note("sft", known)

    again = PipelineFolder.open(folder.path)
    again.begin(again.recipe())

    assert again.record("sft") == known


def test_earlier_folders_of_a_stage_are_numbered_and_none_is_lost(folder: PipelineFolder) -> None:
    found = []
    for text in ("first", "second", "third"):
        run = folder.run("sft").path
        run.mkdir()
        (run / "what").write_text(text)
        found.append(folder.set_aside("sft"))
    assert [aside and aside.name for aside in found] == ["sft-1", "sft-2", "sft-3"]
    assert [(aside / "what").read_text() for aside in found if aside] == ["first", "second", "third"]
    assert folder.set_aside("sft") is None


def test_a_stage_that_somebody_runs_is_not_moved_away(folder: PipelineFolder) -> None:
    run = folder.run("sft")
    run.path.mkdir()
    with run.held(), pytest.raises(RunFolderError, match=rf"{run.path} .*process "):
        folder.set_aside("sft")
    assert run.path.exists()


def test_one_process_at_a_time_runs_a_pipeline(folder: PipelineFolder) -> None:
    with (
        held(folder.path),
        pytest.raises(RunFolderError, match=rf"{folder.path} .*process "),
        folder.create_and_hold(),
    ):
        raise AssertionError


def test_a_pipelines_folder_is_not_taken_for_a_runs(folder: PipelineFolder) -> None:
    with pytest.raises(RunFolderError, match=rf"{folder.path}/STAGE\b"):
        RunFolder.open(folder.path)


def test_a_folder_of_something_else_is_not_written_into(tmp_path: Path, folder: PipelineFolder) -> None:
    recipe = folder.recipe()
    other = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": "other"})})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "recipe.yaml").touch()  # as a start leaves it that was killed
    assert PipelineFolder.at(other).path == tmp_path / "other"
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=r"/other .*--set run\.name="):
        PipelineFolder.at(other)
