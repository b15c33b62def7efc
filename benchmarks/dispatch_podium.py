# SPDX-License-Identifier: Apache-2.0
"""Podium's side of the dispatch benchmark: the same four workers, the same trajectories, the same added one.

    .venv/bin/python benchmarks/dispatch_podium.py --lengths lengths.npy

    values             the controller has the tokens: cuts, sends, and brings the column back
    references         the blocks are in the object store (where Podium's generators leave them): the controller cuts
                       and sends references, and the column stays in the store
    references_read    the same, and the controller reads the column
A hand-off lets the workers of one role, which hold the rows, return them to the object store, and those of another
read them; the column comes back to the controller.

wall_s and driver_cpu_s (time.process_time: every thread of the driver) are medians, as on verl's side.
driver_bytes is what the driver serializes and deserializes in one call, by Ray's pickler.
"""

# N trajectories · T tokens of all of them

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

from podium.cluster import Cluster, Computed, Layout, MeshShape, Pool, RayCluster, RoleSpec, RowRefs, WorkerContext
from podium.cluster import open_ray as open_cluster
from podium.data.trajectories import TokenColumn, TrajectoryBlock, TrajectoryIds

NUM_WORKERS = 4
VOCABULARY = 151_643
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Values:
    """A shard that carries its rows."""

    block: TrajectoryBlock
    advantages: TokenColumn

    @property
    def ids(self) -> TrajectoryIds:
        return self.block.ids


@dataclass(frozen=True, kw_only=True, eq=False)
class References:
    """A shard that says where its rows are."""

    block: RowRefs[TrajectoryBlock]
    advantages: RowRefs[TokenColumn]

    @property
    def ids(self) -> TrajectoryIds:
        return self.block.ids


class Adder:
    """A worker whose only work is to add one to a column."""

    def __init__(self, context: WorkerContext) -> None:
        self._held: TrajectoryBlock | None = None

    def empty(self) -> None:
        """The empty call."""

    def add_one(self, shard: Values) -> Computed[TokenColumn]:
        return _plus_one(shard.block)

    def add_one_by_reference(self, shard: References) -> Computed[TokenColumn]:
        shard.advantages.read()
        return _plus_one(shard.block.read())

    def add_one_to_block(self, shard: References) -> Computed[TokenColumn]:
        return _plus_one(shard.block.read())

    def hold(self, shard: Values) -> Computed[TokenColumn]:
        """Keeps its rows, as a generator that has just made them would."""
        copied = {name: np.array(getattr(shard.block, name)) for name in ("tokens_T", "loss_mask_T", "versions_T")}
        logprobs = np.array(shard.block.behavior_logprobs_T)
        self._held = TrajectoryBlock(
            ids=shard.ids, offsets=np.array(shard.block.offsets), behavior_logprobs_T=logprobs, **copied
        )
        return Computed(done=shard.ids)

    def give(self, shard: Values) -> Computed[TrajectoryBlock]:
        assert self._held is not None
        return Computed(rows=self._held)

    def store(self, shard: Values) -> Computed[TrajectoryBlock]:
        return Computed(rows=shard.block)

    def store_column(self, shard: Values) -> Computed[TokenColumn]:
        return Computed(rows=shard.advantages)


def _plus_one(block: TrajectoryBlock) -> Computed[TokenColumn]:
    return Computed(rows=TokenColumn.like(block, block.behavior_logprobs_T + np.float32(1)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A shard of ids only."""

    ids: TrajectoryIds


def make(lengths_N: np.ndarray) -> Values:
    """N trajectories in groups of eight, of the columns that verl's side sends (masks and positions follow from the
    offsets here)."""
    random = np.random.default_rng(len(lengths_N))
    count, total = len(lengths_N), int(lengths_N.sum())
    rows = np.arange(count)
    ids = TrajectoryIds(np.stack([rows // 8, rows % 8, rows * 0, rows * 0], axis=1).astype(np.int64))
    offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int64)
    block = TrajectoryBlock(
        ids=ids,
        offsets=offsets,
        tokens_T=random.integers(1, VOCABULARY, total).astype(np.int32),
        loss_mask_T=np.arange(total) - np.repeat(offsets[:-1], lengths_N) >= np.repeat(lengths_N // 4, lengths_N),
        behavior_logprobs_T=-random.exponential(size=total).astype(np.float32),
        versions_T=np.zeros(total, np.int32),
    )
    column = random.standard_normal(total, dtype=np.float32)
    return Values(block=block, advantages=TokenColumn.like(block, column))


class Bench:
    """All parts on one cluster."""

    def __init__(self, asked: argparse.Namespace, cluster: Cluster) -> None:
        self.asked, self.cluster = asked, cluster
        self.found: Figures = {"settings": vars(asked)}

    async def run(self) -> None:
        await self.start()
        self.found["empty_call"] = await self.timed(lambda: self.taker.call_all(Adder.empty), repeats=50)
        floor = [self.taker._worker_pool().member(worker).process._actor for worker in self.taker.workers]  # type: ignore[attr-defined]
        self.found["empty_call_ray"] = await self.timed(lambda: _by_ray(floor), repeats=50)
        lengths = np.load(self.asked.lengths).astype(np.int64)
        for count in self.asked.counts:
            await self.dispatch(lengths[:count])

    async def start(self) -> None:
        """From nothing to the first answer of all workers; Ray itself runs already."""
        walls = []
        for _ in range(self.asked.starts):
            start = time.perf_counter()
            workers = await self.cluster.start(
                Layout(
                    pools=(Pool(name="rows", slots=NUM_WORKERS, collectives=False),),
                    roles=(
                        RoleSpec(name="giver", kind=Adder, pool="rows", mesh=MeshShape(replica=NUM_WORKERS)),
                        RoleSpec(name="taker", kind=Adder, pool="rows", mesh=MeshShape(replica=NUM_WORKERS)),
                    ),
                )
            )
            self.giver, self.taker = workers.role("giver", Adder), workers.role("taker", Adder)
            await self.taker.call_all(Adder.empty)
            walls.append(time.perf_counter() - start)
            if len(walls) < self.asked.starts:
                workers.end()
        self.found["group_start"] = {"wall_s": statistics.median(walls), "wall_s_all": walls, "repeats": len(walls)}

    async def dispatch(self, lengths_N: np.ndarray) -> None:
        count, batch = len(lengths_N), make(lengths_N)
        cuts = np.array_split(np.arange(count), NUM_WORKERS)
        expected = batch.block.behavior_logprobs_T + np.float32(1)

        def values() -> list[Values]:
            return [Values(block=batch.block.take(cut), advantages=batch.advantages.take(cut)) for cut in cuts]

        async def by_value() -> np.ndarray:
            merged = await self.taker.call_sharded(Adder.add_one, values())
            assert merged.rows is not None
            return merged.rows.read().values_T

        assert np.array_equal(await by_value(), expected)
        moved = pickled_bytes(values()) + expected.nbytes + 8 * count
        figures = self.found.setdefault("dispatch", {}).setdefault(str(count), {})
        figures["values"] = await self.timed(by_value, driver_bytes=moved)

        block = (await self.giver.call_sharded(Adder.store, values())).rows
        column = (await self.giver.call_sharded(Adder.store_column, values())).rows
        assert block is not None
        assert column is not None

        def references() -> list[References]:
            return [References(block=block.take(cut), advantages=column.take(cut)) for cut in cuts]

        async def by_reference() -> RowRefs[TokenColumn]:
            merged = await self.taker.call_sharded(Adder.add_one_by_reference, references())
            assert merged.rows is not None
            return merged.rows

        async def and_read() -> np.ndarray:
            return (await by_reference()).read().values_T

        assert np.array_equal(await and_read(), expected)
        light = pickled_bytes([(shard.ids, shard.block.lengths_N, shard.block.row_N) for shard in references()]) * 2
        figures["references"] = await self.timed(by_reference, driver_bytes=light)
        figures["references_read"] = await self.timed(and_read, driver_bytes=light + expected.nbytes)

        await self.giver.call_sharded(Adder.hold, values())
        asked = [Asked(ids=batch.ids.take(cut)) for cut in cuts]

        async def hand_off() -> np.ndarray:
            given = (await self.giver.call_sharded(Adder.give, asked)).rows
            assert given is not None
            shards = [References(block=given.take(cut), advantages=column.take(cut)) for cut in cuts]
            merged = await self.taker.call_sharded(Adder.add_one_to_block, shards)
            assert merged.rows is not None
            return merged.rows.read().values_T

        assert np.array_equal(await hand_off(), expected)
        handed = self.found.setdefault("handoff", {}).setdefault(str(count), {})
        handed["references_read"] = await self.timed(hand_off, driver_bytes=2 * light + expected.nbytes)
        self.found.setdefault("tokens", {})[str(count)] = int(lengths_N.sum())

    async def timed(
        self, call: Callable[[], Awaitable[Any]], *, driver_bytes: int | None = None, repeats: int = 0
    ) -> Figures:
        for _ in range(self.asked.warmups):
            await call()
        walls: list[float] = []
        driver_cpus: list[float] = []
        for _ in range(repeats or self.asked.repeats):
            cpu, start = time.process_time(), time.perf_counter()
            result = await call()
            walls.append(time.perf_counter() - start)
            driver_cpus.append(time.process_time() - cpu)
            del result
        figures: Figures = {"wall_s": statistics.median(walls), "driver_cpu_s": statistics.median(driver_cpus)}
        figures["driver_bytes"] = driver_bytes
        return figures | {"wall_s_range": [min(walls), max(walls)], "repeats": len(walls)}


async def _by_ray(actors: list[Any]) -> None:
    """Ray's own floor: its cheapest method of the same actors, got at once."""
    ray.get([actor.handshake.remote() for actor in actors])


def pickled_bytes(value: Any) -> int:
    """What Ray would write for `value`: the pickle and its out-of-band buffers."""
    buffers: list[Any] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(buffer.raw().nbytes for buffer in buffers)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Podium's side of the dispatch benchmark")
    parser.add_argument("--lengths", required=True, help=".npy file of trajectory lengths")
    parser.add_argument("--counts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--starts", type=int, default=3)
    asked = parser.parse_args()
    async with open_cluster(RayCluster(cpus=24, object_store_bytes=3 * 2**30, show_output=False)) as cluster:
        touched = [
            ray.put(np.ones(2**25)) for _ in range(6)
        ]  # first touch of the store's pages costs five times a later
        del touched
        bench = Bench(asked, cluster)
        await bench.run()
    print(json.dumps(bench.found))


if __name__ == "__main__":
    asyncio.run(main())
