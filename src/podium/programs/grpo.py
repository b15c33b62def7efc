# SPDX-License-Identifier: Apache-2.0
"""GRPO and its relatives: episodes of one prompt are compared with each other. The controller runs this.

Dr.GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++ and OPO are this program with another estimator, loss or reduction in the
recipe (docs/methods.md).
"""

from __future__ import annotations

from podium.controller.estimators import advantage_estimator
from podium.controller.run import OnPolicyRun
from podium.recipe import GrpoRecipe


async def grpo(run: OnPolicyRun[GrpoRecipe]) -> None:
    """Generate, grade, compare, learn, publish: one optimizer update per batch of episodes, or several."""
    compute_advantages = advantage_estimator(run.recipe)
    async for rollouts in run.rollouts():
        graded = await run.grade(rollouts)
        if run.recipe.algorithm.dynamic_sampling:
            graded = await run.refill(graded)
        scored = await run.score(graded)
        report = await run.update(compute_advantages(scored))
        await run.publish(graded, report)
