# SPDX-License-Identifier: Apache-2.0
"""OnPolicyRun: what a controlled program is given. It draws prompts, moves references between roles, decides who holds
which device in which phase, and records every step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podium.algorithms.kl import adaptive_coefficient
from podium.cluster import Cluster, ShardResult, Step, Workers
from podium.controller.evaluation import Evaluation, drawn, summarise
from podium.controller.layout import LINK, RoleNames
from podium.controller.ledger import Ledger
from podium.controller.phases import GENERATOR, Phase, residency
from podium.controller.prompts import PromptSource
from podium.controller.records import StepRecord, idle_seconds, ledger_records, step_metrics
from podium.data.tasks import DrawnTask, Task
from podium.data.trajectories import TrajectoryBlock
from podium.engine.optimizer import learning_rate
from podium.environments.grading import overlong_penalty
from podium.environments.rewards import reward_names
from podium.errors import RewardError, TrainingDivergedError
from podium.observe import Console, Logger, MetricsFile, StepMetrics, StepView, Stopwatch
from podium.recipe import Recipe
from podium.roles.carriers import Residency, SamplingPlan, UpdatePlan
from podium.roles.grader import Purpose
from podium.roles.grading_handle import GraderHandle, RewardModelHandle
from podium.roles.handles import CriticHandle, GeneratorHandle, LearnerHandle, RunnerHandle, ScorerHandle, send_weights
from podium.roles.learner import POLICY
from podium.roles.stages import (
    CriticReport,
    GradedRollouts,
    Rollouts,
    ScoredRollouts,
    UpdateReport,
    WeightedRollouts,
)
from podium.spmd.folder import RunFolder
from podium.weights.canary import GapLimits
from podium.weights.parcels import ByBroadcast


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """The handles of a run; None and empty where its method has no such role."""

    policy: LearnerHandle
    generator: GeneratorHandle
    runner: RunnerHandle | None
    grader: GraderHandle | None
    reward_models: tuple[tuple[int, RewardModelHandle], ...] = ()
    critic: CriticHandle | None = None
    reference: ScorerHandle | None = None
    teachers: tuple[ScorerHandle, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything a run is made of."""

    recipe: Recipe
    folder: RunFolder
    cluster: Cluster
    workers: Workers
    roles: Roles
    names: RoleNames
    prompts: PromptSource
    heldout: Sequence[Task]
    ledger: Ledger
    console: Console
    metrics: MetricsFile
    loggers: Sequence[Logger]
    watch: Stopwatch
    stop_requested: Callable[[], bool]
    leaving: frozenset[str]  # roles that give up device memory while others work


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run begins: at step 0, or after the steps of a checkpoint."""

    step: int = 0
    kl_coefficient: float | None = None
    skipped_in_a_row: int = 0
    best: float | None = None


class OnPolicyRun:
    """A program awaits its methods in the order of its method; each is a phase."""

    def __init__(self, parts: Parts, progress: Progress) -> None:
        self._parts, self.recipe = parts, parts.recipe
        self.policy, self.critic, self.teachers = parts.roles.policy, parts.roles.critic, parts.roles.teachers
        self._step = self._version = self._saved_step = progress.step
        self._published: int | None = None
        kl = parts.recipe.algorithm.kl
        self._kl = progress.kl_coefficient if progress.kl_coefficient is not None else (kl.coefficient if kl else 0.0)
        self._in_a_row = progress.skipped_in_a_row
        self._held: dict[str, Residency] = dict.fromkeys(parts.names.on_devices, "resident")
        self._objects: Step | None = None
        self._began = (time.perf_counter(), progress.step)
        self._marked = (time.perf_counter(), time.time(), parts.watch.seconds())
        self._graded: GradedRollouts | None = None
        self._scored: ScoredRollouts | None = None
        self._critic_report: CriticReport | None = None
        self._evaluation: Evaluation | None = None
        self._evaluated_step: int | None = None
        self._is_evaluating = False
        self._writing: asyncio.Task[None] | None = None
        self._last_reward: float | None = None
        self._last_loss: float | None = None

    # --- what programs await ---

    async def rollouts(self) -> AsyncIterator[Rollouts]:
        """A batch of finished episodes for every step still to do, drawn by the newest weights. Ends when the steps are
        done or a stop was asked for; waits for generators, which have a deadline of their own."""
        if self._step == 0 and self.recipe.evaluation.at_start:
            await self._evaluate()
        self._mark()
        while self._step < self.recipe.steps and not self._parts.stop_requested():
            number = self._step + 1
            with self._parts.cluster.step(number) as objects:
                self._objects = objects
                self._graded = self._scored = self._critic_report = None
                yield await self._generate(self._parts.prompts.take(self.recipe.rollout.prompts_per_step), number)
                assert self._step == number, "a program publishes every step that it is given"
        await self._finish()

    async def grade(self, rollouts: Rollouts) -> GradedRollouts:
        """Rewards of all episodes. What cannot be graded is dealt with as the recipe says."""
        graded = await self._grade(rollouts)
        self._graded = graded if self._graded is None else GradedRollouts.join([self._graded, graded])
        return graded

    async def refill(self, graded: GradedRollouts) -> GradedRollouts:
        """Dynamic sampling: groups of equal rewards are left out, and other prompts are drawn in their place, for as
        many rounds as the recipe allows."""
        recipe, wanted = self.recipe, self.recipe.rollout.prompts_per_step
        kept = graded.take(np.flatnonzero(~graded.uniform_N))
        for _ in range(recipe.algorithm.max_refills):
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
        kl, reference = self.recipe.algorithm.kl, self._parts.roles.reference
        if kl is None or reference is None or not len(graded):
            self._scored = ScoredRollouts(graded=graded)
            return self._scored
        async with self._phase("score"):
            found, distance = await reference.score(graded.rollouts.rows, self.recipe.rollout.temperature)
        column = self._hold(found)
        penalty_N = None
        if kl.where == "reward":
            by_name = {"k1": distance.k1_N, "k2": distance.k2_N, "k3": distance.k3_N}
            penalty_N = self._kl * by_name[kl.estimator or "k1"]
        self._scored = ScoredRollouts(graded=graded, reference=column, distance=distance, penalty_N=penalty_N)
        if kl.target is not None:
            observed = float(distance.k3_N.sum()) / max(1.0, float(distance.tokens_N.sum()))
            self._kl = adaptive_coefficient(self._kl, observed, target=kl.target, horizon=kl.horizon, count=len(graded))
        return self._scored

    async def teach(self, graded: GradedRollouts) -> WeightedRollouts:
        """On-policy distillation: the teachers' log-probs less the policy's own, token by token, as advantages."""
        async with self._phase("score"):
            weights = np.array([teacher.weight for teacher in self.recipe.teachers])
            columns = [
                (await teacher.score(graded.rollouts.rows, self.recipe.rollout.temperature))[0]
                for teacher in self.teachers
            ]
            held = [self._hold(column) for column in columns]
        scored = await self.score(graded)
        return WeightedRollouts(
            scored=scored, teachers=tuple(zip(held, (weights / weights.sum()).tolist(), strict=True))
        )

    async def estimate(self, scored: ScoredRollouts) -> WeightedRollouts:
        """PPO: the critic's advantages and returns of each token, whitened over the whole step."""
        assert self.critic is not None
        graded = scored.graded
        async with self._phase("score"):
            columns, moments = await self.critic.estimate(
                graded.rollouts.rows, graded.last_token_rewards_N, graded.rollouts.note.turn_rewards, scored.reference,
                self.recipe.algorithm, self._kl,
            )  # fmt: skip
        whitening = moments.whitening()
        return WeightedRollouts(
            scored=scored, columns=self._hold(columns), whitening=(whitening.shift, whitening.scale)
        )

    async def update_critic(self, weighted: WeightedRollouts) -> None:
        """The critic learns the returns."""
        assert self.critic is not None
        if not len(weighted.rollouts.rows):
            return
        recipe = self.recipe
        lr = self._lr * (recipe.critic.lr or recipe.optimizer.lr) / recipe.optimizer.lr
        async with self._phase("update"):
            self._critic_report = await self.critic.update(
                weighted.rollouts.rows, weighted.value_columns, recipe.algorithm, lr=lr, step=self._step + 1,
                seed=recipe.run.seed,
            )  # fmt: skip

    async def update(self, weighted: WeightedRollouts, *, imitate: bool = False) -> UpdateReport | None:
        """All optimizer steps of this batch; None where there is nothing to learn from."""
        recipe = self.recipe
        if recipe.algorithm.mask_truncated:
            weighted = weighted.take(np.flatnonzero(~weighted.rollouts.truncated_N))
        if not len(weighted.rollouts.rows):
            return None
        plan = UpdatePlan(
            step=self._step + 1,
            lr=self._lr,
            algorithm=recipe.algorithm,
            temperature=recipe.rollout.temperature,
            version=self._version,
            max_new_tokens=recipe.rollout.max_new_tokens,
            kl_coefficient=self._kl,
            whitening=weighted.whitening,
            whiten=weighted.whiten,
            loss="imitation" if imitate else "policy",
        )
        async with self._phase("update"):
            learning = asyncio.create_task(self.policy.update(weighted, plan, seed=recipe.run.seed))
            await asyncio.sleep(0)  # the learners are told first
            if self._step + 1 < recipe.steps:
                self._parts.prompts.draw_ahead(recipe.rollout.prompts_per_step)
            return await learning

    async def publish(self, used: GradedRollouts, report: UpdateReport | None) -> None:
        """Closes the step: the weights of this moment are its version. Records it, and saves and evaluates when due."""
        self._step += 1
        if report is not None:
            self._version = self._step
        kl, reference = self.recipe.algorithm.kl, self._parts.roles.reference
        if kl is not None and kl.refresh_every and self._step % kl.refresh_every == 0 and reference is not None:
            async with self._phase("score"):
                await reference.copy_from(POLICY)
        await self._record(used, report)
        save = _is_due(self.recipe.checkpoint.every, self._step)
        evaluate = _is_due(self.recipe.evaluation.every, self._step) and bool(self._parts.heldout)
        if save:
            await self._save()
        if evaluate:
            await self._evaluate()
        if save or evaluate:
            self._mark()

    @property
    def in_critic_warmup(self) -> bool:
        return self._step < self.recipe.critic.warmup_steps

    # --- held-out prompts ---

    async def answer_heldout(self, tasks: Sequence[Task], samples: int, plan: SamplingPlan) -> Rollouts:
        """Episodes of held-out prompts, which count in no step."""
        prompts = drawn(tasks)
        await self._publish_weights()
        async with self._phase("rollout"):
            blocks = [block async for block in self._episodes(prompts, samples, plan)]
        found = Rollouts.of(blocks, {each.draw: each.task for each in prompts}, step=self._step, version=self._version)
        self._hold(found.rows)
        return found

    async def score_heldout(self, rollouts: Rollouts, *, show: int) -> tuple[np.ndarray, tuple[tuple[str, str], ...]]:
        """The score of each, and the texts of the first: by evaluation.generation.score, or by the recipe's rewards. A
        score that cannot be had is 0."""
        roles, generation = self._parts.roles, self.recipe.evaluation.generation
        purpose: Purpose = "train" if generation is None or generation.score is None else "evaluation"
        assert roles.grader is not None
        async with self._phase("grade"):
            found = await roles.grader.grade(rollouts, purpose, show=show)
            if purpose == "evaluation":
                scores_N = found.values_NR[:, 0]
            else:
                weights = np.array([self.recipe.reward[index].weight for index in found.rewards])
                scores_N = np.nan_to_num(found.values_NR) @ weights + np.nan_to_num(rollouts.note.environment_N)
                for index, model in roles.reward_models:
                    scores_N = scores_N + self.recipe.reward[index].weight * await model.score(rollouts)
        if found.errors:
            first = found.errors[min(found.errors)]
            self._parts.console.warning(
                f"{len(found.errors)} of {len(rollouts)} held-out answers have no score: {first}"
            )
        without = np.isin(np.arange(len(rollouts)), list(found.errors))
        return np.where(without, 0.0, np.nan_to_num(scores_N)), found.texts

    # --- results ---

    @property
    def step(self) -> int:
        return self._step

    @property
    def last_loss(self) -> float | None:
        return self._last_loss

    @property
    def evaluation(self) -> Evaluation | None:
        return self._evaluation

    # --- how it is done ---

    @property
    def _lr(self) -> float:
        return learning_rate(self.recipe.optimizer, self._step + 1, self.recipe.steps)

    def _hold(self, rows: Any) -> Any:
        """Freed when the step closes."""
        assert self._objects is not None
        return self._objects.hold(rows)

    async def _generate(self, prompts: Sequence[DrawnTask], number: int) -> Rollouts:
        rollout = self.recipe.rollout
        plan = SamplingPlan(
            max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature, top_p=rollout.top_p,
            top_k=rollout.top_k, min_p=rollout.min_p, stop=rollout.stop, seed=self.recipe.run.seed,
        )  # fmt: skip
        await self._publish_weights()
        async with self._phase("rollout"):
            blocks = [block async for block in self._episodes(prompts, rollout.samples_per_prompt, plan)]
        tasks = {prompt.draw: prompt.task for prompt in prompts}
        rollouts = Rollouts.of(blocks, tasks, step=number, version=self._version)
        self._hold(rollouts.rows)
        return rollouts

    def _episodes(
        self, prompts: Sequence[DrawnTask], samples: int, plan: SamplingPlan
    ) -> AsyncIterator[ShardResult[TrajectoryBlock]]:
        """Blocks of episodes: generators answer by themselves, or episode runners ask them turn by turn."""
        roles = self._parts.roles
        source = roles.generator if roles.runner is None else roles.runner
        return source.generate(prompts, samples, plan)

    async def _publish_weights(self) -> None:
        """Generators get the newest version, if they have not got it: the same tensors, or a broadcast."""
        if self._published == self._version:
            return
        roles, number = self._parts.roles, self._version
        if self.recipe.placement.layout == "colocated":
            await self._enter("rollout", awake=(GENERATOR,))
            with self._parts.watch.span("publish"):
                await roles.generator.share(number)  # wakes it
        else:
            with self._parts.watch.span("publish"):
                version = await roles.policy.describe(number)
                await send_weights(roles.policy, roles.generator, ByBroadcast(version=version, link=LINK))
        self._published = number

    async def _grade(self, rollouts: Rollouts) -> GradedRollouts:
        recipe, roles = self.recipe, self._parts.roles
        values_NR = np.full((len(rollouts), len(recipe.reward)), np.nan)
        errors = dict(rollouts.note.errors)
        extras: dict[str, tuple[float, float]] = {}
        async with self._phase("grade"):
            if roles.grader is not None:
                found = await roles.grader.grade(rollouts)
                for at, index in enumerate(found.rewards):
                    values_NR[:, index] = found.values_NR[:, at]
                errors |= {row: error for row, error in found.errors.items() if row not in errors}
                extras = dict(found.extras)
            for index, model in roles.reward_models:
                values_NR[:, index] = await model.score(rollouts)
                for row in np.flatnonzero(~np.isfinite(values_NR[:, index])).tolist():
                    errors.setdefault(row, f"reward model {recipe.reward[index].model} gave {values_NR[row, index]}")
        weights = np.array([reward.weight for reward in recipe.reward])
        environment_N = np.nan_to_num(rollouts.note.environment_N)
        shaping_N = self._shaping(rollouts)
        total_N = np.nan_to_num(values_NR) @ weights + environment_N + shaping_N
        failed_N = np.isin(np.arange(len(rollouts)), list(errors))
        graded = GradedRollouts(
            rollouts=rollouts,
            rewards_N=total_N,
            values_NR=values_NR,
            shaping_N=shaping_N,
            names=reward_names(recipe.reward),
            num_failed=int(failed_N.sum()),
            num_dropped=0,
            first_error=errors[min(errors)] if errors else None,
            extras=extras,
        )
        return self._without_failed(graded, failed_N)

    def _without_failed(self, graded: GradedRollouts, failed_N: np.ndarray) -> GradedRollouts:
        if not failed_N.any():
            return graded
        grading, share = self.recipe.grading, float(failed_N.mean())
        told = f"{int(failed_N.sum())} of {len(failed_N)} episodes of step {graded.rollouts.step} have no reward: "
        if grading.on_error == "fail":
            raise RewardError(f"{told}{graded.first_error} (grading.on_error is fail)")
        if share > grading.max_failed_share:
            raise RewardError(
                f"{told}{graded.first_error} That is more than grading.max_failed_share {grading.max_failed_share:g}, "
                "so the run stops. Mend the reward and go on with `podium resume`."
            )
        self._parts.console.warning(f"{told}{graded.first_error}")
        if grading.on_error == "zero":
            return replace(graded, rewards_N=np.where(failed_N, 0.0, graded.rewards_N))
        bad = np.isin(graded.group_N, np.unique(graded.group_N[failed_N]))
        return replace(graded.take(np.flatnonzero(~bad)), num_dropped=int(bad.sum()))

    def _shaping(self, rollouts: Rollouts) -> np.ndarray:
        overlong = self.recipe.algorithm.overlong
        if overlong is None:
            return np.zeros(len(rollouts))
        return np.array(
            [
                overlong_penalty(
                    int(tokens),
                    max_new_tokens=self.recipe.rollout.max_new_tokens,
                    buffer_tokens=overlong.buffer_tokens,
                    penalty=overlong.penalty,
                )
                for tokens in rollouts.note.sampled_N
            ]
        )

    async def _enter(self, phase: Phase, *, awake: tuple[str, ...] = ()) -> None:
        """Tells the roles what to hold in this phase: who leaves goes first, so that there is room for who comes. Those
        in `awake` come by themselves, with the call that follows."""
        wanted = residency(phase, self._parts.names.on_devices, self._parts.leaving)
        if wanted[GENERATOR] == "offloaded" and self.policy.num_ranks > 1:
            self._published = None  # its copy of sharded weights leaves too, and comes back empty
        changes = [
            (role, target) for role, target in wanted.items() if _moves(self._held[role], target) and role not in awake
        ]
        for leaving in (True, False):
            for role, target in changes:
                if (target == "offloaded") == leaving:
                    with self._parts.watch.span("residency"):
                        await self._handle(role).hold(target)
        self._held = wanted

    def _handle(self, role: str) -> Any:
        roles, names = self._parts.roles, self._parts.names
        by_name: dict[str | None, Any] = {
            POLICY: roles.policy, GENERATOR: roles.generator, names.critic: roles.critic,
            names.reference: roles.reference,
        }  # fmt: skip
        by_name |= dict(zip(names.teachers, roles.teachers, strict=True))
        by_name |= {name: model for (_, name), (_, model) in zip(names.reward_models, roles.reward_models, strict=True)}
        return by_name[role]

    def _phase(self, phase: Phase) -> _InPhase:
        return _InPhase(self, phase)

    async def _record(self, used: GradedRollouts, report: UpdateReport | None) -> None:
        parts, recipe = self._parts, self.recipe
        assert self._graded is not None
        since_perf, since_wall, before = self._marked
        after = parts.watch.seconds()
        seconds = {name: spent - before.get(name, 0.0) for name, spent in after.items()}
        spans = parts.workers.take_spans()
        step_s = time.perf_counter() - since_perf
        record = StepRecord(
            step=self._step, lr=learning_rate(recipe.optimizer, self._step, recipe.steps), graded=self._graded,
            used=used, scored=self._scored, report=report, critic=self._critic_report,
            kl_coefficient=self._kl if recipe.algorithm.kl is not None else None, seconds=seconds, step_s=step_s,
            idle_s=idle_seconds(spans, since_wall, since_wall + step_s),
            peak_flops=parts.roles.policy.facts.peak_flops * parts.roles.policy.num_ranks,
            solved_at=recipe.grading.solved_at, extra=self._parts.prompts.metrics(),
        )  # fmt: skip
        self._mark()  # what is written now is the next step's time
        values = step_metrics(record)
        await self._written()
        records = ledger_records(self._graded, used, self._step)
        self._writing = asyncio.create_task(asyncio.to_thread(parts.ledger.close_step, records))
        self._log(values)
        if self._step == self._began[1] + 1:
            parts.folder.update(status="running")
        self._show(values)
        self._guard(report)

    def _show(self, values: dict[str, float]) -> None:
        done = self._step - self._began[1]
        eta = (time.perf_counter() - self._began[0]) / max(1, done) * (self.recipe.steps - self._step)
        self._last_reward, self._last_loss = values.get("reward/mean"), values.get("loss")
        own = [("reward", f"{values.get('reward/mean', 0.0):.3f}")]
        if "groups/solve_rate" in values:
            own.append(("solved", f"{values['groups/solve_rate']:.1%}"))
        own.append(("length", f"{values.get('response/mean', 0.0):.1f}"))
        if "kl/reference" in values:
            own.append(("KL", f"{values['kl/reference']:.4f}"))
        own += [("entropy", f"{values.get('entropy', 0.0):.3f}"), ("s", f"{values['step_s']:.2f}")]
        self._parts.console.step(
            StepView(
                step=self._step,
                num_steps=self.recipe.steps,
                loss=values.get("loss", 0.0),
                lr=values["lr"],
                tokens_per_s=values["tokens_per_s"],
                grad_norm=values.get("grad_norm"),
                eta_s=eta,
                own=tuple(own),
            )
        )

    def _guard(self, report: UpdateReport | None) -> None:
        """Steps without a finite loss, and engines that draw from something else than the policy."""
        if report is None:
            self._parts.console.warning(
                f"step {self._step}: nothing to learn from (all groups were left out); the weights stay as they are"
            )
            return
        self._in_a_row = self._in_a_row + 1 if report.skipped else 0
        if report.skipped:
            self._parts.console.warning(f"step {self._step}: {report.skipped} optimizer steps were skipped, not finite")
        if self._in_a_row >= self.recipe.optimizer.max_skipped_in_a_row:
            raise TrainingDivergedError(
                f"{self._in_a_row} steps in a row had a non-finite loss or gradient and were skipped, the last is step "
                f"{self._step}. Lower optimizer.lr, lengthen warmup_steps, or look at the rewards of these steps; "
                f"{self._parts.folder.metrics_file} has the numbers."
            )
        limits = GapLimits.of("bfloat16" if self.policy.facts.dtype == "bfloat16" else "float32")
        alarm = report.gap.alarm(limits)
        if alarm is not None and self.recipe.algorithm.correction is None:
            self._parts.console.warning(f"step {self._step}: {alarm}")

    def _log(self, values: dict[str, float]) -> None:
        metrics = StepMetrics(step=self._step, time_s=time.time(), values=values)
        self._parts.metrics.append(metrics)
        for logger in self._parts.loggers:
            logger.log(metrics)

    async def _evaluate(self) -> None:
        """Greedy answers (and samples, for pass@k) to the held-out prompts, graded like the others."""
        parts, began = self._parts, time.perf_counter()
        parts.console.doing("evaluating")
        with parts.watch.span("evaluation"), parts.cluster.step(self._step) as objects:
            self._objects, self._is_evaluating = objects, True
            evaluation = await summarise(self, parts, self._step)
        self._is_evaluating = False
        parts.console.doing(None)
        parts.workers.take_spans()
        self._evaluation, self._evaluated_step = evaluation, self._step
        self._log(dict(evaluation.metrics))
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
        await self._written()
        values = {
            "cursor": parts.prompts.state(),
            "kl_coefficient": self._kl if recipe.algorithm.kl is not None else None,
            "skipped_in_a_row": self._in_a_row,
            "episodes": parts.ledger.count(),
            "recipe": recipe.model_dump(mode="json"),
        }
        await self._enter("update")
        with parts.watch.span("checkpoint"):
            if self.critic is not None:
                await self.critic.save(self._step, {})
            kl = recipe.algorithm.kl
            if kl is not None and kl.refresh_every is not None and parts.roles.reference is not None:
                await parts.roles.reference.save(self._step, recipe.checkpoint.keep + int(recipe.checkpoint.keep_best))
            await self.policy.save(self._step, values)
        self._saved_step = self._step

    async def _finish(self) -> None:
        await self._save()
        await self._written()
        if self._step >= self.recipe.steps and self._parts.heldout and self._evaluated_step != self._step:
            await self._evaluate()
        with self._parts.watch.span("checkpoint"):
            await self.policy.finish_saving()
        self._parts.folder.stop_file.unlink(missing_ok=True)
        status = "finished" if self._step >= self.recipe.steps else "stopped"
        self._parts.folder.update(status=status, step=self._step)

    async def _written(self) -> None:
        """The ledger has all steps that were closed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _mark(self) -> None:
        self._parts.workers.take_spans()
        self._marked = (time.perf_counter(), time.time(), self._parts.watch.seconds())


class _InPhase:
    """Roles hold what the phase says; its time is accounted to it."""

    def __init__(self, run: OnPolicyRun, phase: Phase) -> None:
        self._run, self._phase = run, phase
        # What an evaluation takes is the evaluation's, whatever it is made of.
        self._span = run._parts.watch.span("evaluation" if run._is_evaluating else phase)

    async def __aenter__(self) -> None:
        await self._run._enter(self._phase)
        self._span.__enter__()

    async def __aexit__(self, *error: Any) -> None:
        self._span.__exit__(*error)


def _moves(now: Residency, target: Residency) -> bool:
    """Resident and active differ in words only."""
    return (now == "offloaded") != (target == "offloaded")


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
