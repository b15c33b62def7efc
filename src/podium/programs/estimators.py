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
    if recipe.algorithm.credit == "turn":
        return _per_turn(recipe.algorithm.advantage, recipe.algorithm.turn_discount)
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
    compare = {
        "group_relative": turn_advantages.turn_relative,
        "group_centered": turn_advantages.turn_centered,
        "leave_one_out": turn_advantages.turn_leave_one_out,
        "reinforce_pp_baseline": turn_advantages.turn_centered,
    }[str(name)]

    def estimator(rewards_N: Floats, episodes: GradedRollouts) -> Advantages:
        turns = turns_with_final_rewards(rewards_N, episodes.rollouts.note.turn_rewards)
        returns_K = turn_advantages.turn_returns(turns.reward_K, turns.row_K, discount=discount)
        values_K = compare(returns_K, turns.row_K, episodes.group_N)
        whiten = name == "reinforce_pp_baseline"
        return Advantages(values_N=None, turns=replace(turns, reward_K=values_K), whiten=whiten)

    return estimator


def turns_with_final_rewards(rewards_N: Floats, turns: TurnRewards) -> TurnRewards:
    """The rewards of all turns, by row: what an episode's reward has beside those of its turns belongs to the last one.
    An episode without an answer counts as one turn without tokens."""
    count = len(rewards_N)
    without = np.flatnonzero(np.bincount(turns.row_K, minlength=count) == 0)
    added = TurnRewards(row_K=without, token_K=np.full(len(without), -1), reward_K=np.zeros(len(without)))
    every = TurnRewards.concatenate([(turns, 0), (added, 0)]).by_row()
    last_N = np.searchsorted(every.row_K, np.arange(count), side="right") - 1
    reward_K = every.reward_K.copy()
    reward_K[last_N] += rewards_N - np.bincount(turns.row_K, turns.reward_K, minlength=count)
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
