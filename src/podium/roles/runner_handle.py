# SPDX-License-Identifier: Apache-2.0
"""The controller's handle of episode runners: a runner that dies is replaced, and its unfinished episodes run again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from podium.cluster import RoleGroup, ShardResult, Workers
from podium.cluster.streams import merged
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryBlock
from podium.errors import WorkerDiedError
from podium.roles.carriers import PromptShard, SamplingPlan
from podium.roles.episode_runner import EpisodeRunner
from podium.roles.handles import PHASE_S, GeneratorHandle

Block = ShardResult[TrajectoryBlock]

# How often one runner may die in one call before the run ends. User code cannot kill it, so the cause is elsewhere.
_MOST_DEATHS = 3


class RunnerHandle:
    """Processes that play episodes of several turns with the generators."""

    def __init__(
        self, workers: Workers, group: RoleGroup[EpisodeRunner], generator: GeneratorHandle,
        *, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        group.requires(EpisodeRunner.run)
        self._workers, self._group, self._generator = workers, group.within(PHASE_S), generator
        self._warn, self._warned = warn, set[str]()

    async def generate(
        self, prompts: Sequence[IndexedTask], samples: int, plan: SamplingPlan, *, attempt: int = 0
    ) -> AsyncIterator[Block]:
        """Like the generators' `generate`, with an environment between the turns."""
        count = self._group.mesh.shape.world
        shards = [
            PromptShard(prompts=tuple(prompts[first::count]), samples=samples, attempt=attempt)
            for first in range(count)
        ]
        last: Block | None = None
        async with self._generator.serving() as served:
            async for block in merged([self._played(rank, shard, plan) for rank, shard in enumerate(shards)]):
                self._show(block.note.warnings)
                if last is not None:
                    yield last
                last = block
        if last is not None:  # the generators' metrics travel with the last block
            metrics = tuple(metric for answer in served.result() for metric in answer.value)
            yield replace(last, metrics=(*last.metrics, *metrics))

    async def _played(self, rank: int, shard: PromptShard, plan: SamplingPlan) -> AsyncIterator[Block]:
        """One runner's blocks. Groups that a dead runner finished are kept. Its other groups run again under the next
        attempt, with the same random numbers."""
        for num_deaths in range(1, _MOST_DEATHS + 1):
            finished, worker = set[int](), self._group.workers[rank]
            try:
                async for block in self._group.stream_one(rank, EpisodeRunner.run, shard, plan):
                    finished.update(block.ids.array_N4[:, 0].tolist())
                    yield block
                return
            except WorkerDiedError as error:
                if num_deaths == _MOST_DEATHS:
                    raise
                self._warn(f"{str(error).splitlines()[0]} Its unfinished episodes are run again.")
            await self._generator.forget(str(worker))
            await self._workers.recover(worker.pool)
            left = tuple(prompt for prompt in shard.prompts if prompt.prompt_index not in finished)
            shard = PromptShard(prompts=left, samples=shard.samples, attempt=shard.attempt + 1)

    def _show(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self._warn(warning)
