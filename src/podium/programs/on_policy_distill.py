# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: the policy generates, and teachers score each of its tokens. The controller runs this."""

from __future__ import annotations

from podium.controller.run import OnPolicyRun
from podium.recipe import OnPolicyDistillRecipe
from podium.roles.stages import TeacherAdvantages


async def on_policy_distill(run: OnPolicyRun[OnPolicyDistillRecipe]) -> None:
    """The advantage of a token is its log-prob under the teachers minus that under the policy. This is the negative
    reverse KL at the sampled token. Rewards in the recipe are only logged."""
    weights = tuple(teacher.weight for teacher in run.teachers)
    async for step in run.steps():
        if not len(step):  # no episode could be graded
            await run.commit(step)
            continue
        logprobs = tuple([await teacher.logprobs(step) for teacher in run.teachers])
        reference = await run.reference.logprobs(step) if run.reference else None
        advantages = TeacherAdvantages(logprobs=logprobs, weights=weights)
        batch = step.batch(advantages, reference=reference, mask_truncated=run.recipe.algorithm.mask_truncated)
        report = await run.policy.update(batch)
        await run.commit(step, batch, policy=report)
