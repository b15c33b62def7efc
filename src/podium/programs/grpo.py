# SPDX-License-Identifier: Apache-2.0
"""GRPO and its relatives: episodes of one prompt are compared with each other. The controller runs this.

Dr.GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++ and OPO are this program with another estimator, loss or reduction in the
recipe (docs/methods.md).
"""

# N episodes

from __future__ import annotations

import math

from podium.controller.run import OnPolicyRun
from podium.controller.step import Step
from podium.programs.estimators import advantage_estimator
from podium.recipe import GrpoRecipe


async def grpo(run: OnPolicyRun[GrpoRecipe]) -> None:
    """Generates and grades, compares within groups, updates the policy, commits."""
    algorithm, estimate = run.recipe.algorithm, advantage_estimator(run.recipe)
    async for step in run.steps():
        if algorithm.dynamic_sampling:
            step = await resample_uniform_groups(run, step)
        reference = await run.reference.logprobs(step) if run.reference else None
        advantages = estimate(step.rewards_less_kl(reference), step.episodes)
        batch = step.batch(advantages, reference=reference, mask_truncated=algorithm.mask_truncated)
        report = await run.policy.update(batch)
        await run.commit(step, batch, policy=report)


async def resample_uniform_groups(run: OnPolicyRun[GrpoRecipe], step: Step) -> Step:
    """DAPO's dynamic sampling. Groups whose rewards are all equal have no advantage, so other prompts replace them, for
    at most `algorithm.max_refills` [4] rounds."""
    num_wanted = run.recipe.rollout.prompts_per_step
    step = step.keep(~step.episodes.uniform_N)
    for _ in range(run.recipe.algorithm.num_refills):
        num_missing = num_wanted - step.num_groups
        if num_missing <= 0:
            break
        # Enough to fill the step if the share of informative groups stays the same; four times the gap at most.
        share = max(0.25, step.num_groups / max(1, step.num_sampled_groups))
        more = await run.sample(step, num_prompts=math.ceil(num_missing / share))
        step = step.add(more, ~more.uniform_N)
    return step.first_groups(num_wanted)
