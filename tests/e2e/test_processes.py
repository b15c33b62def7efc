# SPDX-License-Identifier: Apache-2.0
"""Podium in processes of its own: two ranks, the installed command, and a rank that fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.workspace import Workspace

HELDOUT = {"heldout": [{"path": "heldout.jsonl"}]}


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_ranks_train_as_one_and_their_run_continues_with_one(workspace: Workspace) -> None:
    generation = {"prompts": 3, "max_new_tokens": 3, "score": "exact_match"}
    recipe = workspace.recipe(data=HELDOUT, evaluation={"generation": generation})

    two = workspace.process("train", recipe, "--devices", "2", "--set", "run.name=two", "--set", "steps=2")
    assert two.code == 0, two
    assert "step 2: runs/two" in two.out
    assert "devices: 2 x CPU" in two.out
    saved = workspace.path / "runs/two/checkpoints/step-00000002"
    assert {path.name for path in saved.glob("rank-*.json")} == {"rank-00000.json", "rank-00001.json"}

    # Two ranks hand over to one; a run on one rank throughout is the measure.
    handed_over = workspace.podium("resume", "runs/two", "--devices", "1", "--set", "steps=4")
    one = workspace.podium("train", recipe, "--set", "run.name=one")
    assert handed_over.code == one.code == 0, (handed_over, one)
    assert workspace.metric("two", "loss") == pytest.approx(workspace.metric("one", "loss"), rel=1e-4)
    assert workspace.metric("two", "heldout/loss")[4] == pytest.approx(
        workspace.metric("one", "heldout/loss")[4], rel=1e-4
    )
    assert workspace.metric("two", "tokens") == workspace.metric("one", "tokens")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_mistake_found_by_a_rank_is_reported_once_and_leaves_nothing(workspace: Workspace) -> None:
    rows = (workspace.path / "train.jsonl").read_text().splitlines()
    rows[9] = "{oops"
    (workspace.path / "train.jsonl").write_text("\n".join(rows))

    outcome = workspace.process("train", workspace.recipe(), "--devices", "2")

    # Torch may log first that it ended the other rank; that depends on which of the two came first to the bad row.
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    assert outcome.err.count("train.jsonl, line 10: ") == 1
    assert not (workspace.path / "runs" / "sums").exists()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_bug_in_a_users_code_on_a_rank_comes_with_its_traceback_once(workspace: Workspace) -> None:
    (workspace.path / "mine.py").write_text("def logger(folder):\n    return [][7]\n")

    outcome = workspace.process("train", workspace.recipe(run={"loggers": ["mine.py:logger"]}), "--devices", "2")

    assert outcome.code == 2, outcome
    assert "rank 0 failed" in outcome.err
    assert "mine.py" in outcome.err
    assert outcome.err.count("IndexError") == 1
    assert not (workspace.path / "runs" / "sums").exists()


@pytest.mark.slow
def test_the_installed_command_prints_errors_to_stderr_and_exits_2(workspace: Workspace) -> None:
    command = Path(sys.executable).parent / "podium"
    if not command.exists():
        pytest.skip("podium is not installed as a command beside this Python")

    bad = subprocess.run([command, "check", "none.yaml"], capture_output=True, text=True, timeout=60)
    good = subprocess.run([command, "schema"], capture_output=True, text=True, timeout=60)

    assert (bad.returncode, bad.stdout) == (2, "")
    assert re.search(r"^error: .*\bnone\.yaml\b", bad.stderr)
    assert json.loads(good.stdout)["title"] == "Recipe"
