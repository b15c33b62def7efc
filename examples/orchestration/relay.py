# SPDX-License-Identifier: Apache-2.0
"""The cluster layer from top to bottom: generators make trajectories, a learner of two ranks learns from them.

    python examples/orchestration/relay.py            workers are Ray's processes
    python examples/orchestration/relay.py --inline   workers are threads of this process, for a debugger

No model is trained: the "policy" is one number. Everything between controller and workers is real.
"""

# N trajectories · T tokens of all of them

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from podium.cluster import (
    Cluster,
    Computed,
    Layout,
    MeshShape,
    Metric,
    Pool,
    RayCluster,
    RoleGroup,
    RoleSpec,
    RowRefs,
    WorkerContext,
    open_inline,
    open_ray,
    stored_rows,
)
from podium.data.splitting import split_rows
from podium.data.trajectories import TokenColumn, TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.errors import WorkerDiedError


# --- roles: plain classes. The first argument is the worker's context. ---
@dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """A generator's shard: which trajectories to make."""

    ids: TrajectoryIds


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A learner's shard: references to its rows and to their scores."""

    rows: RowRefs[TrajectoryBlock]
    scores: RowRefs[TokenColumn]

    @property
    def ids(self) -> TrajectoryIds:
        return self.rows.ids


class Generator:
    """Makes trajectories of uneven length."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def generate(self, prompts: Prompts) -> Iterator[Computed[TrajectoryBlock]]:
        """Yields the samples of each prompt when they are finished; yielded rows outlive this worker."""
        for draw in np.unique(prompts.ids.array_N4[:, 0]):
            with self._context.span("sampling"):
                mine = prompts.ids.take(np.flatnonzero(prompts.ids.array_N4[:, 0] == draw))
                block = _sampled(mine)
            yield Computed(rows=block)

    def score(self, held: RowRefs[TrajectoryBlock]) -> Computed[TokenColumn]:
        """A column beside the rows: one value for each token."""
        rows = held.read()
        return Computed(rows=TokenColumn.like(rows, np.sqrt(rows.tokens_T)))


class Learner:
    """Two ranks of it meet in collectives."""

    def __init__(self, context: WorkerContext, value: float) -> None:
        self._context, self._value = context, value

    def update(self, batch: Batch, rate: float) -> Computed[TokenColumn]:
        """Reads its own rows only, agrees with the other ranks, and says which trajectories it has used."""
        gradient = float(batch.scores.read().values_T.sum()) if len(batch.rows) else 0.0
        self._value += rate * self._sum(gradient)
        tokens = float(batch.rows.lengths_N.sum())
        return Computed(done=batch.ids, metrics=(Metric(name="tokens", value=tokens, reduction="sum"),))

    def value(self) -> float:
        return self._value

    def restore(self, value: float) -> None:
        self._value = value

    def _sum(self, number: float) -> float:
        import torch
        import torch.distributed as dist

        group = self._context.group("shard")
        total = torch.tensor([number])
        if group is not None:
            dist.all_reduce(total, group=group)
        return float(total)


def _sampled(ids: TrajectoryIds) -> TrajectoryBlock:
    lengths_N = np.array([4 + each.prompt_index * each.sample % 7 for each in ids])
    total = int(lengths_N.sum())
    return TrajectoryBlock(
        ids=ids,
        offsets=np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int64),
        tokens_T=np.arange(total, dtype=np.int32),
        loss_mask_T=np.ones(total, np.bool_),
        behavior_logprobs_T=np.zeros(total, np.float32),
        versions_T=np.zeros(total, np.int32),
    )


# --- a handle: the controller's typed view of a role, written out so that go-to-definition works. ---
class LearnerHandle:
    """What the program calls."""

    def __init__(self, group: RoleGroup[Learner]) -> None:
        group.requires(Learner.update, Learner.value)  # a missing method fails here, not hours later
        self._group = group

    async def update(self, rows: RowRefs[TrajectoryBlock], scores: RowRefs[TokenColumn], *, rate: float) -> int:
        """Splits the rows by cost, one shard for each data rank; returns the number of trained tokens."""
        plan = split_rows(
            rows.lengths_N,
            rows.lengths_N.astype(float),
            num_ranks=self._group.mesh.shape.world,
            max_tokens=512,
        )
        print(f"  {plan.imbalance:.3f} times even work over {plan.num_ranks} ranks")
        mine = [np.flatnonzero(plan.rank_N == rank) for rank in range(self._group.mesh.shape.world)]
        shards = [Batch(rows=rows.take(cut), scores=scores.select(rows.ids.take(cut))) for cut in mine]
        merged = await self._group.within(60).call_sharded(Learner.update, shards, rate)
        return int(merged.metrics["tokens"])

    async def value(self) -> float:
        return (await self._group.call_one(0, Learner.value)).value


# --- the program: one controller. It sees ids, lengths and references, never a token. ---
async def relay(cluster: Cluster, *, ranks: int) -> None:
    layout = Layout(
        pools=(
            Pool(name="train", slots=ranks),
            Pool(name="rollout", slots=2, collectives=False),  # a dead generator is replaced, the other continues
        ),
        roles=(
            RoleSpec(name="policy", kind=Learner, pool="train", mesh=MeshShape(shard=ranks), arguments=(1.0,)),
            RoleSpec(name="generator", kind=Generator, pool="rollout", mesh=MeshShape(replica=2)),
        ),
    )
    workers = await cluster.start(layout)
    print(workers.registry.describe())
    policy, generator = LearnerHandle(workers.role("policy", Learner)), workers.role("generator", Generator)
    saved = await policy.value()

    async def restore(new: tuple[object, ...]) -> None:
        await workers.role("policy", Learner).call_all(Learner.restore, saved)

    workers.restore_with("policy", restore)
    for step in range(3):
        with cluster.scope(f"step {step}") as objects:
            prompts = [_prompts(range(4 * step, 4 * step + 2)), _prompts(range(4 * step + 2, 4 * step + 4))]
            blocks = [block async for block in generator.stream_sharded(Generator.generate, prompts)]
            rows = objects.hold(stored_rows(blocks))
            halves = [rows.take(half) for half in np.array_split(np.arange(len(rows)), 2)]
            scored = await generator.call_sharded(Generator.score, halves)
            assert scored.rows is not None
            scores = objects.hold(scored.rows)
            if step == 1:
                await workers.end_worker(workers.registry.workers_of("policy")[0])  # as a fault would
            try:
                tokens = await policy.update(rows, scores, rate=0.01)
            except WorkerDiedError as error:
                print(f"step {step}: {error}")
                print(f"rebuilt as {', '.join(map(str, await workers.recover('train')))}")
                tokens = await policy.update(rows, scores, rate=0.01)
            saved = await policy.value()
            print(f"step {step}: {len(rows)} trajectories, {tokens} tokens, policy {saved:.3f}")


def _prompts(draws: range) -> Prompts:
    return Prompts(ids=TrajectoryIds.of(TrajectoryId(draw, sample) for draw in draws for sample in range(4)))


async def main(*, inline: bool) -> None:
    if inline:
        async with open_inline() as cluster:
            await relay(cluster, ranks=1)
    else:
        async with open_ray(RayCluster(cpus=4)) as cluster:
            await relay(cluster, ranks=2)


if __name__ == "__main__":
    asyncio.run(main(inline="--inline" in sys.argv[1:]))
