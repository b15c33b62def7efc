# SPDX-License-Identifier: Apache-2.0
"""Carries out the scheduler's actions for a step and tells it what happens: episodes are admitted to workers, graded as
they end, and collected into the step."""

# N episodes

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from podium.cluster import ObjectScope
from podium.controller.devices import Devices
from podium.controller.episodes import training_sampling
from podium.controller.grading import failed_as_zero, model_scores, sum_rewards, without_failed
from podium.controller.grading_queue import GradedPart, GradingQueue
from podium.controller.ledger import GroupRecord
from podium.controller.parts import OnPolicyParts
from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Action,
    Admit,
    EpisodeEnded,
    Event,
    GroupGraded,
    Publish,
    ScheduleSettings,
    StartStep,
    StepCommitted,
    StepRequested,
    WeightsInstalled,
    WorkerJoined,
)
from podium.controller.state import RunState
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryIds
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import Floats
from podium.roles.episode_stream import Block, EpisodeStream, Lost
from podium.roles.grading_handle import Rewarded
from podium.roles.stages import GradedRollouts, Rollouts

# A worker is given a quarter more episodes than it runs at the same time: a free lane must not wait for a message.
_AHEAD = 4


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """The episodes of a prompt that have ended, and their rewards so far."""

    prompt: IndexedTask
    episodes: list[Rollouts] = field(default_factory=list)  # one part for each block that had some
    graded: list[GradedPart] = field(default_factory=list)
    scores: dict[int, Floats] | None = None  # of reward models

    @property
    def rollouts(self) -> Rollouts:
        """All episodes that have ended, ids ascending."""
        return Rollouts.join(self.episodes)

    @property
    def num_graded(self) -> int:
        """Episodes with results of all reward functions."""
        return sum(len(part.rollouts) for part in self.graded)

    def rewarded(self) -> Rewarded:
        """The results of reward functions in the order of `rollouts`."""
        order = TrajectoryIds.concatenate([part.rollouts.rows.ids for part in self.graded]).order
        return Rewarded.join([part.rewarded for part in self.graded]).take(order)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledStep:
    """The episodes of a step: all that were sampled for it, and those to train on."""

    sampled: GradedRollouts
    episodes: GradedRollouts


def schedule_settings(recipe: OnPolicyRecipe) -> ScheduleSettings:
    """What the recipe fixes for the scheduler."""
    rollout, algorithm = recipe.rollout, recipe.full_algorithm
    return ScheduleSettings(
        steps=recipe.steps,
        groups_per_step=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        replaces_uniform=algorithm.dynamic_sampling,
        max_replaced=algorithm.num_refills * rollout.prompts_per_step,
    )


class StepExecutor:
    """Runs the episodes of steps. Only the controller's single task uses it."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, state: RunState) -> None:
        self._parts, self._devices, self._state = parts, devices, state
        self._settings = settings = schedule_settings(parts.recipe)
        self._scheduler = GroupScheduler(settings, step=state.step, version=state.version)
        self._audit = ScheduleAudit(settings, step=state.step, version=state.version)
        self._groups: dict[int, _Group] = {}
        self._numbers: dict[int, int] = {}  # prompt index -> group, until its step begins
        self._prompt_indices: dict[int, int] = {}  # group -> prompt index, until its step is committed
        self._admits: list[Admit] = []  # decided and not sent yet
        self._publishes: list[Publish] = []  # decided and not carried out yet
        self._start: StartStep | None = None
        self._running: Counter[str] = Counter()  # worker -> episodes that were admitted and have not ended
        self._lanes: tuple[int, ...] = ()  # by rank: episodes that a worker is given; empty before the first step
        self._arrivals: asyncio.Queue[Block | Lost | GradedPart | Exception] = asyncio.Queue()
        self._grades_single = False  # whether episodes are graded one by one

    async def sample(self, step: int, objects: ObjectScope) -> SampledStep:
        """Generates and grades the episodes of the next step. Waits for workers and graders, which have their own
        deadlines."""
        grading = GradingQueue(self._parts.roles.grader, self._arrivals.put_nowait)
        metrics: list[dict[str, float]] = []
        await self._begin()
        try:
            while self._start is None:
                metrics.append(await self._generate(step, objects, grading))
                await self._finish_grading(grading)
        finally:
            await grading.close()
        start, self._start = self._start, None
        return self._collect(start, step, metrics)

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """Tells the scheduler that a step is committed. Returns the histories of the groups that ended with it."""
        self._tell(StepCommitted(step=step, version=step if is_updated else None))
        return [
            GroupRecord(
                prompt_index=self._prompt_indices.pop(each.number),
                step=step,
                attempts=each.attempts,
                admitted_version=each.admitted_version,
                oldest_version=each.oldest,
                newest_version=each.newest,
                trained_version=each.trained_version,
                void=each.void,
            )
            for each in self._audit.take_finished()
        ]

    # --- the phases of a step ---

    async def _begin(self) -> None:
        """Gives the workers the newest weights, and asks the scheduler for a step."""
        roles, version = self._parts.roles, self._state.version
        await self._devices.publish(version)
        if not self._lanes:
            self._grades_single = (await roles.grader.facts()).takes_single_episodes
            self._lanes = tuple(lanes + -(-lanes // _AHEAD) for lanes in await roles.episode_workers.lanes())
            for rank, lanes in enumerate(self._lanes):
                self._tell(WorkerJoined(worker=str(rank), lanes=lanes, version=version))
        publishes, self._publishes = self._publishes, []
        for publish in publishes:
            self._tell(WeightsInstalled(worker=publish.worker, version=publish.version))
        self._tell(StepRequested())

    async def _generate(self, step: int, objects: ObjectScope, grading: GradingQueue) -> dict[str, float]:
        """Runs the admitted episodes, and those that are admitted meanwhile. Grades what ends. Returns the workers'
        metrics."""
        workers = self._parts.roles.episode_workers
        async with (
            self._devices.phase("rollout"),
            workers.streaming(training_sampling(self._parts.recipe)) as stream,
        ):
            listening = asyncio.create_task(self._listen(stream))
            try:
                await self._admit(stream)
                while self._running.total() or self._may_admit_more(grading):
                    match await self._arrivals.get():
                        case Lost() as lost:
                            await workers.replace(stream, lost)
                            self._lose(lost)
                        case GradedPart() as part:
                            self._note_graded(part)
                        case Exception() as error:
                            raise error
                        case block:
                            self._note_ended(block, step, objects, grading)
                    await self._admit(stream)
                await stream.finish()
                await listening
            finally:
                listening.cancel()
        return stream.metrics

    async def _finish_grading(self, grading: GradingQueue) -> None:
        """Waits for the rewards of all episodes that have ended. Reward models score them on the devices."""
        models = self._parts.roles.reward_models
        # Reward models need their devices first; reward functions need none.
        phase = self._devices.phase if models else self._devices.beside
        async with phase("grade"):
            unscored = {number: group for number, group in self._groups.items() if group.scores is None}
            if models and unscored:
                rollouts = Rollouts.join([group.rollouts for group in unscored.values()])
                scores = await model_scores(rollouts, models)
                for number, group in unscored.items():
                    mine = np.flatnonzero(rollouts.group_N == group.prompt.prompt_index)
                    group.scores = {index: scores_N[mine] for index, scores_N in scores.items()}
                    self._settle(number)
            while not grading.is_idle or not self._arrivals.empty():
                match await self._arrivals.get():
                    case GradedPart() as part:
                        self._note_graded(part)
                    case Exception() as error:
                        raise error
                    case _:
                        pass  # a last block, which has metrics only

    async def _listen(self, stream: EpisodeStream) -> None:
        """Passes on what the stream yields, until it ends or fails."""
        try:
            async for arrival in stream:
                self._arrivals.put_nowait(arrival)
        except Exception as error:
            self._arrivals.put_nowait(error)

    def _has_all_groups(self) -> bool:
        """Whether every group of the step was admitted, and none can be replaced."""
        return not self._settings.replaces_uniform and len(self._groups) == self._settings.groups_per_step

    def _may_admit_more(self, grading: GradingQueue) -> bool:
        """Whether rewards that are still missing may let the scheduler replace a group."""
        is_graded = grading.is_idle and self._arrivals.empty()
        return self._settings.replaces_uniform and self._start is None and not is_graded

    # --- what happens ---

    def _tell(self, event: Event) -> None:
        actions: Sequence[Action] = self._scheduler.decide(event)
        self._audit.observe(event, actions)
        for action in actions:
            match action:
                case Admit():
                    self._admits.append(action)
                    self._running[action.worker] += len(action.samples)
                case Publish():
                    self._publishes.append(action)
                case StartStep():
                    self._start = action
                case _:
                    pass  # grading begins when episodes end; a void group stays with its step

    async def _admit(self, stream: EpisodeStream) -> None:
        """Sends admitted groups to their workers. New numbers take the next prompts of the data. When the step has all
        its groups, the stream is finished: its last block then brings the metrics."""
        admits, self._admits = self._admits, []
        new = sorted({admit.group for admit in admits} - self._groups.keys())
        for number, prompt in zip(new, self._parts.prompts.take(len(new)), strict=True):
            self._groups[number] = _Group(prompt=prompt)
            self._numbers[prompt.prompt_index], self._prompt_indices[number] = number, prompt.prompt_index
        together: defaultdict[tuple[int, tuple[int, ...], int], list[IndexedTask]] = defaultdict(list)
        for admit in admits:
            together[int(admit.worker), admit.samples, admit.attempt].append(self._groups[admit.group].prompt)
        for (rank, samples, attempt), prompts in together.items():
            stream.admit(rank, prompts, samples, attempt)
        if admits and self._has_all_groups():
            await stream.finish()

    def _lose(self, lost: Lost) -> None:
        """The worker is replaced already: the scheduler gives it its episodes again."""

    def _note_ended(self, block: Block, step: int, objects: ObjectScope, grading: GradingQueue) -> None:
        """Notes the episodes of a block and has them graded, one by one or when their group is complete."""
        if not len(block.ids):
            return  # it has metrics only
        numbers = sorted({self._numbers[index] for index in block.ids.array_N4[:, 0].tolist()})
        prompts = [self._groups[number].prompt for number in numbers]
        tasks = {prompt.prompt_index: prompt.task for prompt in prompts}
        rollouts = Rollouts.of([block], tasks, step=step, version=self._state.version, metrics={})
        objects.hold(rollouts.rows)
        complete: list[Rollouts] = []
        for number, prompt in zip(numbers, prompts, strict=True):
            group = self._groups[number]
            mine = rollouts.take(np.flatnonzero(rollouts.group_N == prompt.prompt_index))
            group.episodes.append(mine)
            if self._grades_single:
                complete.append(mine)
            elif sum(len(part) for part in group.episodes) == self._settings.samples:
                complete.append(group.rollouts)
        note, rank = rollouts.note, str(block.rank)
        for row, (index, sample, _, attempt) in enumerate(rollouts.rows.ids.array_N4.tolist()):
            self._running[rank] -= 1
            self._tell(
                EpisodeEnded(
                    group=self._numbers[index],
                    attempt=attempt,
                    sample=sample,
                    worker=rank,
                    oldest=int(note.version_N[row]),
                    newest=int(note.newest_version_N[row]),
                )
            )
        for part in complete:
            grading.submit(part)

    def _note_graded(self, part: GradedPart) -> None:
        """Notes rewards, which may be of several groups."""
        for index in np.unique(part.rollouts.group_N).tolist():
            rows, number = np.flatnonzero(part.rollouts.group_N == index), self._numbers[index]
            graded = GradedPart(rollouts=part.rollouts.take(rows), rewarded=part.rewarded.take(rows))
            self._groups[number].graded.append(graded)
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Tells the scheduler when all episodes of a group have all their rewards."""
        group = self._groups[number]
        if group.num_graded < self._settings.samples or (self._parts.roles.reward_models and group.scores is None):
            return
        recipe = self._parts.recipe
        graded, errors = sum_rewards(group.rollouts, group.rewarded(), group.scores or {}, recipe)
        if errors and recipe.grading.on_error == "zero":
            graded, errors = failed_as_zero(graded, errors), {}
        # A group without all its rewards is not replaced: that its reward fails is nothing about the prompt.
        self._tell(GroupGraded(group=number, is_uniform=not errors and bool(graded.uniform_N.all())))

    # --- the result ---

    def _collect(self, start: StartStep, step: int, metrics: Sequence[dict[str, float]]) -> SampledStep:
        """Joins the groups of a step in the order of the data."""
        recipe, numbers = self._parts.recipe, sorted((*start.groups, *start.voided))
        groups = [self._groups.pop(number) for number in numbers]
        rollouts = replace(Rollouts.join([group.rollouts for group in groups]), metrics=_total(metrics))
        rewarded = Rewarded.join([group.rewarded() for group in groups])
        models = [index for index, _ in self._parts.roles.reward_models]
        scores = {index: np.concatenate([(group.scores or {})[index] for group in groups]) for index in models}
        everything, errors = sum_rewards(rollouts, rewarded, scores, recipe)
        sampled = without_failed(everything, errors, recipe.grading, self._parts.log.console.warning)
        voided = [
            group.prompt.prompt_index for number, group in zip(numbers, groups, strict=True) if number in start.voided
        ]
        for group in groups:
            del self._numbers[group.prompt.prompt_index]
        trained = sampled.take(np.flatnonzero(~np.isin(sampled.group_N, voided))) if voided else sampled
        return SampledStep(sampled=sampled, episodes=trained)


def _total(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several streams of one step as one."""
    total: dict[str, float] = {}
    for each in metrics:
        for name, value in each.items():
            total[name] = max(total.get(name, 0.0), value) if name == "cache_used" else total.get(name, 0.0) + value
    return total
