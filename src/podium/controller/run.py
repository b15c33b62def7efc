# SPDX-License-Identifier: Apache-2.0
"""OnPolicyRun: the object that a controlled program receives."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Generic

import numpy as np

from podium.algorithms.kl import adaptive_coefficient
from podium.cluster import ObjectScope
from podium.controller.devices import Devices
from podium.controller.episodes import Episodes
from podium.controller.evaluation import OnPolicyEvaluation, OnPolicyEvaluator
from podium.controller.executor import Executor, StepExecutor
from podium.controller.overlap import OverlapExecutor
from podium.controller.parts import OnPolicyParts, RecipeT_co
from podium.controller.replay import ReplayExecutor
from podium.controller.role_calls import CriticRole, PolicyRole, ReferenceRole, TeacherRole
from podium.controller.rollout_record import RolloutRecorder
from podium.controller.state import RunState
from podium.controller.step import Step
from podium.controller.step_log import StepLog
from podium.controller.step_record import StepRecorder
from podium.engine.checkpoint_files import SaveFailure, SaveState
from podium.engine.schedule import learning_rate
from podium.errors import CheckpointError, InvariantError, PodiumError, ProgramError, RunFolderError
from podium.roles.interfaces import POLICY
from podium.roles.stages import CriticReport, GradedRollouts, TrainBatch, UpdateReport
from podium.runs.disk_reports import last_save_error
from podium.runs.milestones import Milestones
from podium.runs.result import left_early


class OnPolicyRun(Generic[RecipeT_co]):
    """The roles of a run and its steps. A program iterates over `steps`, calls roles, and commits each step."""

    def __init__(
        self, parts: OnPolicyParts[RecipeT_co], state: RunState, *, replay: ReplayExecutor | None = None,
        milestones: Milestones | None = None,
    ) -> None:  # fmt: skip
        """`replay` gives the steps of a recorded run, instead of new ones. `milestones`: of a run that was rewound."""
        self._parts, self.recipe, self._state = parts, parts.recipe, state
        self._kl, roles = parts.recipe.full_algorithm.kl, parts.roles
        self._devices = devices = Devices(parts)
        self._episodes = Episodes(parts, devices, state)
        overlaps = parts.recipe.keeps_generating
        self._replay = replay
        self._executor: Executor = replay or (OverlapExecutor if overlaps else StepExecutor)(parts, devices, state)
        self._recorder = StepRecorder(
            parts.folder.steps, is_on=parts.recipe.rollout.is_recorded and replay is None, digest=state.record
        )
        self._rollouts = RolloutRecorder(
            parts.recipe, parts.folder.rollouts, parts.log, tokenizer=parts.tokenizer, is_on=replay is None
        )
        self._evaluator = OnPolicyEvaluator(parts, devices, self._episodes)
        self.milestones = milestones or Milestones(parts.recipe, state.step, evaluates=bool(parts.heldout))
        self._log = StepLog(parts, state)
        self._evaluation: OnPolicyEvaluation | None = None
        # Of the last committed step, for its checkpoint. A run that was rewound may save before it commits another.
        self._resume_values = self._values_to_resume()
        self._is_finished = self._is_ending = False
        self._save_failure: SaveFailure | None = None  # of the last save
        self._untrusted_step: int | None = None  # it was committed, and broke an invariant
        self.policy = PolicyRole(parts, devices, state)
        self.reference = ReferenceRole(parts, devices, self._kl) if self._kl is not None else None
        self.critic = CriticRole(parts, devices, state, roles.critic) if roles.critic is not None else None
        teachers = self.recipe.teacher_sections
        total = sum(teacher.weight for teacher in teachers)
        self.teachers = tuple(
            TeacherRole(parts, devices, scorer, section.weight / total)
            for scorer, section in zip(roles.teachers, teachers, strict=True)
        )

    async def steps(self) -> AsyncIterator[Step]:
        """Yields every remaining step, with `rollout.prompts_per_step` groups that the newest weights generated and
        graders graded. Ends after the last step or when a stop is requested."""
        if self.milestones.starts_with_save(self._state.step):
            await self._save()
        if self.milestones.starts_with_evaluation(self._state.step):
            await self._evaluate()
        await self._snapshot(self._resume_values)
        self._log.mark()
        while self._state.step < self.recipe.steps and not self._parts.stop_requested():
            number = self._state.step + 1
            with self._parts.cluster.scope(f"step {number}") as objects:
                yield await self._begin(number, objects)
                if self._state.step != number:
                    raise ProgramError(
                        f"program {self.recipe.program} went on to the next step without committing step {number}. "
                        "Await run.commit(step, ...) at the end of every step."
                    )
        await self._finish()

    async def sample(self, step: Step, num_prompts: int) -> GradedRollouts:
        """Returns further groups for a step: generates and grades the next prompts of the data, like the others."""
        if self._replay is not None:
            return self._replay.sample_more(step.number)
        await self._executor.pause()
        more = await self._episodes.sample(num_prompts, step.number, step.objects)
        self._executor.note_used(np.unique(more.group_N).tolist())
        self._recorder.add(more)
        self._rollouts.add(step.number, more)
        return more

    async def commit(
        self,
        step: Step,
        batch: TrainBatch | None = None,
        *,
        policy: UpdateReport | None = None,
        critic: CriticReport | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Closes a step, given the batch it trained on and the reports of its updates. The current weights become the
        step's version. Writes metrics and ledger; saves and evaluates when due. `metrics` come from the program and are
        recorded as `program/NAME`."""
        state, kl = self._state, self._kl
        reports: dict[str, object] = {"policy": policy, "critic": critic}
        for name, report in reports.items():
            if inspect.iscoroutine(report):
                report.close()
                raise ProgramError(f"run.commit: {name} is a call that was not awaited: await run.{name}.update(...).")
        if step.number != state.step + 1:
            raise ProgramError(f"step {step.number} is committed after step {state.step}. Commit every step once.")
        if policy is None and step.number in state.updated_steps:
            raise ProgramError(
                f"step {step.number} updated the policy, and run.commit was not given the report. Pass policy=report: "
                "without it generators keep the old weights."
            )
        state.updated_steps.discard(step.number)
        state.step, version = step.number, state.version
        if policy is not None:
            state.note_update()
        groups = self._executor.commit(step.number, is_updated=policy is not None)
        await self._recorder.commit(step.number, version=state.version, groups=groups)
        await self._rollouts.commit(step, batch, version=version, is_updated=policy is not None)
        await self._refresh_reference()
        self._adapt_kl(batch)
        is_folder_lost = False
        try:
            is_folder_lost = self._parts.log.restore_folder()
            await self._log.record(
                step, batch, policy=policy, critic=critic,
                kl_coefficient=step.kl_coefficient if kl is not None else None, metrics=metrics or {}, groups=groups,
                history=self._executor.history, open_groups=self._executor.open_groups(),
            )  # fmt: skip
        except InvariantError as error:
            self._untrusted_step = step.number
            raise InvariantError(f"{error} {await self._where_to_resume(step.number)}") from error
        finally:  # a step that stops the run (it diverged, a logger failed) can be saved like any other
            self._resume_values = self._values_to_resume()
            state.updated_roles.clear()
        self._parts.replacements.note_committed(step.number)
        await self._snapshot(self._resume_values)
        await self._look_at_disk(is_folder_lost)
        save, evaluate = self.milestones.save_is_due(step.number), self.milestones.evaluation_is_due(step.number)
        if save:
            await self._save()
        if evaluate:
            await self._evaluate()
        if save or evaluate:
            self._log.mark()

    @property
    def unsaved_step(self) -> int | None:
        """The last committed step, if it has no checkpoint yet and may have one: not if it broke an invariant."""
        step = self._state.step
        return None if step in (self.milestones.saved_step, self._untrusted_step) else step

    async def save_before_failing(self) -> None:
        """Saves the last committed step of a run that fails, and waits until all checkpoints are written. Raises an
        error if the weights are no longer those of that step."""
        await self._executor.close()
        with suppress(RunFolderError):  # a ledger that fails must not keep the checkpoint from being saved
            await self._log.note_open(self._executor.open_groups())
        await self._recorder.close()
        await self._rollouts.close()
        self._is_ending = True
        await self._end_save()
        if self.unsaved_step is not None:
            for name in sorted(self._state.updated_roles):
                role = self._parts.roles.critic if name == "critic" else self._parts.roles.policy
                if role is not None and await role.has_stepped():
                    raise CheckpointError(f"the {name}'s weights were already updated by the step that failed")
            await self._save_last()

    async def give_up(self) -> None:
        """Gives up the step in progress and everything that is running, so that the run can be rewound."""
        await self._executor.close()
        await self._recorder.close()
        await self._rollouts.close()
        await self._log.written()

    async def finish_saving(self) -> None:
        """Waits until the last checkpoint is written. Raises an error if it is not."""
        await self._end_save()
        if self._save_failure is not None:
            raise last_save_error(self._save_failure, newest=self.milestones.whole_step)

    def require_finished(self) -> None:
        """Raises an error if the program left the loop over `steps` early: its last steps are not saved."""
        if not self._is_finished:
            raise left_early(self.recipe.program, self._state.step)

    # --- results ---

    @property
    def num_committed(self) -> int:
        """Number of committed steps."""
        return self._state.step

    @property
    def last_loss(self) -> float | None:
        """Loss of the last logged step; None before the first."""
        return self._parts.log.last_loss

    @property
    def evaluation(self) -> OnPolicyEvaluation | None:
        """The last evaluation."""
        return self._evaluation

    # --- internals ---

    async def _begin(self, number: int, objects: ObjectScope) -> Step:
        step = await self._executor.sample(number, objects)
        self._recorder.begin(step)
        self._rollouts.begin(number, step)
        return Step(
            number=number,
            lr=learning_rate(self.recipe.optimizer, number, self.recipe.steps),
            kl_coefficient=self._state.kl_coefficient,
            sampled=step.sampled,
            episodes=step.episodes,
            objects=objects,
        )

    async def _refresh_reference(self) -> None:
        """Copies the policy into the reference every `algorithm.kl.refresh_every` steps."""
        kl, reference = self._kl, self._parts.roles.reference
        if kl is None or reference is None or kl.refresh_every is None or self._state.step % kl.refresh_every:
            return
        async with self._devices.phase("refresh"):
            await reference.copy_from(POLICY)

    def _adapt_kl(self, batch: TrainBatch | None) -> None:
        """Adapts the KL coefficient after the step, so that the whole step uses one coefficient."""
        kl, reference = self._kl, batch.reference if batch is not None else None
        if kl is None or kl.target is None or reference is None or not reference.distance.tokens_N.sum():
            return
        distance = reference.distance
        observed = float(distance.k3_N.sum()) / float(distance.tokens_N.sum())
        self._state.kl_coefficient = adaptive_coefficient(
            self._state.kl_coefficient,
            observed,
            target=kl.target,
            horizon=kl.horizon_episodes,
            count=len(distance.tokens_N),
        )

    async def _evaluate(self) -> None:
        step = self._state.step
        began = time.perf_counter()
        await self._executor.pause()
        drained = {"heldout/drain_s": time.perf_counter() - began} if self.recipe.rollout.staleness else {}
        self._evaluation = evaluation = await self._evaluator.evaluate(step)
        self.milestones.evaluated_step = step
        self._parts.log.evaluation(evaluation.view, {**evaluation.metrics, **drained}, evaluation.answers)
        if self.milestones.saved_step == step and step > 0 and evaluation.score is not None:
            await self._grade(step, -evaluation.score)

    async def _grade(self, step: int, loss: float) -> None:
        fault = await self._parts.roles.policy.grade(step, loss)
        if fault is not None:
            self._parts.log.console.warning(
                f"the held-out score of step {step} cannot be recorded in its checkpoint: {fault}"
            )

    async def _save(self) -> None:
        """Begins to save the last committed step. Training goes on if the disk does not take it: a later step tries
        again."""
        step = self._state.step
        if self.milestones.saved_step == step:
            return
        await self._end_save()
        await self._log.written()
        await self._rollouts.written()
        record = await self._recorded()
        with self._parts.watch.span("checkpoint"):
            state = self._unrecorded(step) or await self._saved_roles(step, record)
        self.milestones.saving(step)
        self._note_save(state)

    async def _saved_roles(self, step: int, record: str | None) -> SaveState:
        """Saves critic and reference first: a complete checkpoint of the policy means that the step can be resumed."""
        roles, kl = self._parts.roles, self._kl
        values = {
            **self._resume_values,
            "episodes": self._parts.ledger.count(),
            "record": record,
            "recipe": self.recipe.stored_values(),
        }
        await self._devices.enter("save")
        if roles.critic is not None and isinstance(state := await roles.critic.save(step, {}), SaveFailure):
            return state
        if kl is not None and kl.refresh_every is not None and roles.reference is not None:
            state = await roles.reference.save(step)
            if isinstance(state, SaveFailure):
                return state
        return await roles.policy.save(step, values)

    async def _recorded(self) -> str | None:
        """Waits until all steps are recorded, as far as the disk takes them."""
        digest, folder = await self._recorder.written(), self._parts.folder.steps
        if self._recorder.fault is not None:
            self._parts.log.disk_reports.cannot_write(folder, self._recorder.fault)
        else:
            self._parts.log.disk_reports.writes_again(folder)
        return digest

    def _unrecorded(self, step: int) -> SaveFailure | None:
        """Why no checkpoint may be complete now: steps up to it are not in the ledger, or have no record."""
        for path, fault in ((self._parts.ledger.path, self._parts.ledger.fault),
                            (self._parts.folder.steps, self._recorder.fault)):  # fmt: skip
            if fault is not None:
                reason = f"{path} cannot be written ({fault}), and has to be complete first"
                return SaveFailure(step=step, folder=self._parts.folder.path, reason=reason)
        return None

    def _note_save(self, state: SaveState) -> None:
        """Reports the outcome of the last save, as far as it is known."""
        if state == "writing":
            return
        if not isinstance(state, SaveFailure):
            self._save_failure = None
            self.milestones.save_is_whole()
            self._parts.log.saved(self.milestones.saved_step)
            return
        self._save_failure, retry_step = state, self.milestones.save_failed(self._state.step)
        if not self._is_ending:
            self._parts.log.save_failed(state, newest=self.milestones.whole_step, retry_step=retry_step)

    async def _end_save(self) -> None:
        """Waits until the save in flight has ended."""
        if self.milestones.is_saving:
            self._note_save(await self._parts.roles.policy.finish_saving())

    async def _where_to_resume(self, step: int) -> str:
        """What to do about a step that must not be saved. The save of an earlier one that is in flight ends first."""
        with suppress(PodiumError):
            await self._end_save()
        newest = self.milestones.whole_step
        if newest is None:
            return f"Step {step} is not saved, and no checkpoint was written before it: start the run anew."
        return f"Step {step} is not saved: `podium resume {self._parts.folder.path}` goes on after step {newest}."

    async def _look_at_disk(self, is_folder_lost: bool) -> None:
        """After every step: whether the save in flight has ended, and whether what waits for the disk can be
        written. A run whose folder was lost saves at once."""
        if self.milestones.is_saving:
            self._note_save(await self._parts.roles.policy.save_state())
        if is_folder_lost:
            self.milestones.forget_saved(self._state.step - 1)
        if self._recorder.fault is not None:
            await self._recorded()

    async def _save_last(self) -> None:
        """Saves the last step, in a second attempt if need be. Raises an error if it is not saved: its work would be
        lost."""
        self._is_ending = True
        await self._save()
        await self._end_save()
        if self._parts.log.restore_folder():
            self.milestones.forget_saved(self._state.step)
        await self._save()
        with self._parts.watch.span("checkpoint"):
            await self.finish_saving()

    async def _snapshot(self, values: Mapping[str, Any]) -> None:
        """Keeps the last committed step in memory, unless nothing follows it. A replay can be started again. Waits for
        the record of a step that is kept, and of no other."""
        step, snapshots = self._state.step, self._parts.snapshots
        if self._replay is None and step < self.recipe.steps and await snapshots.is_due(step):
            await snapshots.begin(step, {**values, "record": await self._recorder.written()})

    def _values_to_resume(self) -> dict[str, Any]:
        """Read when a step is committed: a later step that fails has taken prompts already."""
        return {
            "cursor": self._executor.data_state(),
            "kl_coefficient": self._state.kl_coefficient if self._kl is not None else None,
            "skipped_in_a_row": self._log.skipped_in_a_row,
            "version": self._state.version,
        }

    async def _finish(self) -> None:
        step = self._state.step
        await self._executor.close()
        await self._log.note_open(self._executor.open_groups())
        is_saved_late = self.milestones.saved_step != step
        if self.milestones.last_evaluation_is_due(step):
            await self._save()
            await self._evaluate()
            await self._executor.close()  # it may have waited for a generator
        await self._save_last()
        await self._log.written()
        await self._rollouts.written()
        await self._recorded()
        score = self._evaluation.score if self._evaluation is not None else None
        if is_saved_late and self.milestones.evaluated_step == step and score is not None:
            await self._grade(step, -score)
        self._executor.end()
        self._log.take_spans()
        self._parts.log.finish(step)
        self._is_finished = True
