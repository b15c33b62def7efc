# SPDX-License-Identifier: Apache-2.0
"""Calls that a program can make on the roles of its run. Each call enters the role's phase and splits its arguments
over the role's ranks."""

from __future__ import annotations

import asyncio
from typing import Literal

import numpy as np

from podium.cluster import RowRefs
from podium.controller.devices import Devices
from podium.controller.parts import OnPolicyParts
from podium.controller.state import RunState
from podium.controller.step import Step
from podium.data.trajectories import TokenColumn
from podium.errors import ProgramError
from podium.recipe import KlSection, OnPolicyRecipe
from podium.roles.carriers import DistanceNote, Floats, UpdatePlan
from podium.roles.handles import CriticHandle, ScorerHandle
from podium.roles.stages import (
    Advantages,
    CriticReport,
    ReferenceLogprobs,
    TokenAdvantages,
    TrainBatch,
    UpdateReport,
)


class PolicyRole:
    """The model being trained."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, state: RunState) -> None:
        self._parts, self._devices, self._state = parts, devices, state

    async def update(
        self, batch: TrainBatch, *, loss: Literal["policy", "imitation"] = "policy"
    ) -> UpdateReport | None:
        """Runs all optimizer steps of a batch: `algorithm.epochs` times `algorithm.mini_batches`. The loss is the
        recipe's (`algorithm.loss`; the formula: roles/policy_objective.py). With `imitation` it is the negative
        log-likelihood of every trained token, and advantages are not used. Returns None if the batch is empty."""
        if not len(batch):
            return None
        recipe, advantages = self._parts.recipe, batch.advantages
        if recipe.full_algorithm.kl is not None and batch.reference is None:
            raise ProgramError(
                "the recipe has algorithm.kl, and the batch has no reference. Write reference = await "
                "run.reference.logprobs(step), and step.batch(advantages, reference=reference)."
            )
        self._state.updated_steps.add(batch.step)
        self._state.updated_roles.add("policy")
        plan = UpdatePlan(
            step=batch.step,
            lr=batch.lr,
            algorithm=recipe.full_algorithm,
            temperature=recipe.rollout.temperature,
            versions=tuple(self._state.versions[-recipe.rollout.staleness - 1 :]),
            max_new_tokens=recipe.rollout.max_new_tokens,
            kl_coefficient=batch.kl_coefficient,
            whitening=advantages.whitening if isinstance(advantages, TokenAdvantages) else None,
            whiten=isinstance(advantages, Advantages) and advantages.whiten,
            loss=loss,
            is_truncated=bool(recipe.rollout.truncated_by),
            keeps_cache=recipe.rollout.staleness > 0 and recipe.rollout.on_new_weights == "keep",
        )
        async with self._devices.phase("update"):
            learning = asyncio.create_task(self._parts.roles.policy.update(batch, plan, seed=recipe.run.seed))
            await asyncio.sleep(0)  # the learners' call is sent first
            if batch.step < recipe.steps and not recipe.keeps_generating:  # else they are taken as there is room
                self._parts.prompts.take_ahead(recipe.rollout.prompts_per_step)
            return await learning


class ReferenceRole:
    """The model that the KL term compares the policy with: a separate role, or the policy without its adapter."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, kl: KlSection) -> None:
        self._parts, self._devices, self._kl = parts, devices, kl

    async def logprobs(self, step: Step) -> ReferenceLogprobs | None:
        """Log-probs of the step's sampled tokens; None if the step has no episodes."""
        if not len(step):
            return None
        rows, temperature = step.rollouts.rows, self._parts.recipe.rollout.temperature
        roles = self._parts.roles
        async with self._devices.phase("score"):
            if roles.reference is not None:
                logprobs, distance = await roles.reference.score(rows, temperature)
            else:
                logprobs, distance = await roles.policy.score(rows, temperature, base=True)
        return ReferenceLogprobs(
            logprobs=step.hold(logprobs), distance=distance, penalty_N=self._penalty_N(step, distance)
        )

    def _penalty_N(self, step: Step, distance: DistanceNote) -> Floats:
        if self._kl.where != "reward":
            return np.zeros(len(step))
        by_name = {"k1": distance.k1_N, "k2": distance.k2_N, "k3": distance.k3_N}
        return step.kl_coefficient * by_name[self._kl.estimator or "k1"]


class TeacherRole:
    """A model that the policy is distilled from."""

    def __init__(
        self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, scorer: ScorerHandle, weight: float
    ) -> None:
        self._parts, self._devices, self._scorer = parts, devices, scorer
        self.weight = weight  # its share of all teachers' weights

    async def logprobs(self, step: Step) -> RowRefs[TokenColumn]:
        """Log-probs of the step's sampled tokens, by reference."""
        if not len(step):
            raise ProgramError(f"step {step.number} has no episodes to score. Look at len(step) first.")
        async with self._devices.phase("score"):
            logprobs, _ = await self._scorer.score(step.rollouts.rows, self._parts.recipe.rollout.temperature)
        return step.hold(logprobs)


class CriticRole:
    """PPO's value model."""

    def __init__(
        self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, state: RunState, handle: CriticHandle
    ) -> None:
        self._parts, self._devices, self._state, self._handle = parts, devices, state, handle

    async def advantages(self, step: Step, reference: ReferenceLogprobs | None) -> TokenAdvantages:
        """Advantages (GAE) and returns of every token, whitened over the whole step."""
        if not len(step):
            raise ProgramError(f"step {step.number} has no episodes to score. Look at len(step) first.")
        episodes, rollouts = step.episodes, step.rollouts
        async with self._devices.phase("score"):
            columns, moments = await self._handle.estimate(
                rollouts.rows, episodes.last_token_rewards_N, episodes.token_turn_rewards,
                None if reference is None else reference.logprobs, self._parts.recipe.full_algorithm,
                step.kl_coefficient,
            )  # fmt: skip
        whitening = moments.whitening()
        return TokenAdvantages(columns=step.hold(columns), whitening=(whitening.shift, whitening.scale))

    async def update(self, batch: TrainBatch) -> CriticReport:
        """Trains the critic on the returns."""
        if not isinstance(batch.advantages, TokenAdvantages):
            raise ProgramError(
                "the critic learns its own returns. Give step.batch the result of run.critic.advantages."
            )
        recipe, section = self._parts.recipe, self._parts.recipe.critic_section
        assert section is not None, "a recipe with this role has its section"
        # A critic of another model may not share prefixes: its micro-batches must hold whole episodes.
        prefixes = batch.rollouts.note.prefixes if section.path is None else None
        lr = batch.lr * (section.lr or recipe.optimizer.lr) / recipe.optimizer.lr
        self._state.updated_roles.add("critic")
        async with self._devices.phase("update"):
            return await self._handle.update(
                batch.rollouts.rows, batch.advantages.columns, recipe.full_algorithm, lr=lr, step=batch.step,
                seed=recipe.run.seed, prefixes=prefixes,
            )  # fmt: skip
