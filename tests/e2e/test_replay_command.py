# SPDX-License-Identifier: Apache-2.0
"""`podium replay` as a user types it: what it compares, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.on_policy import numbers, rl_recipe
from helpers.workspace import Workspace
from podium.runs.folder import RunFolder
from podium.runs.step_files import step_path

RECORDED: dict[str, Any] = {
    "rollout": {"record": True},
    "data": {"train": [{"path": "train.jsonl"}], "heldout": [{"path": "heldout.jsonl"}]},
    "evaluation": {"every": 2, "at_start": True, "generation": {"prompts": 2}},
    "checkpoint": {"every": 2, "keep_best": True},
    "algorithm": {"max_kl_behavior": 100.0, "kl": {"coefficient": 0.1}},
}  # fmt: skip


@pytest.fixture
def recorded(workspace: Workspace) -> Path:
    """The folder of a run that recorded its steps."""
    (workspace.path / "heldout.jsonl").write_text((workspace.path / "train.jsonl").read_text())
    outcome = workspace.podium("train", rl_recipe(workspace, **{**RECORDED, "steps": 4}))
    assert outcome.code == 0, outcome
    return workspace.path / "runs" / "sums"


def test_a_replay_is_identical_and_evaluates_nothing(workspace: Workspace, recorded: Path) -> None:
    outcome = workspace.podium("replay", "runs/sums")

    assert outcome.code == 0, outcome
    assert "identical" in outcome.out
    again = workspace.path / "runs" / "sums-replay"
    updates = [{step: run[step]["loss"] for step in (1, 2, 3, 4)} for run in (numbers(recorded), numbers(again))]
    assert updates[0] == updates[1]
    assert not any("heldout/score" in values for values in numbers(again).values())
    assert not (again / "steps").exists()

    workspace.refused(workspace.podium("replay", "runs/sums"), "sums-replay", "--out", left=("sums", "sums-replay"))
    for command in ("resume", "replay"):
        workspace.refused(workspace.podium(command, "runs/sums-replay"), str(recorded), left=("sums", "sums-replay"))
    assert workspace.podium("replay", "runs/sums", "--out", "again/here").code == 0
    assert (workspace.path / "again" / "here" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_replay_that_differs_says_where(
    workspace: Workspace, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rate from step 3 on stands for whatever may have changed."""
    from podium.controller import run

    original = run.learning_rate
    monkeypatch.setattr(run, "learning_rate", lambda o, step, steps: original(o, step, steps) * (1 + (step >= 3)))
    outcome = workspace.podium("replay", "runs/sums")

    assert outcome.code == 1, outcome
    assert "different" in outcome.out
    assert "step 4: " in outcome.out  # the loss of step 3 is of the weights before its update


@pytest.mark.slow
def test_an_interrupted_and_resumed_run_is_replayed_from_its_beginning(workspace: Workspace, recorded: Path) -> None:
    """The replay goes as far as the last checkpoint."""
    outcome = workspace.podium("resume", "runs/sums", "--set", "steps=6")
    assert outcome.code == 0, outcome
    assert len(list((recorded / "steps").iterdir())) == 6
    outcome = workspace.podium("replay", "runs/sums")
    assert outcome.code == 0, outcome


@pytest.mark.slow
def test_tampering_is_refused_before_anything_starts(workspace: Workspace, recorded: Path) -> None:
    path = step_path(recorded / "steps", 2)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    workspace.refused(workspace.podium("replay", "runs/sums"), path.name, "SHA-256", left=("sums",))
    path.unlink()
    workspace.refused(workspace.podium("replay", "runs/sums"), path.name, "1, 3 to 4", left=("sums",))


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused(workspace: Workspace, recorded: Path) -> None:
    values = yaml.safe_load((recorded / "recipe.yaml").read_text())
    changed = {**values, "optimizer": {**values["optimizer"], "lr": 1.0}}
    (recorded / "recipe.yaml").write_text(yaml.safe_dump(changed))
    workspace.refused(workspace.podium("replay", "runs/sums"), "optimizer.lr", left=("sums",))
    (recorded / "recipe.yaml").write_text(yaml.safe_dump(values))

    rows = (workspace.path / "train.jsonl").read_text()
    (workspace.path / "train.jsonl").write_text(rows + json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    workspace.refused(workspace.podium("replay", "runs/sums"), "train.jsonl", left=("sums",))
    (workspace.path / "train.jsonl").write_text(rows)

    with RunFolder.open(recorded).held():
        workspace.refused(workspace.podium("replay", "runs/sums"), "running", left=("sums",))
    workspace.refused(workspace.podium("replay", "runs/sums", "--fresh"), "rollout.staleness 0", left=("sums",))
    workspace.refused(workspace.podium("replay", "runs/none"), "runs/none", left=("sums",))

    for path in (recorded / "steps").iterdir():
        path.unlink()
    workspace.refused(workspace.podium("replay", "runs/sums"), "rollout.record", left=("sums",))


def test_a_run_on_fixed_data_has_nothing_to_replay(workspace: Workspace) -> None:
    assert workspace.podium("train", workspace.recipe(steps=1)).code == 0
    workspace.refused(workspace.podium("replay", "runs/sums"), "sft", left=("sums",))
