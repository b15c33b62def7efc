# SPDX-License-Identifier: Apache-2.0
"""The console showed `solved` of a weighted total, a mean reward as a percentage, and `reward 0.000` for methods that
have none. Step lines and evaluations show what the method is about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.made_batches import make_graded, on_policy_recipe
from helpers.on_policy import rl_recipe
from helpers.trials import Trial
from helpers.workspace import Workspace
from podium.controller.step_log import step_view
from podium.errors import RecipeError
from podium.observe import EvaluationView
from podium.recipe.solving import Solving

NUMERIC, FORMAT, LENGTH = "{verifier: numeric}", "{function: f.py:format}", "{function: f.py:brief, weight: 0.1}"
DISTILL = ("program=on_policy_distill", "teachers=[{path: teacher}]")


def solving(*overrides: str) -> Solving:
    return on_policy_recipe(*overrides).solving


# --- which reward decides ---


@pytest.mark.parametrize(
    ("rewards", "position", "is_clear"),
    [
        (FORMAT, 0, True),  # the only one
        ("{verifier: numeric, weight: 0.5}", 0, True),  # its value counts, not its share of the total
        (f"{NUMERIC}, {FORMAT}", 0, True),  # the only one that compares with the reference
        (f"{LENGTH}, {FORMAT}, {NUMERIC}", 2, True),
        (f"{FORMAT}, {{verifier: numeric, weight: 0}}", 0, True),  # the other one is only logged
        (f"{FORMAT}, {LENGTH}", None, False),  # nothing says which
        (f"{NUMERIC}, {{verifier: exact_match}}", None, False),
        ("{model: judges/one}", 0, False),  # 1 means nothing to a reward model
    ],
)
def test_the_reward_that_means_success_decides(rewards: str, position: int | None, is_clear: bool) -> None:
    assert solving(f"reward=[{rewards}]") == Solving(reward=position, at=1.0, is_clear=is_clear)


def test_a_recipe_may_name_it() -> None:
    rewards = f"reward=[{NUMERIC}, {FORMAT}]"

    assert solving(rewards, "grading.solved_by=format", "grading.solved_at=0.5") == Solving(reward=1, at=0.5)
    assert solving(rewards, "grading.solved_by=total") == Solving(reward=None, at=1.0)
    with pytest.raises(RecipeError, match=r"grading\.solved_by.*numeric, format, total"):
        solving(rewards, "grading.solved_by=correct")


def test_expert_iteration_trains_on_what_it_calls_solved() -> None:
    expert = ("program=expert_iteration", f"reward=[{NUMERIC}, {FORMAT}]")

    assert solving(*expert) == Solving(reward=None, at=1.0)
    assert solving(*expert, "grading.solved_by=numeric") == Solving(reward=0, at=1.0)


def test_solved_episodes_are_those_of_the_deciding_reward() -> None:
    values_NR = np.array([[1.0, 0.0], [0.0, 1.0], [np.nan, 1.0]])
    graded = make_graded([0.5, 1.2, 1.2], [0, 0, 1], values_NR=values_NR, names=("numeric", "format"))

    assert graded.solved_N(Solving(reward=0, at=1.0)).tolist() == [True, False, False]
    assert graded.solved_N(Solving(reward=None, at=1.0)).tolist() == [False, True, True]


def test_held_out_answers_are_solved_by_the_same_reward(tmp_path: Path) -> None:
    rewards = "reward=[{verifier: exact_match, weight: 0.2}, {model: judges/long, weight: 0.5}]"
    trial = Trial(tmp_path, "steps=1", rewards, "evaluation.generation={prompts: 4, samples: 2}", heldout=4)
    trial.bandit.log_odds = 2.0  # greedy answers are right
    trial.bandit.is_right = lambda id, chance: id.prompt_index == 0
    trial.run()

    values = trial.lines[-1].values
    assert values["heldout/score"] == pytest.approx(0.7)  # below 1
    assert (values["heldout/solved"], values["heldout/pass@2"]) == (1.0, 0.25)
    (view,) = trial.console.evaluations
    assert (view.solved, view.score_is_share) == (1.0, False)


# --- the step line ---


def labels(*overrides: str, **metrics: float) -> dict[str, str]:
    values = {"lr": 1e-6, "tokens_per_s": 10.0, "step_s": 1.0, "reward/mean": 0.25, "groups/solve_rate": 0.5}
    values |= {"response/mean": 9.0, "loss": 0.1, "advantage/mean": -0.75, "entropy": 1.0} | metrics
    return dict(step_view(1, on_policy_recipe(*overrides), values).facts())


def test_the_line_of_a_method_with_rewards() -> None:
    facts = labels()

    assert (facts["reward"], facts["solved"], facts["length"]) == ("0.250", "50.0%", "9.0")


def test_solved_is_left_out_where_no_reward_means_success() -> None:
    assert "solved" not in labels(f"reward=[{FORMAT}, {LENGTH}]")
    assert "solved" in labels(f"reward=[{FORMAT}, {LENGTH}]", "grading.solved_by=total")


def test_on_policy_distillation_shows_the_distance_to_its_teachers() -> None:
    facts = labels(*DISTILL, "reward=[]")

    assert facts["teacher KL"] == "0.7500"
    assert not facts.keys() & {"reward", "solved"}
    assert labels(*DISTILL)["reward"] == "0.250"  # one that is logged


def test_a_step_without_an_update_shows_no_loss() -> None:
    values = {"lr": 1e-6, "tokens_per_s": 10.0, "step_s": 1.0, "reward/mean": 0.25}

    assert "loss" not in dict(step_view(1, on_policy_recipe(), values).facts())


# --- evaluations ---


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"score": 0.542, "score_is_share": True}, "accuracy 54.2% of 500"),
        ({"score": 0.271}, "accuracy 0.271 (mean of 500)"),
        ({"score": 1.0, "solved": 0.2}, "accuracy 1 (mean of 500)  solved 20.0%"),
    ],
)
def test_only_a_share_is_a_percentage(fields: dict[str, Any], text: str) -> None:
    view = EvaluationView(step=1, score_name="accuracy", num_scored=500, **fields)

    assert view.headline() == [f"evaluation at step 1  {text}"]


@pytest.mark.slow
def test_a_mean_reward_is_a_number_in_a_run(workspace: Workspace) -> None:
    heldout = {"heldout": [{"path": "train.jsonl"}], "train": [{"path": "train.jsonl"}]}
    recipe = rl_recipe(workspace, steps=1, data=heldout, evaluation={"generation": {"prompts": 4}})

    outcome = workspace.podium("train", recipe)

    assert outcome.code == 0, outcome.err
    (line,) = re.findall(r"^evaluation at step 1 .*$", outcome.out, re.MULTILINE)
    assert re.search(r"held-out reward [\d.e-]+ \(mean of 4\)", line) or "held-out accuracy 0.0% of 4" in line


# --- programs with fixed data ---

PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
LABELLED = {"prompt": "2+2=", "completion": "4", "label": True}
SCORED = {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}], "score": 0.5}


@pytest.mark.parametrize(
    ("row", "changes", "parts"),
    [
        (PAIR, {"program": "dpo"}, [r"accuracy [\d.]+%", r"margin -?[\d.]+"]),
        (LABELLED, {"program": "dpo", "preference": {"loss": "kto"}}, [r"accuracy [\d.]+%", r"margin -?[\d.]+"]),
        (PAIR, {"program": "reward_model"}, [r"accuracy [\d.]+%", r"margin -?[\d.]+"]),
        (SCORED, {"program": "reward_model", "reward_model": {"learns": "scores"}}, [r"error [\d.]+"]),
    ],
)
def test_each_program_shows_its_own_figure(
    workspace: Workspace, row: dict[str, Any], changes: dict[str, Any], parts: list[str]
) -> None:
    workspace.rows("train.jsonl", [row] * 8)

    outcome = workspace.podium("train", workspace.recipe(steps=1, rows_per_step=4, **changes))

    assert outcome.code == 0, outcome.err
    (line,) = re.findall(r"^step 1/1 .*$", outcome.out, re.MULTILINE)
    assert all(re.search(part, line) for part in parts), line


def test_distillation_shows_divergence_and_agreement(workspace: Workspace) -> None:
    outcome = workspace.podium(
        "train", workspace.recipe(program="distill", steps=1, teachers=[{"path": str(workspace.model)}])
    )

    assert outcome.code == 0, outcome.err
    assert re.search(r"^step 1/1 .*divergence [\d.]+  agreement 100.0%", outcome.out, re.MULTILINE), outcome.out
