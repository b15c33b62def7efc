# SPDX-License-Identifier: Apache-2.0
"""`podium compare`: what two recipes say differently, which metrics differ from which step on, and nothing secret."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import podium
from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.observe.formats import curve


@pytest.fixture
def two(workspace: Workspace) -> Workspace:
    """Two runs that differ in the learning rate after warm-up: `fast` has another one from step 3 on."""
    for name, lr in (("slow", 1e-3), ("fast", 3e-3)):
        recipe = workspace.recipe(name, steps=6, optimizer={"lr": lr}, run={"name": name})
        assert workspace.podium("train", recipe).code == 0
    return workspace


def test_recipes_and_metrics_that_differ_are_shown(two: Workspace) -> None:
    outcome = two.podium("compare", "runs/slow", "runs/fast")

    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    assert lines[0] == "a: runs/slow (sft, finished, step 6 of 6)"
    assert any(re.fullmatch(r"  optimizer\.lr +0\.001 +0\.003", line) for line in lines)
    assert "run.name" not in outcome.out
    loss = next(line for line in lines if line.startswith("  loss "))
    assert "step 2 (5 of 6)" in loss  # the first loss is that of the initial weights
    assert set(loss.split()[-1]) <= set("▁▂▃▄▅▆▇█")
    assert not any(line.startswith("  tokens ") for line in lines)  # the same rows
    assert any(line.startswith("  step_s ") for line in lines)


def test_a_run_does_not_differ_from_itself(two: Workspace) -> None:
    comparison = podium.compare("runs/slow", "runs/slow")
    assert not comparison.changed
    assert not comparison.differing
    assert comparison.num_equal > 10
    assert "recipe: the same" in comparison.lines()


def test_runs_of_other_lengths_and_metrics_are_compared_where_both_have_values(two: Workspace) -> None:
    metrics = two.path / "runs" / "fast" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines[:3]:
        line["own"] = 1.0
    lines[1]["loss"] = "NaN"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]) + '{"step": 4, "lo')  # it was killed

    comparison = podium.compare("runs/slow", "runs/fast")
    loss = next(each for each in comparison.differing if each.name == "loss")
    assert (loss.first_step, loss.num_differing, loss.num_steps) == (2, 2, 3)
    assert comparison.alone == ([], ["own"])
    assert "only in b: own" in comparison.lines()


@pytest.mark.slow
def test_a_secret_is_shown_as_the_variable_that_has_it(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hush-hush")
    (workspace.path / "rewards.py").write_text("def digits(answer, token): return len(answer) % 2")
    for name, token in (("a", "${env:TOKEN}"), ("b", "plain")):
        reward = [{"function": "rewards.py:digits", "options": {"token": token}}]
        assert workspace.podium("train", rl_recipe(workspace, name, steps=1, reward=reward)).code == 0
    outcome = workspace.podium("compare", "runs/a", "runs/b")

    assert outcome.code == 0, outcome
    assert re.search(r"reward\.0\.options\.token +\$\{env:TOKEN\} +plain", outcome.out)
    assert "hush-hush" not in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_a_folder_that_is_no_run_is_named(two: Workspace, side: int) -> None:
    folders = ["runs/slow", "runs/slow"]
    folders[side] = "runs/nothing"
    outcome = two.podium("compare", *folders)
    assert outcome.code != 0
    assert "runs/nothing" in outcome.err
    assert Path("runs/nothing").exists() is False


@pytest.mark.parametrize(
    ("values", "scale", "columns", "shown"),
    [
        ([0.0, 1.0], (0.0, 1.0), 24, "▁█"),
        ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], (0.0, 2.0), 3, "▁▅█"),
        ([math.nan, 1.0, math.inf], (0.0, 1.0), 3, " █ "),
        ([5.0, 5.0], (5.0, 5.0), 2, "▁▁"),
        ([], (0.0, 0.0), 5, ""),
    ],
)
def test_curves_have_one_block_for_each_part(
    values: list[float], scale: tuple[float, float], columns: int, shown: str
) -> None:
    assert curve(values, scale, columns=columns) == shown
