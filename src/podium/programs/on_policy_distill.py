# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: the policy answers, and teachers say of each of its tokens how likely they find it."""

from __future__ import annotations

from podium.controller.run import OnPolicyRun
from podium.recipe import OnPolicyDistillRecipe


async def on_policy_distill(run: OnPolicyRun[OnPolicyDistillRecipe]) -> None:
    """The advantage of a token is its log-prob under the teachers less that under the policy: the negative of the
    reverse KL at the sampled token. Rewards, where the recipe has some, are only logged."""
    async for rollouts in run.rollouts():
        graded = await run.grade(rollouts)
        report = await run.update(await run.teach(graded))
        await run.publish(graded, report)
