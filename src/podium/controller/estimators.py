# SPDX-License-Identifier: Apache-2.0
"""From rewards to the advantage of each episode, by the estimator that the recipe names; pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.algorithms import advantages
from podium.errors import RecipeError
from podium.recipe import CustomOnPolicyRecipe, GrpoRecipe, plugins
from podium.roles.stages import ScoredRollouts, TrainBatch

ComputeAdvantages = Callable[[ScoredRollouts], TrainBatch]


def advantage_estimator(recipe: GrpoRecipe | CustomOnPolicyRecipe) -> ComputeAdvantages:
    """The recipe's estimator for episodes. Those that need a critic or a teacher are their programs' own."""
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
            return _own(plugins.load(path, "algorithm.advantage"), path)


def _tensors(scored: ScoredRollouts) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(scored.rewards_N.astype(np.float64)), torch.from_numpy(scored.group_N.copy())


def _per_episode(estimate: Callable[[Tensor, Tensor], Tensor]) -> ComputeAdvantages:
    def compute_advantages(scored: ScoredRollouts) -> TrainBatch:
        return scored.with_advantages(estimate(*_tensors(scored)).double().numpy())

    return compute_advantages


def _length_weighted(scored: ScoredRollouts) -> TrainBatch:
    lengths_N = torch.from_numpy(scored.graded.rollouts.note.sampled_N.astype(np.float32))
    return scored.with_advantages(advantages.length_weighted(*_tensors(scored), lengths_N).double().numpy())


def _returns_to_go(scored: ScoredRollouts) -> TrainBatch:
    """The learner makes the returns: they are of tokens."""
    return TrainBatch(scored=scored, whiten=True)


def _centered_and_whitened(scored: ScoredRollouts) -> TrainBatch:
    centered_N = advantages.group_centered(*_tensors(scored)).double().numpy()
    return TrainBatch(scored=scored, advantages_N=centered_N, whiten=True)


def _own(function: Callable[..., Any], path: str) -> ComputeAdvantages:
    def compute_advantages(scored: ScoredRollouts) -> TrainBatch:
        rewards_N, group_N = _tensors(scored)
        try:
            found = torch.as_tensor(function(rewards_N, group_N)).double()
        except Exception as error:  # the user's code
            raise RecipeError(f"algorithm.advantage: {path} raised {type(error).__name__}: {error}.") from error
        if found.shape != rewards_N.shape or not torch.isfinite(found).all():
            raise RecipeError(
                f"algorithm.advantage: {path} gave {tuple(found.shape)} values for {len(rewards_N)} episodes, or one "
                "that is not finite. It takes (rewards_N, group_N) and gives one advantage for each episode."
            )
        return scored.with_advantages(found.detach().numpy())

    return compute_advantages
