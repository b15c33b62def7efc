# SPDX-License-Identifier: Apache-2.0
"""GRPO and its relatives: episodes of one prompt are compared with each other. The controller runs this.

Dr.GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++ and OPO are this program with another estimator, loss or reduction in the
recipe (docs/methods.md). With `algorithm.dynamic_sampling`, steps have no groups whose rewards are all equal.
"""

from __future__ import annotations

from podium.controller.run import OnPolicyRun
from podium.programs.estimators import advantage_estimator
from podium.recipe import GrpoRecipe


async def grpo(run: OnPolicyRun[GrpoRecipe]) -> None:
    """Generates and grades, compares within groups, updates the policy, commits."""
    algorithm, estimate = run.recipe.algorithm, advantage_estimator(run.recipe)
    async for step in run.steps():
        reference = await run.reference.logprobs(step) if run.reference else None
        advantages = estimate(step.rewards_less_kl(reference), step.episodes)
        batch = step.batch(advantages, reference=reference, mask_truncated=algorithm.mask_truncated)
        report = await run.policy.update(batch)
        await run.commit(step, batch, policy=report)
