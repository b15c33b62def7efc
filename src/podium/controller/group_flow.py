# SPDX-License-Identifier: Apache-2.0
"""Groups on their way from admission to a step: asks the scheduler, keeps what workers and graders send, and joins the
groups of a step. How episodes are run is up to the executors."""

# N episodes

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from podium.cluster import ObjectScope, RowRefs
from podium.cluster.deadlines import wall_s
from podium.controller.decided import Decided
from podium.controller.done_prompts import DonePrompts
from podium.controller.grading import ModelScores, failed_as_zero, model_scores, sum_rewards, without_failed
from podium.controller.grading_queue import GradedPart
from podium.controller.ledger import GroupRecord, OpenGroupRecord
from podium.controller.open_groups import (
    Admission,
    EndedEpisode,
    OpenGroup,
    SampledStep,
    TakeBack,
    schedule_settings,
    slowest_episodes,
)
from podium.controller.parts import OnPolicyParts
from podium.controller.schedule_audit import GroupHistory, OpenHistory
from podium.controller.scheduling import (
    DevicesLent,
    DevicesReturned,
    EpisodeEnded,
    EpisodesReturned,
    Event,
    GroupGraded,
    Lend,
    Publish,
    Recall,
    ReturnedEpisode,
    StepCommitted,
    StepRequested,
    StopRequested,
    WorkerJoined,
    WorkerLeaving,
    WorkerLeft,
    WorkerLost,
)
from podium.controller.state import RunState
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.errors import InvariantError
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import CANCELLED, ScoreNote
from podium.roles.episode_stream import Block, most_episodes
from podium.roles.grading_handle import Rewarded
from podium.roles.stages import Rollouts


class GroupFlow:
    """Only the controller's event loop uses it. Nothing here waits."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], state: RunState) -> None:
        self._parts, self._state = parts, state
        self.settings = settings = schedule_settings(parts.recipe)
        self._decided = Decided(settings, step=state.step, version=state.version)
        self._audit = self._decided.audit
        self._groups: dict[int, OpenGroup] = {}
        self._numbers: dict[int, int] = {}  # prompt index -> group, until its step begins
        self._prompt_indices: dict[int, int] = {}  # group -> prompt index, until its step is committed
        self._finished: list[GroupHistory] = []  # groups that are void, and that no step has collected yet
        self._last: dict[int, GroupHistory] = {}  # prompt index -> group that ended with the last committed step
        self._failed: set[int] = set()  # prompt indices of the step's groups that were dropped
        self._done = DonePrompts()
        self._running: Counter[str] = Counter()  # worker -> episodes that it was given and that have not ended
        self._lanes: dict[str, int] = {}  # worker -> episodes that it is given
        self._own: dict[str, None] = {}
        self._idle: dict[str, None] = {}  # of these, those that have no episodes
        rollout = parts.recipe.rollout
        self._continues = rollout.engine == "native" and rollout.on_new_weights != "finish"
        self.num_ended = self.num_moved = 0  # episodes over the whole run; moved ones are counted each time
        self._grades_single = False  # whether episodes are graded one by one

    @property
    def num_running(self) -> int:
        """Episodes that workers were given and that have not ended."""
        return self._running.total()

    @property
    def own_workers(self) -> Sequence[str]:
        """Workers that are not on devices that the learner lends."""
        return tuple(self._own)

    @property
    def idle_workers(self) -> Sequence[str]:
        """Of these, those that have no episodes."""
        return tuple(self._idle)

    @property
    def num_groups(self) -> int:
        """Groups that no step has taken."""
        return len(self._groups)

    @property
    def has_admissions(self) -> bool:
        """Whether episodes wait to be given to workers."""
        return bool(self._decided.admits)

    def standstill(self) -> InvariantError:
        """The error of a schedule that waits for something that will not happen."""
        counts = ", ".join(f"{count} {state}" for state, count in self._audit.counts.items() if count)
        return InvariantError(
            f"step {self._state.step + 1} waits for groups, and nothing is running, graded or admitted (groups: "
            f"{counts or 'none'}). This is a defect of Podium: please report it with the run folder. What was "
            "committed can be resumed."
        )

    @property
    def is_step_ready(self) -> bool:
        """Whether the scheduler has decided to start a step that is not collected yet."""
        return self._decided.start is not None

    @property
    def lacks_episodes(self) -> bool:
        """Whether episodes of groups that are here have not ended, or the next step has too few groups."""
        is_short = len(self._groups) < self.settings.groups_per_step
        return is_short or any(group.num_ended < self.settings.samples for group in self._groups.values())

    @property
    def lacks_only_rewards(self) -> bool:
        """Whether all episodes that the next step waits for have ended, and rewards of some are missing."""
        return self._decided.lacks_only_rewards

    @property
    def lacks_only_devices(self) -> bool:
        """Whether the next step is complete, and the learner's devices are on their way back or about to be lent."""
        return self._decided.lacks_only_devices

    def open(self, lanes: Mapping[int, int], *, grades_single: bool) -> None:
        """Tells the scheduler which workers there are; nothing is running. `lanes`: by rank, episodes that each runs at
        the same time."""
        self._grades_single = grades_single
        present = {str(rank): count for rank, count in lanes.items()}
        for worker in [worker for worker in self._own if worker not in present]:
            self.note_left(worker)
        for worker, count in present.items():
            if worker not in self._own:
                self.note_joined(worker, count)

    def note_joined(self, worker: str, lanes: int, version: int | None = None) -> None:
        """A worker has joined. `version`: of its weights; default: the newest."""
        self._own[worker] = self._idle[worker] = None
        self._join(worker, lanes, is_lent=False, version=version)

    def note_leaving(self, worker: str) -> None:
        """A worker will be gone soon: what it was to be given comes back at once, and what it runs when it is
        retired."""
        unsent = [admit for admit in self._decided.admits if admit.worker == worker]
        self._decided.admits = [admit for admit in self._decided.admits if admit.worker != worker]
        self.tell(WorkerLeaving(worker=worker))
        episodes = [
            ReturnedEpisode(group=admit.group, attempt=admit.attempt, sample=sample, oldest=-1, newest=-1)
            for admit in unsent
            for sample in admit.samples
        ]
        if episodes:
            self.tell(EpisodesReturned(worker=worker, episodes=tuple(episodes)))

    def note_left(self, worker: str) -> None:
        """A worker is gone. It had nothing to run any more, and what it was to be given comes back."""
        self.note_leaving(worker)
        self._decided.retirements = [each for each in self._decided.retirements if each.worker != worker]
        self._forget(worker)
        self.tell(WorkerLeft(worker=worker))

    def note_lent(self, lanes: Mapping[str, int]) -> None:
        """The learner's devices generate now. `lanes`: of their workers; none, if episode runners ask them."""
        for worker, count in lanes.items():
            self._join(worker, count, is_lent=True)
        self.tell(DevicesLent(version=self._state.version))

    def note_returned(self, workers: Iterable[str]) -> None:
        """The learner has its devices again."""
        for worker in workers:
            del self._lanes[worker]
            self.tell(WorkerLeft(worker=worker))
        self.tell(DevicesReturned())

    # --- events and actions ---

    def tell(self, event: Event) -> None:
        """Tells the scheduler what happened, and keeps what it decides."""
        self._decided.tell(event)

    def take_publishes(self) -> list[Publish]:
        """Weights to install, decided since the last call."""
        publishes, self._decided.publishes = self._decided.publishes, []
        return publishes

    def take_lending(self) -> Lend | Recall | None:
        """Whether to lend or recall the learner's devices, decided since the last call."""
        lending, self._decided.lending = self._decided.lending, None
        return lending

    def take_retirements(self) -> list[int]:
        """Ranks of workers to retire, decided since the last call."""
        retirements, self._decided.retirements = self._decided.retirements, []
        return [int(each.worker) for each in retirements]

    def take_give_backs(self) -> list[TakeBack]:
        """Episodes that workers are to give back, decided since the last call."""
        give_backs, self._decided.give_backs = self._decided.give_backs, []
        return [
            TakeBack(
                worker=each.worker,
                ids=tuple(
                    TrajectoryId(self._groups[number].prompt.prompt_index, sample, 0, attempt)
                    for number, sample, attempt in each.episodes
                ),
            )
            for each in give_backs
        ]

    def take_admissions(self) -> list[Admission]:
        """Episodes to start, decided since the last call. New groups take the next prompts of the data."""
        admits, self._decided.admits = self._decided.admits, []
        for number in sorted({admit.group for admit in admits} - self._groups.keys()):
            before = self._parts.prompts.state() if self._parts.recipe.keeps_generating else {}
            (prompt,) = self._parts.prompts.take(1)
            self._groups[number] = OpenGroup(prompt=prompt, before=before)
            self._numbers[prompt.prompt_index], self._prompt_indices[number] = number, prompt.prompt_index
        together: defaultdict[tuple[str, tuple[int, ...], int], list[OpenGroup]] = defaultdict(list)
        sent_s = wall_s()
        for admit in admits:
            self._groups[admit.group].sent_s.update(dict.fromkeys(admit.samples, sent_s))
            together[admit.worker, admit.samples, admit.attempt].append(self._groups[admit.group])
            self._running[admit.worker] += len(admit.samples)
            self._idle.pop(admit.worker, None)
        return [
            Admission(
                worker=worker,
                prompts=tuple(group.prompt for group in groups),
                samples=samples,
                attempt=attempt,
                begun=_joined_rows([group.begun[each] for group in groups for each in samples if each in group.begun]),
            )
            for (worker, samples, attempt), groups in together.items()
        ]

    def note_lost(self, worker: str) -> None:
        """The scheduler gives its episodes to the others, also those that it was to be given."""
        self._running[worker] = 0
        self._forget(worker)
        self._decided.admits = [admit for admit in self._decided.admits if admit.worker != worker]
        self.tell(WorkerLost(worker=worker))

    def note_replaced(self, worker: str, version: int) -> None:
        """Another process runs episodes in place of a lost one. `version`: of the engine that it asks; the oldest of
        several."""
        self._own[worker] = self._idle[worker] = None
        self.tell(WorkerJoined(worker=worker, lanes=self._lanes[worker], version=version))

    def note_arrived(self, block: Block, worker: str) -> list[Rollouts]:
        """Notes the episodes of a block. Returns what can be graded now: single episodes, or complete groups."""
        if not len(block.ids):
            return []  # it has metrics only
        rollouts = self._rollouts(block)
        self._running[worker] -= len(rollouts)
        if not self._running[worker] and worker in self._own:
            self._idle[worker] = None
        is_returned_N = rollouts.note.finish_N == CANCELLED
        if is_returned_N.any():
            self._note_returned(rollouts.take(np.flatnonzero(is_returned_N)), worker)
            rollouts = rollouts.take(np.flatnonzero(~is_returned_N))
        return self._note_ended(rollouts, worker, str(block.worker)) if len(rollouts) else []

    def _rollouts(self, block: Block) -> Rollouts:
        """The episodes of a block with their tasks."""
        tasks = {
            index: self._groups[self._numbers[index]].prompt.task for index in set(block.ids.array_N4[:, 0].tolist())
        }
        state = self._state
        return Rollouts.of([block], tasks, step=state.step + 1, version=state.version, metrics={})

    def _note_returned(self, rollouts: Rollouts, worker: str) -> None:
        """Keeps the tokens of episodes that continue elsewhere."""
        note, episodes = rollouts.note, list[ReturnedEpisode]()
        for row, (index, sample, _, attempt) in enumerate(rollouts.rows.ids.array_N4.tolist()):
            number, oldest, newest = self._numbers[index], int(note.version_N[row]), int(note.newest_version_N[row])
            if not self._continues:  # it begins anew
                oldest = newest = -1
            elif note.sampled_N[row]:
                self._groups[number].begun[sample] = rollouts.rows.take(np.array([row]))
            episodes.append(ReturnedEpisode(group=number, attempt=attempt, sample=sample, oldest=oldest, newest=newest))
        self.num_moved += len(episodes)
        self.tell(EpisodesReturned(worker=worker, episodes=tuple(episodes)))

    def _note_ended(self, rollouts: Rollouts, worker: str, process: str) -> list[Rollouts]:
        self.num_ended += len(rollouts)
        ended_s = wall_s()
        to_grade: list[Rollouts] = []
        for number in sorted({self._numbers[index] for index in rollouts.group_N.tolist()}):
            group = self._groups[number]
            mine = rollouts.take(np.flatnonzero(rollouts.group_N == group.prompt.prompt_index))
            group.episodes.append(mine)
            if self._grades_single:
                to_grade.append(mine)
            elif group.num_ended == self.settings.samples:
                to_grade.append(group.rollouts)
        note = rollouts.note
        for row, (index, sample, _, attempt) in enumerate(rollouts.rows.ids.array_N4.tolist()):
            group = self._groups[self._numbers[index]]
            group.begun.pop(sample, None)
            group.ended.append(
                EndedEpisode(
                    sample=sample, tokens=int(note.sampled_N[row]), begin_s=group.sent_s.pop(sample, ended_s),
                    end_s=ended_s, worker=process,
                )
            )  # fmt: skip
            self.tell(
                EpisodeEnded(
                    group=self._numbers[index],
                    attempt=attempt,
                    sample=sample,
                    worker=worker,
                    oldest=int(note.version_N[row]),
                    newest=int(note.newest_version_N[row]),
                )
            )
        return to_grade

    def note_graded(self, part: GradedPart) -> None:
        """Notes rewards, which may be of several groups."""
        for index in np.unique(part.rollouts.group_N).tolist():
            rows, number = np.flatnonzero(part.rollouts.group_N == index), self._numbers[index]
            graded = GradedPart(rollouts=part.rollouts.take(rows), rewarded=part.rewarded.take(rows))
            self._groups[number].graded.append(graded)
            self._settle(number)

    @property
    def has_unscored(self) -> bool:
        """Whether reward models have complete groups to score."""
        return bool(self._parts.roles.reward_models) and bool(self._unscored())

    async def score(self) -> None:
        """Reward models score all complete groups that have no scores yet."""
        unscored = self._unscored()
        rollouts = Rollouts.join([self._groups[number].rollouts for number in unscored])
        scores = await model_scores(rollouts, self._parts.roles.reward_models)
        for number in unscored:
            group = self._groups[number]
            mine = np.flatnonzero(rollouts.group_N == group.prompt.prompt_index)
            group.scores = {index: scored.take(mine) for index, scored in scores.items()}
            self._settle(number)

    # --- steps ---

    def end(self) -> None:
        """Notes that no further step follows. The audit then checks that every group was trained or is void: one that
        no step has taken is offered again by a run that is resumed."""
        if self._state.step < self.settings.steps:
            self.tell(StopRequested())
        self.tell(StepRequested())
        if not self._decided.has_ended:
            raise InvariantError(
                f"the run ends after step {self._state.step}, and the scheduler has a further step. This is a defect "
                "of Podium: please report it with the run folder. What was committed is as it should be."
            )

    def collect(self, step: int, objects: ObjectScope, metrics: Mapping[str, float]) -> SampledStep:
        """Joins the groups of the step that the scheduler started, in the order of the data. `objects` frees their rows
        when the step is over, but for objects in which other groups have rows too."""
        assert self._decided.start is not None, "the scheduler has started a step"
        start, self._decided.start = self._decided.start, None
        recipe, numbers = self._parts.recipe, sorted((*start.groups, *start.voided))
        groups = [self._groups.pop(number) for number in numbers]
        joined = Rollouts.join([group.rollouts for group in groups])
        rollouts = replace(joined, step=step, version=self._state.version, metrics=metrics)
        still_used = {id(piece) for group in self._groups.values() for piece in group.pieces}
        objects.free_at_end(piece for piece in rollouts.rows.pieces if id(piece) not in still_used)
        rewarded = Rewarded.join([group.rewarded() for group in groups])
        models = [index for index, _ in self._parts.roles.reward_models]
        scores: ModelScores = {
            index: ScoreNote.join([(group.scores or {})[index] for group in groups]) for index in models
        }
        everything, errors = sum_rewards(rollouts, rewarded, scores, recipe)
        sampled = without_failed(everything, errors, recipe.grading, self._parts.log.console.warning)
        voided = [
            group.prompt.prompt_index for number, group in zip(numbers, groups, strict=True) if number in start.voided
        ]
        left = set(sampled.group_N.tolist())
        for group in groups:
            del self._numbers[group.prompt.prompt_index]
            self._done.add([group.prompt.prompt_index])
            if group.prompt.prompt_index not in left:
                self._failed.add(group.prompt.prompt_index)
        self._parts.log.slowest(step, slowest_episodes(step, groups))
        trained = sampled.take(np.flatnonzero(~np.isin(sampled.group_N, voided))) if voided else sampled
        return SampledStep(sampled=sampled, episodes=trained)

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """Tells the scheduler that a step is committed. Returns the histories of the groups that ended with it. A group
        that became void since the step began ends with the next one, which collects its episodes."""
        self.tell(StepCommitted(step=step, version=step if is_updated else None))
        finished = [*self._finished, *self._audit.take_finished()]
        self._finished = [each for each in finished if each.number in self._groups]
        ended = [each for each in finished if each.number not in self._groups]
        self._last = {self._prompt_indices[each.number]: each for each in ended}
        records = [self._record(each, step) for each in ended]
        self._failed.clear()
        return records

    def history(self, prompt_index: int) -> Sequence[str]:
        """The events and actions of a group that ended with the last committed step."""
        history = self._last.get(prompt_index)
        return [] if history is None else [str(each) for each in history.events]

    def _record(self, history: GroupHistory, step: int) -> GroupRecord:
        """The ledger's row of a group that has ended. One that was dropped because an episode of it failed had its
        place in the step, and is not trained."""
        prompt_index = self._prompt_indices.pop(history.number)
        is_failed = prompt_index in self._failed and history.void is None
        return GroupRecord(
            prompt_index=prompt_index,
            step=step,
            attempts=history.attempts,
            admitted_version=history.admitted_version,
            oldest_version=history.oldest,
            newest_version=history.newest,
            trained_version=None if is_failed else history.trained_version,
            void="failed" if is_failed else history.void,
        )

    def open_groups(self) -> list[OpenGroupRecord]:
        """The histories so far of groups that have a prompt and no row yet: also of those that became void, until the
        step ends that collects them."""
        voided = (each for each in (*self._finished, *self._audit.finished) if each.number in self._groups)
        histories: list[tuple[GroupHistory | OpenHistory, str]] = [
            *((each, each.state) for each in self._audit.open_groups()),
            *((each, "void") for each in voided),
        ]
        return [
            OpenGroupRecord(
                prompt_index=self._prompt_indices[each.number],
                step=self._state.step,
                state=state,
                attempts=each.attempts,
                admitted_version=each.admitted_version,
                oldest_version=each.oldest,
                newest_version=each.newest,
            )
            for each, state in histories
            if each.number in self._prompt_indices
        ]

    def note_used(self, prompt_indices: Iterable[int]) -> None:
        """Prompts that the program took for itself: they are not offered again."""
        self._done.add(prompt_indices)

    def data_state(self) -> dict[str, Any]:
        """Where a resumed run continues in the data: before the oldest group that no committed step has trained on,
        without the prompts after it that are done."""
        live = ((group.prompt.prompt_index, group.before) for group in self._groups.values())
        return self._done.state(live, self._parts.prompts.state)

    # --- internals ---

    def _forget(self, worker: str) -> None:
        self._own.pop(worker, None)
        self._idle.pop(worker, None)

    def _join(self, worker: str, lanes: int, *, is_lent: bool, version: int | None = None) -> None:
        self._lanes[worker] = most_episodes(lanes)
        version = self._state.version if version is None else version
        self.tell(WorkerJoined(worker=worker, lanes=self._lanes[worker], version=version, is_lent=is_lent))

    def _unscored(self) -> list[int]:
        samples = self.settings.samples
        return [number for number, group in self._groups.items() if group.scores is None and group.num_ended == samples]

    def _lacks_scores(self, group: OpenGroup) -> bool:
        return bool(self._parts.roles.reward_models) and group.scores is None

    def _settle(self, number: int) -> None:
        """Tells the scheduler when all episodes of a group have all their rewards."""
        group = self._groups[number]
        if group.num_graded < self.settings.samples or self._lacks_scores(group):
            return
        recipe = self._parts.recipe
        graded, errors = sum_rewards(group.rollouts, group.rewarded(), group.scores or {}, recipe)
        if errors and recipe.grading.on_error == "zero":
            graded, failed = failed_as_zero(graded, errors)
            errors = {row: errors[row] for row in failed}
        # A group without all its rewards is not replaced: that its reward fails is nothing about the prompt.
        self.tell(GroupGraded(group=number, is_uniform=not errors and bool(graded.uniform_N.all())))


def _joined_rows(parts: Sequence[RowRefs[TrajectoryBlock]]) -> RowRefs[TrajectoryBlock] | None:
    return RowRefs.join(parts) if parts else None
