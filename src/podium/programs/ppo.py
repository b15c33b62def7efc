# SPDX-License-Identifier: Apache-2.0
"""PPO: a critic estimates the value of every token, which gives each token an advantage. The controller runs this."""

from __future__ import annotations

from podium.controller.run import OnPolicyRun
from podium.recipe import PpoRecipe


async def ppo(run: OnPolicyRun[PpoRecipe]) -> None:
    """Trains only the critic for `critic.warmup_steps`, then policy and critic on the same batch."""
    algorithm, critic = run.recipe.algorithm, run.critic
    assert critic is not None, "the layout of ppo has a critic"
    async for step in run.steps():
        if not len(step):  # no episode could be graded
            await run.commit(step)
            continue
        reference = await run.reference.logprobs(step) if run.reference else None
        advantages = await critic.advantages(step, reference)
        batch = step.batch(advantages, reference=reference)
        critic_report = await critic.update(batch)
        policy_report = None
        if step.number > run.recipe.critic.warmup_steps:
            batch = batch.without_truncated() if algorithm.mask_truncated else batch
            policy_report = await run.policy.update(batch)
        await run.commit(step, batch, policy=policy_report, critic=critic_report)
