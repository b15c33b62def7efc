# SPDX-License-Identifier: Apache-2.0
"""PPO: a critic says of every token whether the episode went better than expected. The controller runs this."""

from __future__ import annotations

from podium.controller.run import OnPolicyRun
from podium.recipe import PpoRecipe


async def ppo(run: OnPolicyRun[PpoRecipe]) -> None:
    """The critic learns first and alone for its warm-up; then policy and critic learn from the same batch."""
    async for rollouts in run.rollouts():
        graded = await run.grade(rollouts)
        scored = await run.score(graded)
        train_batch = await run.estimate(scored)
        await run.update_critic(train_batch)
        report = None if run.in_critic_warmup else await run.update(train_batch)
        await run.publish(graded, report)
