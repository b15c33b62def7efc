# SPDX-License-Identifier: Apache-2.0
"""Expert iteration (rejection sampling): what the policy solved it imitates. The controller runs this."""

from __future__ import annotations

from podium.controller.expert import solved_episodes
from podium.controller.run import OnPolicyRun
from podium.recipe import ExpertIterationRecipe


async def expert_iteration(run: OnPolicyRun[ExpertIterationRecipe]) -> None:
    """Generate, keep some of the solved episodes of each prompt, train on them like on data, and go on."""
    async for rollouts in run.rollouts():
        graded = await run.grade(rollouts)
        kept = solved_episodes(
            graded, solved_at=run.recipe.grading.solved_at, per_prompt=run.recipe.algorithm.keep_per_prompt
        )
        scored = await run.score(kept)
        report = await run.update(scored.with_advantages(kept.rewards_N * 0 + 1), imitate=True)
        await run.publish(kept, report)
