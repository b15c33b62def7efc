# SPDX-License-Identifier: Apache-2.0
"""A run or pipeline that is overwritten waits beside the new one until that has taken a step, also if it is killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.runs.folder import RunFolder
from podium.runs.pipeline_folder import PipelineFolder


@pytest.mark.parametrize("killed_after", ["the start of the pipeline", "the start of its stage", "its first step"])
def test_overwriting_again_after_a_kill_keeps_the_last_that_has_steps(tmp_path: Path, killed_after: str) -> None:
    folder = PipelineFolder(path=tmp_path / "one")
    stage = make_recipe(f"run.folder={folder.path}", "run.name=a")
    folder.path.mkdir()
    folder.update(order=["a"], parents={})
    RunFolder.create(stage).update(status="finished")
    (folder.path / "first").touch()
    with folder.overwriting():
        folder.path.mkdir()
        folder.update(order=["a"], parents={})
        if killed_after != "the start of the pipeline":
            run = RunFolder.create(stage)
        if killed_after == "its first step":
            run.update(status="running")
            run.forget_overwritten()
        shutil.copytree(tmp_path, tmp_path.with_name("killed"))  # as a kill leaves it

    shutil.rmtree(tmp_path)
    tmp_path.with_name("killed").rename(tmp_path)
    with folder.overwriting():
        assert not folder.path.exists()

    assert (folder.path / "first").exists() == (killed_after != "its first step")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_overwriting_a_run_again_after_a_kill_keeps_the_last_that_has_steps(tmp_path: Path) -> None:
    recipe = make_recipe(f"run.folder={tmp_path}", "run.name=a")
    RunFolder.create(recipe).update(status="finished")
    run = RunFolder.of(recipe)
    run.set_aside()
    RunFolder.create(recipe)  # and killed before its first step

    run.set_aside()

    assert not run.path.exists()
    assert run.restore_overwritten()
    assert run.status == "finished"
