# SPDX-License-Identifier: Apache-2.0
"""Each estimator that a recipe can name, on one small batch, and custom estimators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from helpers.made_batches import make_graded, on_policy_recipe
from podium.errors import RecipeError
from podium.programs.estimators import AdvantageEstimator, advantage_estimator
from podium.programs.expert_iteration import best_solved
from podium.recipe import plugins
from podium.recipe.solving import Solving
from podium.roles.stages import Advantages, GradedRollouts

# Two groups of three and two; the second is of equal rewards.
REWARDS, GROUPS, LENGTHS = [3.0, 0.0, 0.0, 5.0, 5.0], [2, 2, 2, 9, 9], [1, 2, 3, 4, 5]
NONE = np.empty(0, np.int64)


def _estimator(name: str) -> AdvantageEstimator:
    return advantage_estimator(on_policy_recipe(f"algorithm.advantage='{name}'"))


def _estimate(estimator: AdvantageEstimator, rewards: Sequence[float] = REWARDS) -> Advantages:
    return estimator(np.array(rewards), make_graded(REWARDS, GROUPS, lengths=LENGTHS))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Mean 1, unbiased standard deviation sqrt((4 + 1 + 1) / 2) = sqrt(3).
        ("group_relative", [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 0, 0]),
        ("group_centered", [2, -1, -1, 0, 0]),
        ("leave_one_out", [3, -1.5, -1.5, 0, 0]),
        # The mean weighted by length is 3 * 1 / 6.
        ("length_weighted", [2.5, -0.5, -0.5, 0, 0]),
    ],
)
def test_an_estimator_of_whole_episodes_gives_one_advantage_each(name: str, expected: list[float]) -> None:
    advantages = _estimate(_estimator(name))

    assert advantages.values_N == pytest.approx(expected, abs=2e-6)
    assert advantages.values_N is not None
    assert advantages.values_N.dtype == np.float64
    assert not advantages.whiten


def test_grpo_without_a_name_is_group_relative() -> None:
    by_default = _estimate(advantage_estimator(on_policy_recipe())).values_N

    assert by_default is not None
    assert by_default.tolist() == _estimate(_estimator("group_relative")).values_N.tolist()  # type: ignore[union-attr]


def test_reinforce_pp_leaves_returns_to_the_learner_and_whitens() -> None:
    advantages = _estimate(_estimator("reinforce_pp"))

    assert (advantages.values_N, advantages.whiten) == (None, True)


def test_reinforce_pp_with_baseline_centers_here_and_whitens_there() -> None:
    advantages = _estimate(_estimator("reinforce_pp_baseline"))

    assert advantages.values_N == pytest.approx([2, -1, -1, 0, 0])
    assert advantages.whiten


def test_estimators_see_rewards_less_the_kl_that_is_in_them() -> None:
    advantages = _estimate(_estimator("group_centered"), [0.0, 0.0, 0.0, 4.0, 5.0])

    assert advantages.values_N == pytest.approx([0, 0, 0, -0.5, 0.5])


@pytest.mark.parametrize("name", ["group_relative", "group_centered", "leave_one_out", "length_weighted"])
def test_of_no_episode_there_is_no_advantage(name: str) -> None:
    advantages = _estimator(name)(np.empty(0), make_graded(REWARDS, GROUPS).take(NONE))

    assert advantages.values_N is not None
    assert advantages.values_N.shape == (0,)


# --- custom estimators ---


def _custom(folder: Path, body: str) -> AdvantageEstimator:
    (folder / "mine.py").write_text(f"import torch\n\ndef own(rewards_N, group_N):\n    {body}\n")
    return _estimator(f"{folder}/mine.py:own")


@pytest.mark.parametrize(
    "body",
    [
        "return rewards_N - group_N",
        "return (rewards_N - group_N).tolist()",
        "return (rewards_N - group_N).numpy()",
        "return (rewards_N.requires_grad_() - group_N).double()",
    ],
)
def test_a_custom_function_gives_anything_that_is_an_array(tmp_path: Path, body: str) -> None:
    advantages = _estimate(_custom(tmp_path, body))

    assert advantages.values_N is not None
    assert advantages.values_N.tolist() == [1.0, -2.0, -2.0, -4.0, -4.0]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return rewards_N[:2]", "shape (2,)"),
        ("return rewards_N[:, None]", "shape (5, 1)"),
        ("return rewards_N.sum()", "shape ()"),
        ("return rewards_N / 0", "not finite"),
        ("return torch.full((5,), float('nan'))", "episode 0"),
        ("raise KeyError('lost')", "KeyError: 'lost'"),
        ("return None", "Error: "),
        ("return 'many'", "Error: "),
    ],
)
def test_a_custom_function_that_is_wrong_is_reported_with_its_key(tmp_path: Path, body: str, complaint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        _estimate(_custom(tmp_path, body))

    assert str(caught.value).startswith(f"algorithm.advantage: {tmp_path}/mine.py:own ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize("parameters", ["rewards_N", "rewards_N, group_N, more", "rewards_N, group_N, *, scale"])
def test_a_function_with_other_parameters_is_reported_before_the_first_step(tmp_path: Path, parameters: str) -> None:
    (tmp_path / "mine.py").write_text(f"def own({parameters}):\n    return rewards_N\n")
    path = f"{tmp_path}/mine.py:own"

    with pytest.raises(RecipeError, match=r"algorithm\.advantage: .*\(rewards_N, group_N\)"):
        _estimator(path)
    assert not plugins.takes(path, "algorithm.advantage", 2)


@pytest.mark.parametrize("parameters", ["rewards_N, group_N", "rewards_N, *others", "rewards_N, group_N, scale=2.0"])
def test_a_function_that_takes_two_arguments_is_an_estimator(tmp_path: Path, parameters: str) -> None:
    (tmp_path / "mine.py").write_text(f"def own({parameters}):\n    return rewards_N\n")

    assert plugins.takes(f"{tmp_path}/mine.py:own", "algorithm.advantage", 2)
    assert _estimate(_estimator(f"{tmp_path}/mine.py:own")).values_N is not None


def test_a_decorator_may_change_the_parameters(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def of_rewards(f):\n    return lambda rewards_N, group_N: f(rewards_N)\n\n"
        "@of_rewards\ndef own(rewards_N):\n    return rewards_N\n"
    )

    assert plugins.takes(f"{tmp_path}/mine.py:own", "algorithm.advantage", 2)
    assert _estimate(_estimator(f"{tmp_path}/mine.py:own")).values_N is not None


def test_a_function_that_is_not_there_is_reported_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def other():\n    pass\n")

    with pytest.raises(RecipeError, match=r"algorithm\.advantage: .*'own'"):
        _estimator(f"{tmp_path}/mine.py:own")


def test_a_custom_function_cannot_change_the_rewards_that_are_recorded(tmp_path: Path) -> None:
    graded = make_graded(REWARDS, GROUPS, lengths=LENGTHS)

    _custom(tmp_path, "return rewards_N.zero_() + group_N.zero_()")(graded.rewards_N, graded)

    assert graded.rewards_N.tolist() == REWARDS
    assert graded.group_N.tolist() == GROUPS


# --- what expert iteration learns from ---


def _kept(graded: GradedRollouts, per_prompt: int, solved_at: float = 1.0) -> list[tuple[int, int]]:
    kept = graded.take(best_solved(graded, solving=Solving(reward=None, at=solved_at), per_prompt=per_prompt))
    return [(id.prompt_index, id.sample) for id in kept.rollouts.rows.ids]


def test_the_best_solved_episodes_of_each_prompt_are_kept() -> None:
    graded = make_graded([1.0, 2.0, 0.5, 3.0, 0.0, 1.0, 1.0], [4, 4, 4, 4, 6, 8, 8], lengths=[1] * 7)

    assert _kept(graded, 1) == [(4, 3), (8, 0)]
    assert _kept(graded, 2) == [(4, 1), (4, 3), (8, 0), (8, 1)]
    assert _kept(graded, 99) == [(4, 0), (4, 1), (4, 3), (8, 0), (8, 1)]
    assert _kept(graded, 1, solved_at=-1.0) == [(4, 3), (6, 0), (8, 0)]


def test_of_equals_the_shorter_is_kept_then_the_first() -> None:
    graded = make_graded([1.0] * 4, [0] * 4, lengths=[3, 2, 5, 2])

    assert _kept(graded, 1) == [(0, 1)]
    assert _kept(graded, 2) == [(0, 1), (0, 3)]
    assert _kept(graded, 3) == [(0, 0), (0, 1), (0, 3)]


def test_the_rewards_stay_with_their_episodes() -> None:
    graded = make_graded([1.0, 4.0, 2.0, 0.0], [1, 1, 5, 5])

    kept = graded.take(best_solved(graded, solving=Solving(reward=None, at=1.0), per_prompt=1))

    assert kept.rewards_N.tolist() == [4.0, 2.0]
    assert kept.rollouts.rows.ids.array_N4[:, :2].tolist() == [[1, 1], [5, 0]]
    assert sorted(kept.rollouts.tasks) == [1, 5]


def test_nothing_solved_is_nothing_kept() -> None:
    assert _kept(make_graded([0.0, 0.9], [0, 1]), 3) == []
    assert _kept(make_graded([0.0], [0]).take(NONE), 3) == []
