# SPDX-License-Identifier: Apache-2.0
"""Generates and grades episodes with the newest weights. Generators answer prompts, or episode runners play them."""

from __future__ import annotations

from collections.abc import Sequence

from podium.cluster import ObjectScope
from podium.controller.devices import Devices
from podium.controller.grading import HeldoutScores, grade_rollouts, heldout_scores, without_failed
from podium.controller.parts import OnPolicyParts
from podium.controller.state import RunState
from podium.data.tasks import IndexedTask
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import SamplingPlan
from podium.roles.episode_stream import run_all
from podium.roles.stages import GradedRollouts, Rollouts


def training_sampling(recipe: OnPolicyRecipe) -> SamplingPlan:
    """How episodes to train on are sampled."""
    rollout = recipe.rollout
    return SamplingPlan(
        max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, top_p=rollout.top_p,
        top_k=rollout.top_k, min_p=rollout.min_p, stop=rollout.stop, seed=recipe.run.seed,
    )  # fmt: skip


class Episodes:
    """Generates and grades, for steps and for evaluations. Waits for generators and graders, which have their own
    deadlines."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, state: RunState) -> None:
        self._parts, self._devices, self._state = parts, devices, state
        self._sampling = training_sampling(parts.recipe)

    async def sample(self, num_prompts: int, step: int, objects: ObjectScope) -> GradedRollouts:
        """Takes the next prompts of the data and returns a group of graded episodes for each."""
        prompts = self._parts.prompts.take(num_prompts)
        samples = self._parts.recipe.rollout.samples_per_prompt
        return await self._grade(await self.generate(prompts, samples, self._sampling, step, objects))

    async def generate(
        self, prompts: Sequence[IndexedTask], samples: int, sampling: SamplingPlan, step: int, objects: ObjectScope
    ) -> Rollouts:
        """Generates episodes for these prompts. Publishes the newest weights to generators first, if needed."""
        roles, version = self._parts.roles, self._state.version
        await self._devices.publish(version)
        async with self._devices.phase("rollout"):
            blocks, metrics = await run_all(roles.episode_workers, prompts, samples, sampling)
        tasks = {prompt.prompt_index: prompt.task for prompt in prompts}
        rollouts = Rollouts.of(blocks, tasks, step=step, version=version, metrics=metrics)
        objects.hold(rollouts.rows)
        return rollouts

    async def score_heldout(self, rollouts: Rollouts, *, show: int) -> HeldoutScores:
        """Scores held-out answers. Answers that cannot be graded are reported and have no score."""
        async with self._devices.phase("grade"):
            scores = await heldout_scores(rollouts, self._parts.recipe, self._parts.roles, show=show)
        if scores.num_errors:
            self._parts.log.console.warning(
                f"{scores.num_errors} of {len(rollouts)} held-out answers have no score: {scores.first_error}"
            )
        return scores

    async def _grade(self, rollouts: Rollouts) -> GradedRollouts:
        """Returns the rewards of all episodes. Handles episodes that cannot be graded as grading.on_error says."""
        parts = self._parts
        # Reward models need their devices first; reward functions need none.
        phase = self._devices.phase if parts.roles.reward_models else self._devices.beside
        async with phase("grade"):
            everything, errors = await grade_rollouts(
                rollouts, parts.recipe, parts.roles.grader, parts.roles.reward_models
            )
        return without_failed(everything, errors, parts.recipe.grading, parts.log.console.warning)
