# SPDX-License-Identifier: Apache-2.0
"""OnPolicyRun: what a controlled program is given. It draws prompts, moves references between roles, decides who holds
which device in which phase, and records every step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Generic

import numpy as np

from podium.algorithms.kl import adaptive_coefficient
from podium.cluster import RowRefs, Step
from podium.controller.devices import Devices
from podium.controller.evaluation import Evaluation, drawn, summarise
from podium.controller.grading import HeldoutScores, graded, heldout_scores, without_failed
from podium.controller.parts import Parts, Progress, RecipeT_co
from podium.controller.step_log import StepLog
from podium.data.tasks import DrawnTask, Task
from podium.data.trajectories import RowsT
from podium.engine.schedule import learning_rate
from podium.roles.carriers import SamplingPlan, UpdatePlan
from podium.roles.interfaces import POLICY
from podium.roles.stages import (
    CriticReport,
    GradedRollouts,
    Rollouts,
    ScoredRollouts,
    TrainBatch,
    UpdateReport,
)


class OnPolicyRun(Generic[RecipeT_co]):
    """A program awaits its methods in the order of its method; each is a phase."""

    def __init__(self, parts: Parts[RecipeT_co], progress: Progress) -> None:
        self._parts, self.recipe = parts, parts.recipe
        self.policy, self.critic, self.teachers = parts.roles.policy, parts.roles.critic, parts.roles.teachers
        self._devices, self._log = Devices(parts), StepLog(parts, progress)
        self._step = self._saved_step = progress.step
        self._version = progress.step if progress.version is None else progress.version
        self._algorithm = parts.recipe.full_algorithm
        kl = self._algorithm.kl
        self._kl = progress.kl_coefficient if progress.kl_coefficient is not None else (kl.coefficient if kl else 0.0)
        self._objects: Step | None = None
        self._graded: GradedRollouts | None = None
        self._scored: ScoredRollouts | None = None
        self._critic_report: CriticReport | None = None
        self._learned: GradedRollouts | None = None  # what an update was made of
        self._evaluation: Evaluation | None = None
        self._evaluated_step: int | None = None

    # --- what programs await ---

    async def rollouts(self) -> AsyncIterator[Rollouts]:
        """A batch of finished episodes for every step still to do, drawn by the newest weights. Ends when the steps are
        done or a stop was asked for; waits for generators, which have a deadline of their own."""
        if self._step == 0 and self.recipe.evaluation.at_start:
            await self._evaluate()
        self._log.mark()
        while self._step < self.recipe.steps and not self._parts.stop_requested():
            number = self._step + 1
            with self._parts.cluster.step(number) as objects:
                self._objects = objects
                self._graded = self._scored = self._critic_report = self._learned = None
                yield await self._generate(self._parts.prompts.take(self.recipe.rollout.prompts_per_step), number)
                assert self._step == number, "a program publishes every step that it is given"
        await self._finish()

    async def grade(self, rollouts: Rollouts) -> GradedRollouts:
        """Rewards of all episodes. What cannot be graded is dealt with as the recipe says."""
        # Reward models need their devices first; functions have none.
        phase = self._devices.phase if self._parts.roles.reward_models else self._devices.beside
        async with phase("grade"):
            everything, failed_N = await graded(rollouts, self.recipe, self._parts.roles)
        found = without_failed(everything, failed_N, self.recipe.grading, self._parts.console.warning)
        self._graded = found if self._graded is None else GradedRollouts.join([self._graded, found])
        return found

    async def refill(self, graded: GradedRollouts) -> GradedRollouts:
        """Dynamic sampling: groups of equal rewards are left out, and other prompts are drawn in their place, for as
        many rounds as the recipe allows."""
        wanted = self.recipe.rollout.prompts_per_step
        kept = graded.take(np.flatnonzero(~graded.uniform_N))
        for _ in range(self._algorithm.num_refills):
            missing = wanted - len(np.unique(kept.group_N))
            if missing <= 0:
                break
            # As many as would fill the step if as many were informative as so far, within a factor of four.
            seen = self._graded
            assert seen is not None
            share = max(0.25, len(np.unique(kept.group_N)) / max(1, len(np.unique(seen.group_N))))
            more = await self._generate(self._parts.prompts.take(int(np.ceil(missing / share))), self._step + 1)
            fresh = await self.grade(more)
            kept = GradedRollouts.join([kept, fresh.take(np.flatnonzero(~fresh.uniform_N))])
        chosen = np.unique(kept.group_N)[:wanted]
        return kept.take(np.flatnonzero(np.isin(kept.group_N, chosen)))

    async def score(self, graded: GradedRollouts) -> ScoredRollouts:
        """What the reference says of the episodes' tokens; without a KL term there is nothing to ask."""
        kl, reference = self._algorithm.kl, self._parts.roles.reference
        if kl is None or not len(graded):
            self._scored = ScoredRollouts(graded=graded)
            return self._scored
        rows, temperature = graded.rollouts.rows, self.recipe.rollout.temperature
        async with self._devices.phase("score"):
            if reference is not None:
                found, distance = await reference.score(rows, temperature)
            else:  # the policy with its adapter switched off
                found, distance = await self.policy.score(rows, temperature, base=True)
        column = self._hold(found)
        penalty_N = None
        if kl.where == "reward":
            by_name = {"k1": distance.k1_N, "k2": distance.k2_N, "k3": distance.k3_N}
            penalty_N = self._kl * by_name[kl.estimator or "k1"]
        self._scored = ScoredRollouts(graded=graded, reference=column, distance=distance, penalty_N=penalty_N)
        return self._scored

    async def teach(self, graded: GradedRollouts) -> TrainBatch:
        """On-policy distillation: the teachers' log-probs less the policy's own, token by token, as advantages."""
        if not len(graded):
            return ScoredRollouts(graded=graded).with_advantages(graded.rewards_N)
        async with self._devices.phase("score"):
            weights = np.array([teacher.weight for teacher in self.recipe.teacher_sections])
            columns = [
                (await teacher.score(graded.rollouts.rows, self.recipe.rollout.temperature))[0]
                for teacher in self.teachers
            ]
            held = [self._hold(column) for column in columns]
        scored = await self.score(graded)
        return TrainBatch(scored=scored, teachers=tuple(zip(held, (weights / weights.sum()).tolist(), strict=True)))

    async def estimate(self, scored: ScoredRollouts) -> TrainBatch:
        """PPO: the critic's advantages and returns of each token, whitened over the whole step."""
        assert self.critic is not None
        graded = scored.graded
        if not len(graded):
            return scored.with_advantages(graded.rewards_N)
        async with self._devices.phase("score"):
            columns, moments = await self.critic.estimate(
                graded.rollouts.rows, graded.last_token_rewards_N, graded.rollouts.note.turn_rewards, scored.reference,
                self._algorithm, self._kl,
            )  # fmt: skip
        whitening = moments.whitening()
        return TrainBatch(scored=scored, columns=self._hold(columns), whitening=(whitening.shift, whitening.scale))

    async def update_critic(self, train_batch: TrainBatch) -> None:
        """The critic learns the returns."""
        recipe, section = self.recipe, self.recipe.critic_section
        assert self.critic is not None
        assert section is not None
        if not len(train_batch.rollouts.rows):
            return
        lr = self._lr * (section.lr or recipe.optimizer.lr) / recipe.optimizer.lr
        async with self._devices.phase("update"):
            self._critic_report = await self.critic.update(
                train_batch.rollouts.rows, train_batch.value_columns, self._algorithm, lr=lr, step=self._step + 1,
                seed=recipe.run.seed,
            )  # fmt: skip

    async def update(self, train_batch: TrainBatch, *, imitate: bool = False) -> UpdateReport | None:
        """All optimizer steps of this batch; None where there is nothing to learn from."""
        recipe = self.recipe
        if self._algorithm.mask_truncated:
            train_batch = train_batch.take(np.flatnonzero(~train_batch.rollouts.truncated_N))
        self._learned = train_batch.scored.graded
        if not len(train_batch.rollouts.rows):
            return None
        plan = UpdatePlan(
            step=self._step + 1,
            lr=self._lr,
            algorithm=self._algorithm,
            temperature=recipe.rollout.temperature,
            version=self._version,
            max_new_tokens=recipe.rollout.max_new_tokens,
            kl_coefficient=self._kl,
            whitening=train_batch.whitening,
            whiten=train_batch.whiten,
            loss="imitation" if imitate else "policy",
        )
        async with self._devices.phase("update"):
            learning = asyncio.create_task(self.policy.update(train_batch, plan, seed=recipe.run.seed))
            await asyncio.sleep(0)  # the learners are told first
            if self._step + 1 < recipe.steps:
                self._parts.prompts.draw_ahead(recipe.rollout.prompts_per_step)
            return await learning

    async def publish(self, used: GradedRollouts, report: UpdateReport | None) -> None:
        """Closes the step: the weights of this moment are its version. Records it, and saves and evaluates when due."""
        self._step += 1
        if report is not None:
            self._version = self._step
        kl, reference = self._algorithm.kl, self._parts.roles.reference
        if kl is not None and kl.refresh_every and self._step % kl.refresh_every == 0 and reference is not None:
            async with self._devices.phase("refresh"):
                await reference.copy_from(POLICY)
        assert self._graded is not None
        learned = used if self._learned is None else self._learned
        await self._log.record(
            self._step, graded=self._graded, used=learned, scored=self._scored, report=report,
            critic=self._critic_report, kl_coefficient=self._kl if kl is not None else None,
        )  # fmt: skip
        self._adapt_kl()
        save = _is_due(self.recipe.checkpoint.every, self._step)
        evaluate = _is_due(self.recipe.evaluation.every, self._step) and bool(self._parts.heldout)
        if save:
            await self._save()
        if evaluate:
            await self._evaluate()
        if save or evaluate:
            self._log.mark()

    def _adapt_kl(self) -> None:
        """After the step, so that all of it had one coefficient."""
        kl, distance = self._algorithm.kl, self._scored.distance if self._scored is not None else None
        if kl is not None and kl.target is not None and distance is not None and distance.tokens_N.sum():
            observed = float(distance.k3_N.sum()) / float(distance.tokens_N.sum())
            self._kl = adaptive_coefficient(
                self._kl, observed, target=kl.target, horizon=kl.horizon_episodes, count=len(distance.tokens_N)
            )

    @property
    def in_critic_warmup(self) -> bool:
        critic = self.recipe.critic_section
        return critic is not None and self._step < critic.warmup_steps

    # --- held-out prompts ---

    async def answer_heldout(self, tasks: Sequence[Task], samples: int, plan: SamplingPlan) -> Rollouts:
        """Episodes of held-out prompts, which count in no step."""
        return await self._episodes(drawn(tasks), samples, plan, self._step)

    async def score_heldout(self, rollouts: Rollouts, *, show: int) -> HeldoutScores:
        """Graded like the others; what cannot be graded is told."""
        async with self._devices.phase("grade"):
            found = await heldout_scores(rollouts, self.recipe, self._parts.roles, show=show)
        if found.num_errors:
            self._parts.console.warning(
                f"{found.num_errors} of {len(rollouts)} held-out answers have no score: {found.first_error}"
            )
        return found

    # --- results ---

    @property
    def step(self) -> int:
        return self._step

    @property
    def last_loss(self) -> float | None:
        return self._log.last_loss

    @property
    def evaluation(self) -> Evaluation | None:
        return self._evaluation

    # --- how it is done ---

    @property
    def _lr(self) -> float:
        return learning_rate(self.recipe.optimizer, self._step + 1, self.recipe.steps)

    def _hold(self, rows: RowRefs[RowsT]) -> RowRefs[RowsT]:
        """Freed when the step closes."""
        assert self._objects is not None
        return self._objects.hold(rows)

    async def _generate(self, prompts: Sequence[DrawnTask], number: int) -> Rollouts:
        rollout, truncation = self.recipe.rollout, self.recipe.rollout.truncation
        plan = SamplingPlan(
            max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, top_p=truncation.top_p,
            top_k=truncation.top_k, min_p=truncation.min_p, stop=rollout.stop, seed=self.recipe.run.seed,
        )  # fmt: skip
        return await self._episodes(prompts, rollout.samples_per_prompt, plan, number)

    async def _episodes(self, prompts: Sequence[DrawnTask], samples: int, plan: SamplingPlan, number: int) -> Rollouts:
        """Generators answer by themselves, or episode runners ask them turn by turn."""
        roles = self._parts.roles
        source = roles.generator if roles.runner is None else roles.runner
        await self._devices.publish(self._version)
        async with self._devices.phase("rollout"):
            blocks = [block async for block in source.generate(prompts, samples, plan)]
        tasks = {prompt.draw: prompt.task for prompt in prompts}
        rollouts = Rollouts.of(blocks, tasks, step=number, version=self._version)
        self._hold(rollouts.rows)
        return rollouts

    async def _evaluate(self) -> None:
        """Greedy answers (and samples, for pass@k) to the held-out prompts, graded like the others."""
        parts, began = self._parts, time.perf_counter()
        parts.console.doing("evaluating")
        with parts.watch.span("evaluation"), parts.cluster.step(self._step) as objects:
            self._objects, self._devices.is_evaluating = objects, True
            evaluation = await summarise(self, parts.heldout, self._step)
        self._devices.is_evaluating = False
        parts.console.doing(None)
        self._evaluation, self._evaluated_step = evaluation, self._step
        self._log.write(self._step, evaluation.metrics)
        parts.console.evaluation(replace(evaluation.view, seconds=time.perf_counter() - began))
        parts.folder.samples(self._step, [dict(sample) for sample in evaluation.samples])
        for logger in parts.loggers:
            shown = "\n\n".join(f"{each.prompt}\n-> {each.answer}" for each in evaluation.view.samples)
            logger.text(self._step, "samples", shown)
        if self._saved_step == self._step and self._step > 0:
            await self.policy.grade(self._step, -evaluation.score)

    async def _save(self) -> None:
        """Critic and reference first: the policy's checkpoint, once whole, says that the step can be resumed."""
        if self._saved_step == self._step:
            return
        parts, recipe = self._parts, self.recipe
        await self._log.written()
        kl = self._algorithm.kl
        values = {
            "cursor": parts.prompts.state(),
            "kl_coefficient": self._kl if kl is not None else None,
            "skipped_in_a_row": self._log.skipped_in_a_row,
            "version": self._version,
            "episodes": parts.ledger.count(),
            "recipe": recipe.model_dump(mode="json"),
        }
        await self._devices.enter("save")
        with parts.watch.span("checkpoint"):
            if self.critic is not None:
                await self.critic.save(self._step, {})
            if kl is not None and kl.refresh_every is not None and parts.roles.reference is not None:
                await parts.roles.reference.save(self._step)
            await self.policy.save(self._step, values)
        self._saved_step = self._step

    async def _finish(self) -> None:
        is_saved_late = self._saved_step != self._step
        await self._save()
        await self._log.written()
        if is_saved_late and self._evaluated_step == self._step and self._evaluation is not None:
            await self.policy.grade(self._step, -self._evaluation.score)
        if self._step >= self.recipe.steps and self._parts.heldout and self._evaluated_step != self._step:
            await self._evaluate()
        with self._parts.watch.span("checkpoint"):
            await self.policy.finish_saving()
        self._parts.folder.stop_file.unlink(missing_ok=True)
        status = "finished" if self._step >= self.recipe.steps else "stopped"
        self._parts.folder.update(status=status, step=self._step)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
