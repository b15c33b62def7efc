# SPDX-License-Identifier: Apache-2.0
"""Held-out rows without the reward's column gave 0% after the whole training. They are refused before the first step,
and a score that is unavailable is missing, never 0. So is a reward whose parameters nothing fills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.made_batches import make_answer, make_rollouts, make_task
from helpers.on_policy import numbers, rl_recipe
from helpers.workspace import Workspace
from podium.controller.evaluation import pass_at_metrics, summarise
from podium.controller.grading import HeldoutScores

REWARDS = """
def by_reference(answer, reference):
    return float(answer.strip() == reference.strip())

def by_row(answer, row):
    return float(answer.strip() == row["key"])

def by_row_if_any(answer, row):
    return float(answer.strip() == row.get("key", ""))

def trl_style(completions, key, **kwargs):
    return [float(each == right) for each, right in zip(completions, key)]

def copes(answer, reference=None):
    return 0.5

def down(answer, row):
    if row.get("judge") == "down":
        raise ConnectionError("the judge is down")
    return 1.0
"""
TRAIN = [{"prompt": f"{number}+1=", "answer": str(number + 1), "key": str(number + 1)} for number in range(8)]
HELDOUT = [{"prompt": f"{number}+2="} for number in range(4)]


def _recipe(workspace: Workspace, reward: dict[str, Any], heldout: list[dict[str, Any]], **changes: Any) -> str:
    (workspace.path / "rewards.py").write_text(REWARDS)
    workspace.rows("train.jsonl", TRAIN)
    workspace.rows("heldout.jsonl", heldout)
    data = {"train": [{"path": "train.jsonl"}], "heldout": [{"path": "heldout.jsonl"}]}
    return rl_recipe(workspace, reward=[reward], data=data, steps=1, **changes)


@pytest.mark.parametrize(
    ("reward", "column"),
    [
        ({"function": "rewards.py:by_reference"}, "`reference`"),
        ({"function": "rewards.py:by_row"}, "`key`"),
        ({"function": "rewards.py:trl_style"}, "`key`"),
        ({"verifier": "exact_match"}, "`reference`"),
    ],
)
def test_held_out_rows_without_the_rewards_column_are_refused_before_the_first_step(
    workspace: Workspace, reward: dict[str, Any], column: str
) -> None:
    recipe = _recipe(workspace, reward, HELDOUT)

    workspace.refused(workspace.podium("train", recipe), "data.heldout", "heldout.jsonl", column, "reward.0")
    workspace.refused(workspace.podium("check", "--deep", recipe), "data.heldout", "heldout.jsonl", column)


@pytest.mark.parametrize("function", ["by_row_if_any", "copes"])
def test_a_reward_that_copes_without_the_column_is_no_mistake(workspace: Workspace, function: str) -> None:
    outcome = workspace.podium("check", "--deep", _recipe(workspace, {"function": f"rewards.py:{function}"}, HELDOUT))

    assert outcome.code == 0, outcome.err


def test_another_score_for_held_out_answers_is_enough(workspace: Workspace) -> None:
    generation = {"generation": {"score": "rewards.py:copes"}}
    reward = {"function": "rewards.py:by_reference"}

    outcome = workspace.podium("check", "--deep", _recipe(workspace, reward, HELDOUT, evaluation=generation))

    assert outcome.code == 0, outcome.err


UNFILLED = """
from functools import cache

def misnamed(completion, solution_key):
    return 1.0

def by_column(completions, solution_key, **kwargs):
    return [1.0 for _ in completions]

class Judge:
    def __init__(self, scale, *, url=None):
        self.scale = scale

    def __call__(self, answer):
        return self.scale

class Inherited(Judge):
    pass

class OfSeveral(Judge, object):
    pass

@cache
def decorated(anything):
    return 1.0
"""


def _unfilled(workspace: Workspace, reward: dict[str, Any], rows: list[dict[str, Any]] = TRAIN) -> str:
    (workspace.path / "mine.py").write_text(UNFILLED)
    workspace.rows("train.jsonl", rows)
    return rl_recipe(workspace, reward=[reward], steps=1)


@pytest.mark.parametrize(
    ("reward", "facts"),
    [
        ({"function": "mine.py:misnamed"}, ("reward.0.function", "mine.py, line 4", "`solution_key`")),
        (
            {"function": "mine.py:misnamed", "options": {"solution_key": 1}},
            ("reward.0.function", "mine.py, line 4", "`completion`"),
        ),
        ({"function": "rewards.py:copes", "options": {"scal": 2}}, ("reward.0.options.scal", "rewards.py, line ")),
        ({"function": "mine.py:Judge"}, ("reward.0.options", "mine.py, line 10", "`scale`")),
        ({"function": "mine.py:Judge", "options": {"scale": 1, "ulr": 2}}, ("reward.0.options.ulr", "url")),
        ({"function": "mine.py:Inherited"}, ("reward.0.options", "mine.py, line 17", "`scale`")),
    ],
)
def test_parameters_that_nothing_fills_and_options_that_nothing_takes_are_refused_without_rows(
    workspace: Workspace, reward: dict[str, Any], facts: tuple[str, ...]
) -> None:
    (workspace.path / "rewards.py").write_text(REWARDS)

    workspace.refused(workspace.podium("check", _unfilled(workspace, reward)), *facts)


@pytest.mark.parametrize(
    "reward",
    [
        {"function": "mine.py:Judge", "options": {"scale": 1}},
        {"function": "mine.py:Inherited", "options": {"scale": 1}},
        {"function": "mine.py:OfSeveral", "options": {"anything": 1}},  # only running the file can tell
        {"function": "mine.py:decorated"},
    ],
)
def test_a_reward_that_may_be_called_is_not_refused(workspace: Workspace, reward: dict[str, Any]) -> None:
    outcome = workspace.podium("check", _unfilled(workspace, reward))

    assert outcome.code == 0, outcome.err


def test_a_parameter_that_no_column_of_the_training_rows_fills_is_refused_where_rows_are_read(
    workspace: Workspace,
) -> None:
    recipe = _unfilled(workspace, {"function": "mine.py:by_column"})
    facts = ("reward.0.function", "mine.py, line 7", "`solution_key`", "prompt, answer, key")

    assert workspace.podium("check", recipe).code == 0
    workspace.refused(workspace.podium("check", "--deep", recipe), *facts)
    workspace.refused(workspace.podium("try", recipe), *facts)
    workspace.refused(workspace.podium("train", recipe), *facts)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"solution_key": 1}, TRAIN),
        ({}, [*TRAIN, {**TRAIN[0], "solution_key": "1"}]),  # some rows have it
        ({}, [{**row, "solution_key": None} for row in TRAIN]),
    ],
)
def test_a_parameter_that_an_option_or_a_column_fills_is_no_mistake(
    workspace: Workspace, options: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    recipe = _unfilled(workspace, {"function": "mine.py:by_column", "options": options}, rows)

    outcome = workspace.podium("check", "--deep", recipe)

    assert outcome.code == 0, outcome.err


@pytest.mark.slow
def test_answers_that_cannot_be_scored_are_missing_in_every_mean(workspace: Workspace) -> None:
    heldout = [{**row, "judge": "down" if number == 0 else "up"} for number, row in enumerate(HELDOUT)]

    outcome = workspace.podium("train", _recipe(workspace, {"function": "rewards.py:down"}, heldout))

    assert outcome.code == 0, outcome.err
    assert "ConnectionError" in outcome.out
    last = numbers(workspace.path / "runs/sums")[1]
    assert last["heldout/score"] == 1.0
    assert last["heldout/solved"] == 1.0
    assert last["heldout/unscored"] == 1.0


@pytest.mark.slow
def test_without_any_score_there_is_none(workspace: Workspace) -> None:
    heldout = [{**row, "judge": "down"} for row in HELDOUT]

    outcome = workspace.podium("train", _recipe(workspace, {"function": "rewards.py:down"}, heldout))

    assert outcome.code == 0, outcome.err
    last = numbers(workspace.path / "runs/sums")[1]
    assert "heldout/score" not in last
    assert last["heldout/unscored"] == 4.0
    assert "held-out" not in outcome.out.split("evaluation at step 1")[1].splitlines()[0]


def _scores(scores_N: np.ndarray) -> HeldoutScores:
    return HeldoutScores(scores_N=scores_N, solved_N=scores_N >= 1, texts=(), num_errors=0, first_error=None)


def test_a_missing_score_leaves_its_prompt_out_of_pass_at_k() -> None:
    nan = float("nan")
    scores_N, group_N = np.array([1.0, 0.0, nan, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1, 2, 2])

    assert pass_at_metrics(_scores(scores_N), group_N, 2) == {"heldout/pass@1": 0.25, "heldout/pass@2": 0.5}
    assert pass_at_metrics(_scores(np.full(6, nan)), group_N, 2) == {}


def test_a_summary_of_no_scores_has_no_score() -> None:
    rollouts = make_rollouts([make_answer(0, 0), make_answer(1, 0)])

    evaluation = summarise(1, rollouts, _scores(np.full(len(rollouts), np.nan)), [make_task(0), make_task(1)], {})

    assert evaluation.score is None
    assert evaluation.view.score is None
    assert "heldout/score" not in evaluation.metrics
