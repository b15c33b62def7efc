# SPDX-License-Identifier: Apache-2.0
"""The controller's handle of episode runners: a runner that dies is replaced, and its unfinished episodes run again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from podium.cluster import RoleGroup, Workers
from podium.errors import WorkerDiedError
from podium.roles.carriers import SamplingPlan
from podium.roles.episode_runner import EpisodeRunner
from podium.roles.episode_stream import Block, EpisodeStream, Lost, streaming
from podium.roles.handles import DEATH_S, PHASE_S, GeneratorHandle
from podium.roles.interfaces import EpisodeSource
from podium.roles.lost_workers import LostWorker, Replacements


class RunnerHandle:
    """Processes that play episodes of several turns with the generators."""

    def __init__(
        self, workers: Workers, group: RoleGroup[EpisodeRunner], generator: GeneratorHandle,
        *, lent: GeneratorHandle | None = None, warn: Callable[[str], None], replacements: Replacements,
    ) -> None:  # fmt: skip
        """`lent`: generators on the learner's devices, which serve at times. `replacements` decides whether a runner
        that dies is replaced."""
        group.requires(EpisodeSource.stream, EpisodeSource.admit)
        self._workers, self._group, self._generator = workers, group.within(PHASE_S, work_only=True), generator
        self._lent = lent
        self._warn, self._warned = warn, set[str]()
        self._replacements = replacements

    @asynccontextmanager
    async def streaming(self, plan: SamplingPlan) -> AsyncIterator[EpisodeStream]:
        """Streams of all runners, while the generators serve them."""
        async with self._generator.serving() as served:

            async def cause_of(error: Exception) -> Exception:
                """A runner may notice the death of a generator earlier than the controller."""
                if isinstance(error.__cause__, WorkerDiedError):
                    await asyncio.wait({served}, timeout=DEATH_S)
                    if served.done() and isinstance(death := served.exception(), WorkerDiedError):
                        return death
                return error

            def look(task: asyncio.Task[Any]) -> None:
                """Runners would wait for a dead generator."""
                if not task.cancelled() and (error := task.exception()) is not None:
                    stream.fail(error)

            async with streaming(self._group, plan, self._look_at, cause_of) as stream:
                served.add_done_callback(look)
                yield stream
        for answer in served.result():
            stream.note_metrics(answer.worker, answer.value)

    async def use_lent(self, are_lent: bool) -> None:
        """Whether the runners ask generators on the learner's devices too."""
        await self._group.control_all(EpisodeRunner.use_lent, are_lent)

    async def lanes(self) -> Mapping[int, int]:
        """By rank: number of episodes that a runner plays at the same time."""
        answers = await self._group.call_all(EpisodeRunner.lanes)
        return {rank: answer.value for rank, answer in zip(self._group.ranks, answers, strict=True)}

    async def replace(self, stream: EpisodeStream, lost: Lost) -> None:
        """Starts another runner. The requests of the lost one to generators are cancelled. Raises an error if the run
        ends."""
        death = LostWorker(part="runner", worker=lost.worker, error=lost.error, noticed_s=lost.noticed_s)
        with self._replacements.replacing(death, self._replacements.decide(death)):
            await self._generator.forget(str(lost.worker))
            if self._lent is not None:
                await self._lent.forget(str(lost.worker))
            await self._workers.recover(lost.worker.pool)
        stream.begin([lost.rank])

    def _look_at(self, block: Block) -> None:
        """Notes that its runner makes progress. Shows the warnings of a block, equal ones once."""
        if len(block.ids):
            self._replacements.note_work_done("runner", block.rank)
        for warning in block.note.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self._warn(warning)
