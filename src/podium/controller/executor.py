# SPDX-License-Identifier: Apache-2.0
"""Runs the episodes of one step after the other with the newest weights: staleness 0. Episodes are admitted to workers
as they have room, and graded as they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from podium.cluster import ObjectScope
from podium.controller.devices import Devices
from podium.controller.episodes import training_sampling
from podium.controller.grading_queue import GradedPart, GradingQueue
from podium.controller.group_flow import GroupFlow, SampledStep
from podium.controller.ledger import GroupRecord
from podium.controller.parts import OnPolicyParts
from podium.controller.replacing import is_replaceable, replace_generator
from podium.controller.scheduling import StepRequested, WeightsInstalled
from podium.controller.state import RunState
from podium.recipe import OnPolicyRecipe
from podium.roles.episode_stream import Block, EpisodeStream, Lost


class Executor(Protocol):
    """Carries out the scheduler's actions for the steps of a run, and tells it what happens."""

    async def sample(self, step: int, objects: ObjectScope) -> SampledStep:
        """The generated and graded episodes of the next step. Waits for workers and graders, which have their own
        deadlines."""
        ...

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """Notes that a step is committed. Returns the histories of the groups that ended with it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replaced:
    """A generator that died has a successor, with a stream."""

    rank: int


class StepExecutor:
    """Between two steps nothing runs. Only the controller's single task uses it."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, state: RunState) -> None:
        self._parts, self._devices, self._state = parts, devices, state
        self._flow = GroupFlow(parts, state)
        self._is_open = False
        self._arrivals: asyncio.Queue[Block | Lost | GradedPart | _Replaced | Exception] = asyncio.Queue()
        self._replacing: dict[int, asyncio.Task[None]] = {}  # by rank: generators that died

    async def sample(self, step: int, objects: ObjectScope) -> SampledStep:
        """Generates and grades the episodes of the next step."""
        grading = GradingQueue(self._parts.roles.grader, self._arrivals.put_nowait)
        metrics: list[dict[str, float]] = []
        await self._begin()
        try:
            while not self._flow.is_step_ready:
                if not self._flow.has_admissions:
                    raise self._flow.standstill()
                metrics.append(await self._generate(grading))
                await self._finish_grading(grading)
        finally:
            await grading.close()
        return self._flow.collect(step, objects, _total(metrics))

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """Notes that a step is committed."""
        return self._flow.commit(step, is_updated=is_updated)

    def data_state(self) -> dict[str, Any]:
        """The position of the next prompts."""
        return self._flow.data_state()

    def note_used(self, prompt_indices: Iterable[int]) -> None:
        """They are before the position of the next prompts."""

    async def pause(self) -> None:
        """Nothing runs between two steps."""

    async def close(self) -> None:
        """Nothing runs between two steps."""

    async def _begin(self) -> None:
        """Gives the workers the newest weights, and asks the scheduler for a step."""
        roles, version = self._parts.roles, self._state.version
        await self._devices.publish(version)
        if not self._is_open:
            facts, lanes = await roles.grader.facts(), await roles.episode_workers.lanes()
            self._flow.open(lanes, grades_single=facts.takes_single_episodes)
            self._is_open = True
        for publish in self._flow.take_publishes():
            self._flow.tell(WeightsInstalled(worker=publish.worker, version=publish.version))
        self._flow.tell(StepRequested())

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
                while flow.num_running or self._replacing or self._may_admit_more(grading):
                    match await self._arrivals.get():
                        case Lost() as lost if is_replaceable(self._parts):
                            flow.note_lost(str(lost.rank))
                            self._replace(stream, lost)
                        case Lost() as lost:
                            await workers.replace(stream, lost)
                            flow.note_lost(str(lost.rank))
                            flow.note_replaced(str(lost.rank))
                        case _Replaced() as replaced:
                            del self._replacing[replaced.rank]
                            flow.note_replaced(str(replaced.rank))
                        case GradedPart() as part:
                            flow.note_graded(part)
                        case Exception() as error:
                            raise error
                        case block:
                            for ended in flow.note_arrived(block, str(block.rank)):
                                grading.submit(ended)
                    await self._admit(stream)
                await stream.finish()
                await listening
            finally:
                for task in (listening, *self._replacing.values()):
                    task.cancel()
        return stream.metrics

    def _replace(self, stream: EpisodeStream, lost: Lost) -> None:
        """Starts another generator while the others go on. The learner waits, so its weights are the newest."""

        async def replace() -> None:
            policy, state = self._parts.roles.policy, self._state
            try:
                await replace_generator(self._parts, stream, lost, lambda: policy.store(state.version), step=state.step)
                self._arrivals.put_nowait(_Replaced(rank=lost.rank))
            except Exception as error:
                self._arrivals.put_nowait(error)

        self._replacing[lost.rank] = asyncio.create_task(replace())

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
                        pass  # a last block, which has metrics only

    async def _listen(self, stream: EpisodeStream) -> None:
        """Passes on what the stream yields, until it ends or fails."""
        try:
            async for arrival in stream:
                self._arrivals.put_nowait(arrival)
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _admit(self, stream: EpisodeStream) -> None:
        """Sends admitted episodes to their workers. When the step has all its groups, the stream is finished: its last
        block then brings the metrics."""
        admissions = self._flow.take_admissions()
        for each in admissions:
            stream.admit(int(each.worker), each.prompts, each.samples, each.attempt)
        if admissions and self._has_all_groups():
            await stream.finish()

    def _has_all_groups(self) -> bool:
        """Whether every group of the step was admitted, and none can be replaced. Episodes of a worker that dies are
        admitted again, to it or to others."""
        settings, roles = self._flow.settings, self._parts.roles
        may_repeat = settings.replaces_uniform or roles.runner is not None or is_replaceable(self._parts)
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
