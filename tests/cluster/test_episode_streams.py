# SPDX-License-Identifier: Apache-2.0
"""Streams of episodes, on threads and on the virtual clock: admitted while they run, each once, given up together."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from helpers.clusters import one_role
from helpers.made_batches import make_answer, make_task
from podium.cluster import (
    Computed,
    Metric,
    RoleGroup,
    WorkerContext,
    Workers,
    open_inline,
    open_simulated,
    run_virtual,
)
from podium.controller.recovery import RecoveryPlan
from podium.controller.replacing import WorkerReplacements
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.errors import RoleError, RolloutError, WorkerDiedError
from podium.roles.blocks import block_of, empty_block
from podium.roles.carriers import PromptShard, SamplingPlan
from podium.roles.episode_stream import EpisodeStream, Lost, run_all, streaming, to_free_lanes
from podium.roles.handles import GeneratorHandle
from podium.roles.interfaces import EpisodeSource
from podium.roles.runner_handle import RunnerHandle
from podium.runs.events import recoveries

PLAN = SamplingPlan(max_new_tokens=4, temperature=1.0)


class Source(EpisodeSource):
    """One episode at a time, each of which takes a moment."""

    num_tests: ClassVar[int] = 0  # the thread of a worker that was killed inline ends with its test

    def __init__(self, context: WorkerContext, seconds: float = 0.02) -> None:
        self._seconds, self._test = seconds, Source.num_tests
        self._jobs: deque[TrajectoryId] = deque()
        self._is_finished = self._is_abandoned = False

    def admit(self, shard: PromptShard, plan: SamplingPlan) -> None:
        if any(prompt.prompt_index == 13 for prompt in shard.prompts):
            raise ValueError("an unlucky prompt")
        if any(prompt.prompt_index == 14 for prompt in shard.prompts):
            self._is_abandoned = True  # a defect: the stream ends, and nobody asked for that
        self._jobs.extend(shard.ids)

    def give_back(self, ids: tuple[TrajectoryId, ...]) -> None:
        raise NotImplementedError

    def finish_stream(self, abandon: bool) -> None:
        self._is_finished, self._is_abandoned = True, abandon

    async def stream(self, plan: SamplingPlan) -> AsyncIterator[Computed[TrajectoryBlock]]:  # type: ignore[override]
        count = 0
        while self._test == Source.num_tests and not self._is_abandoned and (self._jobs or not self._is_finished):
            await asyncio.sleep(self._seconds if self._jobs else 0.001)
            if self._jobs:
                id = self._jobs.popleft()
                block, note = block_of([replace(make_answer(id.prompt_index, id.sample), id=id)])
                count += 1
                yield Computed(rows=block, note=note)
        self._jobs.clear()
        self._is_finished = self._is_abandoned = False
        _, note = block_of([])
        counted = Metric(name="generated_tokens", value=float(count), reduction="sum")
        yield Computed(rows=empty_block(), note=note, metrics=(counted,))

    def lanes(self) -> int:
        return 1

    def greet(self) -> str:
        return "here"


class Sources:
    """A handle that replaces workers which die."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.group: RoleGroup[Source] = workers.role("source", Source)

    def streaming(self, plan: SamplingPlan) -> AbstractAsyncContextManager[EpisodeStream]:
        return streaming(self.group, plan)

    async def lanes(self) -> dict[int, int]:
        answers = await self.group.call_all(Source.lanes)
        return {rank: answer.value for rank, answer in zip(self.group.ranks, answers, strict=True)}

    async def replace(self, stream: EpisodeStream, lost: Lost) -> None:
        await self._workers.recover(lost.worker.pool)
        stream.begin([lost.rank])


@pytest.fixture(params=["inline", "simulated"])
def in_cluster(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[Sources], Awaitable[None]]], None]]:
    """Runs a test with two workers, on threads or on the virtual clock."""
    opened, run = {"inline": (open_inline, asyncio.run), "simulated": (open_simulated, run_virtual)}[request.param]

    def with_sources(body: Callable[[Sources], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(30), opened() as cluster:
                await body(Sources(await cluster.start(one_role(Source, name="source"))))

        run(main())

    yield with_sources
    Source.num_tests += 1


def _prompts(*indices: int) -> list[IndexedTask]:
    return [IndexedTask(prompt_index=index, epoch=0, task=make_task(index)) for index in indices]


def _ids(blocks: list[Any]) -> Counter[tuple[int, int]]:
    return Counter((id.prompt_index, id.sample) for block in blocks for id in block.ids)


Body = Callable[[Callable[[Sources], Awaitable[None]]], None]


def test_every_episode_comes_once_with_the_metrics_of_all_workers(in_cluster: Body) -> None:
    async def body(sources: Sources) -> None:
        blocks, metrics = await run_all(sources, _prompts(0, 1, 2), 4, PLAN)
        assert _ids(blocks) == {(index, sample): 1 for index in range(3) for sample in range(4)}
        assert metrics == {"generated_tokens": 12.0}
        blocks, metrics = await run_all(sources, [], 4, PLAN)
        assert (_ids(blocks), metrics) == ({}, {"generated_tokens": 0.0})

    in_cluster(body)


def test_workers_get_prompts_as_their_lanes_become_free() -> None:
    """Workers may have 5 and 3 episodes, of 4 and 2 lanes. Worker 0 is slow, so that worker 1 gets the rest."""
    waiting, lanes = deque(_prompts(*range(9))), {0: 4, 1: 2}
    running: dict[int, dict[tuple[int, int], IndexedTask]] = {0: {}, 1: {}}

    def given() -> dict[int, list[int]]:
        found = to_free_lanes(waiting, 2, lanes, running)
        return {rank: [prompt.prompt_index for prompt in some] for rank, some in found.items()}

    assert given() == {0: [0, 2, 3], 1: [1, 4]}
    assert given() == {}
    for ended, next_one in ((1, 5), (4, 6), (5, 7), (6, 8)):
        for sample in range(2):
            del running[1][ended, sample]
        assert given() == {1: [next_one]}
    assert not waiting
    assert {prompt_index for prompt_index, _ in running[0]} == {0, 2, 3}


def test_prompts_are_admitted_while_others_run(in_cluster: Body) -> None:
    async def body(sources: Sources) -> None:
        found: list[Any] = []
        async with sources.streaming(PLAN) as stream:
            stream.admit(0, _prompts(0), (0, 1))
            async for block in stream:
                found.append(block)
                if len(found) == 1:
                    stream.admit(1, _prompts(1), (0,))
                if len(_ids(found)) == 3:
                    await stream.finish()
        assert _ids(found) == {(0, 0): 1, (0, 1): 1, (1, 0): 1}

    in_cluster(body)


def test_a_stream_that_is_left_early_gives_its_workers_back(in_cluster: Body) -> None:
    async def body(sources: Sources) -> None:
        with pytest.raises(KeyError):
            await leave(sources)
        answers = await sources.group.within(5.0).call_all(Source.greet)
        assert [answer.value for answer in answers] == ["here", "here"]

    async def leave(sources: Sources) -> None:
        async with sources.streaming(PLAN) as stream:
            stream.admit(0, _prompts(*range(9)), tuple(range(50)))
            async for _ in stream:
                raise KeyError("somebody else's error")

    in_cluster(body)


def test_an_admission_that_fails_ends_the_iteration(in_cluster: Body) -> None:
    async def body(sources: Sources) -> None:
        with pytest.raises(RoleError, match="an unlucky prompt"):
            await run_all(sources, _prompts(12, 13), 1, PLAN)

    in_cluster(body)


def test_verl_6387_a_stream_that_ends_unasked_is_an_error_and_no_end(in_cluster: Body) -> None:
    """There, a rollouter that had failed still put the end of its stream into the queue, which the trainer took for the
    end of the data."""

    async def body(sources: Sources) -> None:
        with pytest.raises(RolloutError, match="ended its stream of episodes, and nobody asked it to"):
            await run_all(sources, _prompts(11, 12, 14, 15), 1, PLAN)

    in_cluster(body)


def test_episodes_of_a_worker_that_dies_run_again_under_the_next_attempt(in_cluster: Body) -> None:
    async def body(sources: Sources) -> None:
        ending = asyncio.create_task(_end_soon(sources))
        blocks, _ = await run_all(sources, _prompts(*range(6)), 4, PLAN)
        await ending
        assert _ids(blocks) == {(index, sample): 1 for index in range(6) for sample in range(4)}
        attempts = {id.attempt for block in blocks for id in block.ids}
        assert attempts == {0, 1}  # what it had sent is kept

    async def _end_soon(sources: Sources) -> None:
        await asyncio.sleep(0.1)
        await sources._workers.end_worker(sources.group.workers[1])

    in_cluster(body)


def test_a_handle_that_does_not_replace_raises_the_death(in_cluster: Body) -> None:
    class Fragile(Sources):
        async def replace(self, stream: EpisodeStream, lost: Lost) -> None:
            raise lost.error

    async def body(sources: Sources) -> None:
        fragile = Fragile(sources._workers)
        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(_end(sources)))
        with pytest.raises(WorkerDiedError):
            await run_all(fragile, _prompts(*range(6)), 4, PLAN)

    async def _end(sources: Sources) -> None:
        await sources._workers.end_worker(sources.group.workers[0])

    in_cluster(body)


class QuietGenerator:
    """Serves nobody: the episodes of a Source need no engine."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[asyncio.Future[list[Any]]]:
        served: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        served.set_result([])
        yield served

    async def forget(self, client: str) -> None:
        pass


def _runners(sources: Sources, warnings: list[str], restarts: int = 2, folder: Path | None = None) -> RunnerHandle:
    group: RoleGroup[Any] = sources.group  # a Source has the methods of a runner
    replacements = WorkerReplacements(
        RecoveryPlan(restarts), warn=warnings.append, note=lambda text: None, folder=folder, step=5
    )
    return RunnerHandle(
        sources._workers, group, cast(GeneratorHandle, QuietGenerator()), warn=warnings.append,
        replacements=replacements,
    )  # fmt: skip


def test_a_runner_that_makes_progress_may_die_often_in_one_stream(in_cluster: Body, tmp_path: Path) -> None:
    async def body(sources: Sources) -> None:
        warnings: list[str] = []
        runners = _runners(sources, warnings, folder=tmp_path)
        async with runners.streaming(PLAN) as stream:
            for number in range(5):
                stream.admit(0, _prompts(number), (0, 1, 2))
                await _until_ended(runners, stream, number)
            await stream.finish()
        assert len(warnings) == 5
        found = [(each.part, each.remedy, each.step) for each in recoveries(tmp_path)]
        assert found == [("runner", "retry", 5)] * 5

    async def _until_ended(runners: RunnerHandle, stream: EpisodeStream, number: int) -> None:
        """The runner dies after the first episode of this prompt; its replacement ends the others."""
        ended = 0
        async for arrival in stream:
            if isinstance(arrival, Lost):
                await runners.replace(stream, arrival)
                stream.admit(0, _prompts(number), tuple(range(ended, 3)), 1)
                continue
            ended += len(arrival.ids)
            if ended == 3:
                return
            if ended == 1:
                await runners._workers.end_worker(runners._group.workers[0])

    in_cluster(body)


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_runner_that_dies_again_and_again_ends_the_run(in_cluster: Body, restarts: int) -> None:
    async def body(sources: Sources) -> None:
        warnings: list[str] = []
        runners = _runners(sources, warnings, restarts)
        async with runners.streaming(PLAN) as stream:
            with pytest.raises(WorkerDiedError) as raised:
                await _kill_each(runners, stream)
        assert len(warnings) == restarts
        assert isinstance(raised.value.__cause__, WorkerDiedError)
        assert "runner 0 was replaced 2 times" in str(raised.value) or not restarts
        assert "placement.restarts" in str(raised.value)

    async def _kill_each(runners: RunnerHandle, stream: EpisodeStream) -> None:
        """The other runner's progress does not count."""
        stream.admit(1, _prompts(1), tuple(range(20)))
        await runners._workers.end_worker(runners._group.workers[0])
        async for arrival in stream:
            if isinstance(arrival, Lost):
                await runners.replace(stream, arrival)
                await runners._workers.end_worker(runners._group.workers[0])

    in_cluster(body)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_worker_that_dies_when_all_its_episodes_are_over_loses_nothing(in_cluster: Body, is_noticed: bool) -> None:
    """Its stream ends with the others, instead of one that is opened again and never finished."""

    async def body(sources: Sources) -> None:
        found: list[Any] = []
        async with asyncio.timeout(10), sources.streaming(PLAN) as stream:
            stream.admit(0, _prompts(0), (0,))
            stream.admit(1, _prompts(1), (0,))
            async for arrival in stream:
                assert not isinstance(arrival, Lost)
                found.append(arrival)
                if len(found) == 2:
                    await sources._workers.end_worker(sources.group.workers[1])
                    if is_noticed:
                        await asyncio.wait([stream._pumps[1]])
                    await stream.finish()
        assert _ids(found) == {(0, 0): 1, (1, 0): 1}

    in_cluster(body)
