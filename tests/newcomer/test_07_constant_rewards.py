# SPDX-License-Identifier: Apache-2.0
"""A constant reward, a gradient of 0 and a learning rate of 1e6 trained for hours without a word. The console says once
what happens and the likely cause, and stays silent in ordinary runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from helpers.made_batches import on_policy_recipe
from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.runs.learning_watch import LearningWatch

Metrics = Mapping[str, float]


def warnings(watch: LearningWatch, steps: Sequence[Metrics]) -> dict[int, str]:
    """Step -> what the watch said after it."""
    texts = {number: watch.check(number, metrics) for number, metrics in enumerate(steps, start=1)}
    return {number: text for number, text in texts.items() if text is not None}


def grpo(**settings: float) -> LearningWatch:
    values = {"samples_per_prompt": 4, "temperature": 1.0} | settings
    return LearningWatch(compares_groups=True, learns_from_rewards=True, **values)  # type: ignore[arg-type]


def graded(low: float, high: float, *, uniform: float, **others: float) -> Metrics:
    values = {
        "reward/min": low, "reward/max": high, "reward/mean": (low + high) / 2, "groups/uniform": uniform,
        "groups/solve_rate": high, "episodes": 16.0, "loss": 0.0, "grad_norm": 0.0 if uniform == 1 else 1.0, "lr": 1e-6,
    }  # fmt: skip
    return values | others


def fixed(loss: float, grad_norm: float, **others: float) -> Metrics:
    return {"loss": loss, "grad_norm": grad_norm, "lr": 1e-5, "skipped": 0.0} | others


# --- rewards ---


def test_a_constant_reward_is_reported_once_after_three_steps() -> None:
    told = warnings(grpo(), [graded(0.5, 0.5, uniform=1.0)] * 30)

    assert list(told) == [3]
    assert "steps 1 to 3" in told[3]
    assert "0.5" in told[3]


def test_prompts_that_are_all_solved_get_another_advice_than_prompts_that_never_are() -> None:
    (solved,) = warnings(grpo(), [graded(1.0, 1.0, uniform=1.0)] * 3).values()
    (unsolved,) = warnings(grpo(), [graded(0.0, 0.0, uniform=1.0)] * 3).values()

    assert "harder prompts" in solved
    assert "SFT" in unsolved


def test_groups_of_equal_rewards_are_reported_with_the_number_of_samples() -> None:
    told = warnings(grpo(), [graded(0.0, 1.0, uniform=1.0)] * 4)

    assert list(told) == [3]
    assert "rollout.samples_per_prompt (now 4)" in told[3]
    assert "rollout.temperature" not in told[3]


def test_a_low_temperature_and_truncated_answers_are_named() -> None:
    steps = [graded(0.0, 1.0, uniform=1.0, **{"episodes/truncated": 1.0})] * 3

    (text,) = warnings(grpo(temperature=0.01), steps).values()

    assert "rollout.temperature 0.01" in text
    assert "rollout.max_new_tokens" in text


def test_one_informative_group_is_enough() -> None:
    assert not warnings(grpo(), [graded(0.0, 1.0, uniform=0.75)] * 30)


def test_a_run_that_learned_before_is_given_ten_steps() -> None:
    steps = [graded(0.0, 1.0, uniform=0.5)] + [graded(0.0, 0.0, uniform=1.0)] * 11

    assert list(warnings(grpo(), steps)) == [11]


def test_a_run_that_has_learned_it_all_is_left_alone() -> None:
    learning = [graded(0.0, 1.0, uniform=0.5)]

    assert not warnings(grpo(), learning + [graded(1.0, 1.0, uniform=1.0)] * 30)
    assert not warnings(grpo(), learning + [graded(0.0, 1.0, uniform=1.0)] * 30)


def test_methods_that_do_not_compare_groups_learn_from_prompts_of_equal_rewards() -> None:
    differing, constant = [graded(0.0, 1.0, uniform=1.0, grad_norm=1.0)], [graded(0.0, 0.0, uniform=1.0, grad_norm=1.0)]

    assert not warnings(LearningWatch(learns_from_rewards=True), differing * 30)
    assert list(warnings(LearningWatch(learns_from_rewards=True), constant * 30)) == [3]


def test_rewards_that_are_only_logged_may_be_constant() -> None:
    assert not warnings(LearningWatch(), [graded(0.0, 0.0, uniform=1.0, grad_norm=0.5)] * 30)


def test_a_huge_learning_rate_is_the_first_suspect() -> None:
    steps = [graded(0.0, 1.0, uniform=0.5, lr=1e6)] + [graded(0.0, 0.0, uniform=1.0, lr=1e6)] * 5

    told = warnings(grpo(), steps)

    assert list(told) == [4]
    assert "1e+06" in told[4]
    assert "optimizer.lr" in told[4]


# --- gradients and losses ---


def test_a_gradient_of_0_is_reported_once_although_rewards_differ() -> None:
    told = warnings(grpo(), [graded(0.0, 1.0, uniform=0.5, grad_norm=0.0)] * 20)

    assert list(told) == [3]
    assert "gradient" in told[3]


def test_a_gradient_of_0_on_fixed_data_is_reported_once() -> None:
    told = warnings(LearningWatch(), [fixed(1.5, 0.0)] * 20)

    assert list(told) == [3]
    assert "1.5" in told[3]


def test_a_loss_that_never_changes_is_reported_with_the_learning_rate() -> None:
    told = warnings(LearningWatch(), [fixed(1.5, 2.0, lr=1e-30)] * 20)

    assert list(told) == [4]
    assert "optimizer.lr (1e-30" in told[4]


def test_a_huge_learning_rate_is_named_with_a_gradient_of_0() -> None:
    steps = [fixed(2.0, 1.0, lr=1e6), *[fixed(80.0, 0.0, lr=1e6)] * 4]

    told = warnings(LearningWatch(), steps)

    assert list(told) == [4]
    assert "1e+06" in told[4]


def test_ordinary_steps_skipped_steps_and_steps_without_an_update_are_no_cause() -> None:
    ordinary = [fixed(3.0 - 0.01 * number, 1.0) for number in range(20)]
    assert not warnings(LearningWatch(), ordinary)
    assert not warnings(LearningWatch(), [fixed(float("nan"), float("nan"), skipped=1.0)] * 20)
    assert not warnings(grpo(), [{"lr": 1e-6, "groups": 0.0, "episodes": 16.0}] * 20)


# --- recipes and runs ---


@pytest.mark.parametrize(
    ("overrides", "constant", "uniform"),
    [
        ((), True, True),
        (("algorithm.advantage=reinforce_pp",), True, False),
        (("program=ppo",), True, False),
        (("program=on_policy_distill", "teachers=[{path: teacher}]"), False, False),
    ],
)
def test_the_recipe_decides_what_is_watched(overrides: tuple[str, ...], constant: bool, uniform: bool) -> None:
    recipe = on_policy_recipe(*overrides)

    same = [graded(0.0, 0.0, uniform=1.0, grad_norm=1.0)] * 3
    within = [graded(0.0, 1.0, uniform=1.0, grad_norm=1.0)] * 3
    assert bool(warnings(LearningWatch.of(recipe), same)) is constant
    assert bool(warnings(LearningWatch.of(recipe), within)) is uniform


def _warned(out: str) -> int:
    return out.count("warning: steps ")


@pytest.mark.slow
def test_an_on_policy_run_warns_of_a_constant_reward(workspace: Workspace) -> None:
    (workspace.path / "rewards.py").write_text("def constant(answer):\n    return 0.25\n")

    outcome = workspace.podium("train", rl_recipe(workspace, steps=5, reward=[{"function": "rewards.py:constant"}]))

    assert outcome.code == 0, outcome.err
    assert _warned(outcome.out) == 1
    assert "0.25" in outcome.out


def test_a_run_on_fixed_data_warns_of_a_loss_that_stands_still(workspace: Workspace) -> None:
    workspace.rows(
        "train.jsonl", [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]
    )

    outcome = workspace.podium("train", workspace.recipe(optimizer={"lr": 1e-30}, steps=6))

    assert outcome.code == 0, outcome.err
    assert _warned(outcome.out) == 1


@pytest.mark.slow
def test_ordinary_runs_say_nothing(workspace: Workspace) -> None:
    outcome = workspace.podium("train", workspace.recipe(steps=6))
    assert outcome.code == 0, outcome.err
    assert "warning" not in outcome.out

    outcome = workspace.podium("train", rl_recipe(workspace, "rl", steps=5))
    assert outcome.code == 0, outcome.err
    assert _warned(outcome.out) == 0
