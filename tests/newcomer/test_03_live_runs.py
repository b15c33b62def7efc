# SPDX-License-Identifier: Apache-2.0
"""A second run under the name of a live one was advised to remove its folder. It is told that the run is alive, which
process runs it, and since when."""

from __future__ import annotations

import os
import re
import time

import pytest

from helpers.workspace import Workspace
from podium.runs.folder import RunFolder


@pytest.mark.parametrize("status", ["starting", "running", "failed"])
def test_a_second_run_of_a_live_name_is_refused_and_the_live_one_is_left_alone(
    workspace: Workspace, status: str
) -> None:
    recipe = workspace.recipe("sums", steps=1)
    assert workspace.podium("train", recipe).code == 0
    folder = RunFolder(path=workspace.path / "runs/sums")
    folder.update(status=status)
    before = sorted(path.name for path in folder.path.rglob("*"))
    year = time.strftime("%Y")

    with folder.held():
        outcome = workspace.podium("train", recipe)

    workspace.refused(outcome, "runs/sums", f"process {os.getpid()}", "run.name", left=("sums",))
    assert re.search(rf"since {year}-\d\d-\d\d \d\d:\d\d:\d\d", outcome.err)
    assert "remove" not in outcome.err
    assert "resume" not in outcome.err
    assert sorted(path.name for path in folder.path.rglob("*")) == before


def test_a_live_run_cannot_be_resumed_and_is_named(workspace: Workspace) -> None:
    assert workspace.podium("train", workspace.recipe("sums", steps=1)).code == 0

    with RunFolder(path=workspace.path / "runs/sums").held():
        outcome = workspace.podium("resume", "runs/sums", "--set", "steps=2")

    workspace.refused(outcome, "runs/sums", left=("sums",))


def test_a_run_that_is_over_says_how_to_continue(workspace: Workspace) -> None:
    recipe = workspace.recipe("sums", steps=1)
    assert workspace.podium("train", recipe).code == 0

    outcome = workspace.podium("train", recipe)

    workspace.refused(outcome, "podium resume runs/sums", "run.name", left=("sums",))
