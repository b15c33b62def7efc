# SPDX-License-Identifier: Apache-2.0
"""Runs the episodes of one step after the other with the newest weights: staleness 0. Episodes are admitted to workers
as they have room, and graded as they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from podium.cluster import ObjectScope, WorkerId
from podium.controller.devices import Devices
from podium.controller.episodes import training_sampling
from podium.controller.grading_queue import GradedPart, GradingQueue
from podium.controller.group_flow import GroupFlow
from podium.controller.ledger import GroupRecord, OpenGroupRecord
from podium.controller.membership import GeneratorLeaves, GeneratorsReady, Membership
from podium.controller.open_groups import SampledStep
from podium.controller.parts import OnPolicyParts
from podium.controller.scheduling import StepRequested, WeightsInstalled
from podium.controller.state import RunState
from podium.errors import WorkerDiedError
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import GraderFacts
from podium.roles.episode_stream import Block, EpisodeStream, Left, Lost


class Executor(Protocol):
    """Carries out the scheduler's actions for the steps of a run, and tells it what happens."""

    async def sample(self, step: int, objects: ObjectScope) -> SampledStep:
        """The generated and graded episodes of the next step. Waits for workers and graders, which have their own
        deadlines."""
        ...

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """Notes that a step is committed. Returns the histories of the groups that ended with it."""
        ...

    def history(self, prompt_index: int) -> Sequence[str]:
        """What happened to a group that ended with the last committed step, one event after the other."""
        ...

    def open_groups(self) -> list[OpenGroupRecord]:
        """The histories so far of groups that are on their way to a step."""
        ...

    def data_state(self) -> dict[str, Any]:
        """Where a run that is resumed after the last committed step continues in the data."""
        ...

    def note_used(self, prompt_indices: Iterable[int]) -> None:
        """Prompts that the program took for itself, beside the groups of its steps."""
        ...

    async def pause(self) -> None:
        """Lets the episodes that run now end, so that the workers can do something else before the next `sample`."""
        ...

    async def close(self) -> None:
        """Gives up what is running."""
        ...

    def end(self) -> None:
        """Notes that the run ends after the last committed step. Raises an error if a group is unaccounted for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """New generators have weights. `lanes`: by rank, sequences that each generates at the same time."""

    lanes: Mapping[int, int]


class StepExecutor:
    """Between two steps nothing runs. Only the controller's single task uses it."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, state: RunState) -> None:
        self._parts, self._devices, self._state = parts, devices, state
        self._flow = GroupFlow(parts, state)
        self._arrivals: asyncio.Queue[
            Block | Lost | Left | GradedPart | GeneratorsReady | GeneratorLeaves | _Joined | Exception
        ] = asyncio.Queue()
        self._opened_with: tuple[WorkerId, ...] | None = None  # generators that the scheduler knows
        self._grader_facts: GraderFacts | None = None
        self._members = Membership(parts, state, self._arrivals.put_nowait)
        self._members.report_lost_to(self._members.lose_one_of_several)
        self._joining: asyncio.Task[None] | None = None  # gives new generators weights
        self._retiring: dict[int, asyncio.Task[None]] = {}  # by rank: generators that give back what they run

    async def sample(self, step: int, objects: ObjectScope) -> SampledStep:
        """Generates and grades the episodes of the next step."""
        grading = GradingQueue(self._parts.roles.grader, self._arrivals.put_nowait)
        metrics: list[dict[str, float]] = []
        grading.open(await self._begin())
        try:
            while not self._flow.is_step_ready:
                if not self._flow.has_admissions and not self._members.is_missing:
                    raise self._flow.standstill()
                metrics.append(await self._generate(grading))
                await self._finish_grading(grading)
        finally:
            await grading.close()
        return self._flow.collect(step, objects, _total(metrics))

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """Notes that a step is committed."""
        return self._flow.commit(step, is_updated=is_updated)

    def history(self, prompt_index: int) -> Sequence[str]:
        """From its admission to its step."""
        return self._flow.history(prompt_index)

    def open_groups(self) -> list[OpenGroupRecord]:
        """Those of a step that has not ended; none between two steps."""
        return self._flow.open_groups()

    def data_state(self) -> dict[str, Any]:
        """The position of the next prompts."""
        return self._flow.data_state()

    def note_used(self, prompt_indices: Iterable[int]) -> None:
        """They are before the position of the next prompts."""

    async def pause(self) -> None:
        """Nothing runs between two steps. Gives the generators the newest weights, and waits for one if there is
        none."""
        await self._members.publish(self._devices, self._state.version)

    async def close(self) -> None:
        """Nothing runs between two steps but generators that start."""
        await self._members.close()

    def end(self) -> None:
        """No group is left between two steps."""
        self._flow.end()

    async def _begin(self) -> GraderFacts:
        """Gives the workers the newest weights, and asks the scheduler for a step."""
        roles, version = self._parts.roles, self._state.version
        await self._members.publish(self._devices, version)
        facts = self._grader_facts
        if facts is None or self._opened_with != roles.generator.workers:
            facts = self._grader_facts = await roles.grader.facts()
            lanes = await roles.episode_workers.lanes()
            self._flow.open(lanes, grades_single=facts.takes_single_episodes)
            self._opened_with = roles.generator.workers
        for publish in self._flow.take_publishes():
            self._flow.tell(WeightsInstalled(worker=publish.worker, version=publish.version))
        self._flow.tell(StepRequested())
        return facts

    async def _generate(self, grading: GradingQueue) -> dict[str, float]:
        """Runs the admitted episodes, and those that are admitted meanwhile. Grades what ends. Returns the workers'
        metrics."""
        workers, flow = self._parts.roles.episode_workers, self._flow
        async with (
            self._devices.phase("rollout"),
            workers.streaming(training_sampling(self._parts.recipe)) as stream,
        ):
            listening = asyncio.create_task(self._listen(stream))
            try:
                await self._admit(stream)
                while flow.num_running or self._is_changing(grading) or self._may_admit_more(grading):
                    match await self._arrivals.get():
                        case GradedPart() as part:
                            flow.note_graded(part)
                        case Exception() as error:
                            raise error
                        case Lost() | Left() | GeneratorsReady() | GeneratorLeaves() | _Joined() as news:
                            await self._note_member(stream, news)
                        case block:
                            for ended in flow.note_arrived(block, str(block.rank)):
                                grading.submit(ended)
                    await self._admit(stream)
                await stream.finish()
                await listening
            finally:
                joining = () if self._joining is None else (self._joining,)
                for task in (listening, *joining, *self._retiring.values()):
                    task.cancel()
                self._joining = None
                self._retiring.clear()
        return stream.metrics

    # --- generators that come and go ---

    async def _note_member(
        self, stream: EpisodeStream, news: Lost | Left | GeneratorsReady | GeneratorLeaves | _Joined
    ) -> None:
        """Notes that a worker was lost or leaves, or that new ones are there. The others go on meanwhile."""
        flow, members = self._flow, self._members
        match news:
            case Lost() if members.moves_episodes:
                self._opened_with = None
                self._retiring.pop(news.rank, None)
                flow.note_lost(str(news.rank))
                members.lose(news.rank, news.error)
                stream.forget(news.rank)
            case Lost():
                await self._parts.roles.episode_workers.replace(stream, news)
                flow.note_lost(str(news.rank))
                flow.note_replaced(str(news.rank), self._state.version)
            case Left():
                self._retiring.pop(news.rank, None)
                flow.note_left(str(news.rank))
                members.leave(news.rank)
            case GeneratorLeaves():
                if members.moves_episodes and news.rank in members.leaving:
                    flow.note_leaving(str(news.rank))
            case GeneratorsReady():
                if members.moves_episodes and self._joining is None:
                    self._joining = asyncio.create_task(self._equip())
            case _Joined(lanes=lanes):
                self._joining = self._opened_with = None
                stream.begin(tuple(lanes))
                for rank, count in lanes.items():
                    flow.note_joined(str(rank), count)
                if members.has_ready:
                    self._arrivals.put_nowait(GeneratorsReady())
            case other:
                assert_never(other)

    async def _equip(self) -> None:
        """Gives new generators weights. The learner waits, so its weights are the newest."""
        lanes: dict[int, int] = {}
        try:
            ranks = await self._members.admit()
            transfer = await self._parts.roles.policy.store(self._state.version) if ranks else None
            for rank in ranks:
                assert transfer is not None
                try:
                    lanes[rank] = await self._members.equip(rank, transfer)
                except WorkerDiedError as error:
                    self._members.lose(rank, error)
            self._arrivals.put_nowait(_Joined(lanes=lanes))
        except Exception as error:
            self._arrivals.put_nowait(error)

    def _is_changing(self, grading: GradingQueue) -> bool:
        """Whether a generator is about to join or leave, or only one that joins can bring the step further."""
        if self._joining is not None or self._retiring:
            return True
        if not self._members.is_missing or self._flow.is_step_ready:
            return False
        is_graded = grading.is_idle and self._arrivals.empty() and not self._flow.has_unscored
        return self._flow.lacks_episodes or is_graded

    async def _finish_grading(self, grading: GradingQueue) -> None:
        """Waits for the rewards of all episodes that have ended. Reward models score them on the devices."""
        # Reward models need their devices first; reward functions need none.
        phase = self._devices.phase if self._parts.roles.reward_models else self._devices.beside
        async with phase("grade"):
            if self._flow.has_unscored:
                await self._flow.score()
            while not grading.is_idle or not self._arrivals.empty():
                match await self._arrivals.get():
                    case GradedPart() as part:
                        self._flow.note_graded(part)
                    case Exception() as error:
                        raise error
                    case _:
                        pass  # a last block, which has metrics only; or a generator, which the next step looks at

    async def _listen(self, stream: EpisodeStream) -> None:
        """Passes on what the stream yields, until it ends or fails."""
        try:
            async for arrival in stream:
                self._arrivals.put_nowait(arrival)
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _admit(self, stream: EpisodeStream) -> None:
        """Sends admitted episodes to their workers, and retires those that leave. When the step has all its groups, the
        stream is finished: its last block then brings the metrics."""
        admissions = self._flow.take_admissions()
        for each in admissions:
            stream.admit(int(each.worker), each.prompts, each.samples, each.attempt, each.begun)
        for rank in self._flow.take_retirements():
            self._retiring[rank] = asyncio.create_task(self._retire(stream, rank))
        if admissions and self._has_all_groups():
            await stream.finish()

    async def _retire(self, stream: EpisodeStream, rank: int) -> None:
        try:
            await stream.retire(rank)
        except Exception as error:
            self._arrivals.put_nowait(error)

    def _has_all_groups(self) -> bool:
        """Whether every group of the step was admitted, and none can be replaced. Episodes of a worker that dies are
        admitted again, to it or to others."""
        settings, roles = self._flow.settings, self._parts.roles
        may_repeat = settings.replaces_uniform or roles.runner is not None or self._members.moves_episodes
        return not may_repeat and self._flow.num_groups == settings.groups_per_step

    def _may_admit_more(self, grading: GradingQueue) -> bool:
        """Whether rewards that are still missing may let the scheduler replace a group."""
        is_graded = grading.is_idle and self._arrivals.empty()
        return self._flow.settings.replaces_uniform and not self._flow.is_step_ready and not is_graded


def _total(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several streams of one step as one."""
    total: dict[str, float] = {}
    for each in metrics:
        for name, value in each.items():
            total[name] = max(total.get(name, 0.0), value) if name == "cache_used" else total.get(name, 0.0) + value
    return total
