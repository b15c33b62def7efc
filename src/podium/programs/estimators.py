# SPDX-License-Identifier: Apache-2.0
"""From rewards to the advantage of each episode, by the estimator that the recipe names; pure."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.algorithms import advantages, turn_advantages
from podium.data.trajectories import Ints
from podium.errors import RecipeError, what_raised
from podium.recipe import CustomOnPolicyRecipe, GrpoRecipe, plugins
from podium.roles.carriers import Floats, TurnRewards
from podium.roles.stages import Advantages, GradedRollouts

AdvantageEstimator = Callable[[Floats, GradedRollouts], Advantages]
"""(rewards_N, episodes) -> their advantages. The KL is already subtracted if the recipe has it in the reward."""


def advantage_estimator(recipe: GrpoRecipe | CustomOnPolicyRecipe) -> AdvantageEstimator:
    """The estimator that the recipe names. ppo.py and on_policy_distill.py have those of a critic and of teachers."""
    match recipe.algorithm.credit:
        case "turn":
            return _per_turn(recipe.algorithm.advantage, recipe.algorithm.turn_discount)
        case "branch":
            return _per_branch(recipe.algorithm.advantage)
    match recipe.algorithm.advantage:
        case "group_relative":
            return _per_episode(advantages.group_relative)
        case "group_centered":
            return _per_episode(advantages.group_centered)
        case "leave_one_out":
            return _per_episode(advantages.leave_one_out)
        case "length_weighted":
            return _length_weighted
        case "reinforce_pp":
            return _returns_to_go
        case "reinforce_pp_baseline":
            return _centered_and_whitened
        case plugins.Plugin() as path:
            return _custom(plugins.load(path, "algorithm.advantage"), path)


def _per_episode(estimate: Callable[[Floats, Ints], NDArray[np.float32]]) -> AdvantageEstimator:
    def estimator(rewards_N: Floats, episodes: GradedRollouts) -> Advantages:
        return Advantages(values_N=estimate(rewards_N, episodes.group_N).astype(np.float64))

    return estimator


def _per_turn(name: str | plugins.Plugin, discount: float) -> AdvantageEstimator:
    """Returns of turns, compared over all turns of a group. The recipe allows no other name."""

    def returns(turns: TurnRewards) -> tuple[Floats, Floats | None]:
        if not turns.is_tree:
            return turn_advantages.turn_returns(turns.reward_K, turns.row_K, discount=discount), None
        parent_K = turns.parent_turns_K
        weight_K = turn_advantages.turn_weights(parent_K, turns.row_K)
        returns_K = turn_advantages.turn_returns(turns.reward_K, turns.row_K, discount=discount, parent_K=parent_K)
        return returns_K, weight_K

    return _compared(name, returns)


def _per_branch(name: str | plugins.Plugin) -> AdvantageEstimator:
    """Returns of whole branches, each compared by its fraction with all branches of a group."""

    def returns(turns: TurnRewards) -> tuple[Floats, Floats | None]:
        parent_K = turns.parent_turns_K
        fraction_K = turn_advantages.branch_fractions(parent_K, turns.row_K)
        return turn_advantages.branch_returns(turns.reward_K, parent_K), fraction_K

    return _compared(name, returns)


def _compared(
    name: str | plugins.Plugin, returns: Callable[[TurnRewards], tuple[Floats, Floats | None]]
) -> AdvantageEstimator:
    """Advantages of turns. `returns`: what each turn is compared by, and its weight in the mean of its episode."""
    compare = {
        "group_relative": turn_advantages.turn_relative,
        "group_centered": turn_advantages.turn_centered,
        "leave_one_out": turn_advantages.turn_leave_one_out,
        "reinforce_pp_baseline": turn_advantages.turn_centered,
    }[str(name)]

    def estimator(rewards_N: Floats, episodes: GradedRollouts) -> Advantages:
        turns = turns_with_final_rewards(rewards_N, episodes.rollouts.note.turn_rewards)
        returns_K, weight_K = returns(turns)
        values_K = compare(returns_K, turns.row_K, episodes.group_N, weight_K)
        whiten = name == "reinforce_pp_baseline"
        return Advantages(values_N=None, turns=replace(turns, reward_K=values_K), whiten=whiten)

    return estimator


def turns_with_final_rewards(rewards_N: Floats, turns: TurnRewards) -> TurnRewards:
    """The rewards of all turns, by row: what an episode's reward has beside those of its turns belongs to the last one;
    if turns branch, to the last one of every branch. An episode without an answer counts as one turn without tokens."""
    count = len(rewards_N)
    without = np.flatnonzero(np.bincount(turns.row_K, minlength=count) == 0)
    added = TurnRewards(row_K=without, token_K=np.full(len(without), -1), reward_K=np.zeros(len(without)))
    every = TurnRewards.concatenate([(turns, 0), (added, 0)]).by_row()
    rest_N = rewards_N - np.bincount(turns.row_K, turns.reward_K, minlength=count)
    reward_K = every.reward_K.copy()
    if every.is_tree:
        ends_K = turn_advantages.ends_of_branches(every.parent_turns_K)
        reward_K[ends_K] += rest_N[every.row_K[ends_K]]
    else:
        last_N = np.searchsorted(every.row_K, np.arange(count), side="right") - 1
        reward_K[last_N] += rest_N
    return replace(every, reward_K=reward_K)


def _length_weighted(rewards_N: Floats, episodes: GradedRollouts) -> Advantages:
    values_N = advantages.length_weighted(rewards_N, episodes.group_N, episodes.rollouts.note.sampled_N)
    return Advantages(values_N=values_N.astype(np.float64))


def _returns_to_go(rewards_N: Floats, episodes: GradedRollouts) -> Advantages:
    """The learner computes the returns, because they are per token."""
    return Advantages(values_N=None, whiten=True)


def _centered_and_whitened(rewards_N: Floats, episodes: GradedRollouts) -> Advantages:
    centered_N = advantages.group_centered(rewards_N, episodes.group_N)
    return Advantages(values_N=centered_N.astype(np.float64), whiten=True)


def _custom(function: Callable[..., Any], path: str) -> AdvantageEstimator:
    """The user's function takes and gives tensors: only here the controller needs torch."""
    import torch

    with contextlib.suppress(ValueError):  # a function without a signature is called as it is
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise RecipeError(f"algorithm.advantage: {path} takes (rewards_N, group_N): {error}.") from error

    def estimator(rewards_N: Floats, episodes: GradedRollouts) -> Advantages:
        try:
            rewards, groups = torch.from_numpy(rewards_N.astype(np.float64)), torch.from_numpy(episodes.group_N.copy())
            values_N = torch.as_tensor(function(rewards, groups)).double()
        except Exception as error:  # the user's code
            raise RecipeError(f"algorithm.advantage: {path} {what_raised(error)}.") from error
        if values_N.shape != rewards_N.shape:
            raise RecipeError(
                f"algorithm.advantage: {path} gave shape {tuple(values_N.shape)} for {len(rewards_N)} episodes. It "
                "takes (rewards_N, group_N) and gives one advantage for each episode."
            )
        if not torch.isfinite(values_N).all():
            first = int((~torch.isfinite(values_N)).nonzero()[0])
            raise RecipeError(
                f"algorithm.advantage: {path} gave {float(values_N[first])} for episode {first}, which is not finite."
            )
        return Advantages(values_N=values_N.detach().numpy())

    return estimator
