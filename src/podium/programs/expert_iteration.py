# SPDX-License-Identifier: Apache-2.0
"""Expert iteration (rejection sampling): the policy imitates its own solved episodes. The controller runs this."""

# N episodes

from __future__ import annotations

import numpy as np

from podium.controller.run import OnPolicyRun
from podium.data.trajectories import Ints
from podium.recipe import ExpertIterationRecipe
from podium.recipe.solving import Solving
from podium.roles.stages import GradedRollouts


async def expert_iteration(run: OnPolicyRun[ExpertIterationRecipe]) -> None:
    """Generates and grades, keeps some solved episodes of each prompt, trains on them like data, and commits."""
    algorithm, solving = run.recipe.algorithm, run.recipe.solving
    async for step in run.steps():
        step = step.keep(best_solved(step.episodes, solving=solving, per_prompt=algorithm.keep_per_prompt))
        batch = step.batch(np.ones(len(step)), mask_truncated=algorithm.mask_truncated)
        report = await run.policy.update(batch, loss="imitation")
        await run.commit(step, batch, policy=report)


def best_solved(graded: GradedRollouts, *, solving: Solving, per_prompt: int) -> Ints:
    """Positions of the best solved episodes of each prompt, at most `per_prompt`. Shorter episodes win ties, then
    earlier ones."""
    rewards_N, group_N = graded.rewards_N, graded.group_N
    lengths_N = graded.rollouts.note.sampled_N
    order = np.lexsort((np.arange(len(graded)), lengths_N, -rewards_N, group_N))
    order = order[graded.solved_N(solving)[order]]
    groups = group_N[order]
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])) if len(groups) else np.empty(0, int)
    place = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    return np.sort(order[place < per_prompt])
