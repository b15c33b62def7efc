# SPDX-License-Identifier: Apache-2.0
"""The contract that the controller relies on, over all three clusters: processes of Ray, threads of this process, and
tasks on a virtual clock. The roles wait with `asyncio.sleep`, so that each cluster waits in its own way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from helpers.clusters import drain, one_role
from helpers.roles import Batch, Request, ids, make_block
from podium.cluster import (
    Cluster,
    Computed,
    Layout,
    MeshShape,
    Pool,
    RoleSpec,
    WorkerContext,
    Workers,
    open_inline,
    open_ray,
    open_simulated,
    run_virtual,
    stored_rows,
)
from podium.cluster.objects import InlineStored
from podium.data.trajectories import TrajectoryBlock
from podium.errors import ClusterError, DeadlineError, RoleError, WorkerDiedError


class Waiter:
    """A role whose methods wait, and write down when they began and ended."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.diary: list[str] = []
        self._stop = False

    async def work(self, name: str, seconds: float) -> list[str]:
        self.diary.append(f"{name} begins")
        await asyncio.sleep(seconds)
        self.diary.append(f"{name} ends")
        return self.diary

    async def work_until_stopped(self, name: str) -> list[str]:
        self.diary.append(f"{name} begins")
        while not self._stop:
            await asyncio.sleep(0.01)
        self.diary.append(f"{name} ends")
        return self.diary

    async def begun(self) -> None:
        """Waits for the first call that does work."""
        while not self.diary:
            await asyncio.sleep(0.01)

    def rank(self) -> int:
        """A plain method."""
        return self.context.rank

    async def fail(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise ValueError("the work went wrong")

    async def generate(self, request: Request, pause_s: float) -> AsyncIterator[Computed[TrajectoryBlock]]:
        """One block for each trajectory."""
        for position in range(len(request.ids)):
            await asyncio.sleep(pause_s)
            yield Computed(rows=make_block(request.ids.take(np.array([position]))))

    async def generate_until_stopped(self, request: Request) -> AsyncIterator[Computed[TrajectoryBlock]]:
        """Waits for `stop` from a control thread; then yields everything."""
        while not self._stop:
            await asyncio.sleep(0.01)
        yield Computed(rows=make_block(request.ids))

    async def generate_and_fail(self, request: Request) -> AsyncIterator[Computed[TrajectoryBlock]]:
        yield Computed(rows=make_block(request.ids.take(np.array([0]))))
        await asyncio.sleep(0.01)
        raise ValueError("the stream went wrong")

    def stop(self) -> None:
        self._stop = True

    def tokens_of(self, batch: Batch) -> int:
        """Reads rows on a control thread. They came with the call."""
        assert all(isinstance(piece, InlineStored) for piece in batch.block.pieces)
        return int(batch.block.read().lengths_N.sum())

    async def ask(self, rank: int) -> int:
        """Asks another role's worker directly, over a channel."""
        return await self.context.channel("answerer").call(rank, 5.0, Answerer.answer, 20)


class Answerer:
    """What a channel leads to."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    async def answer(self, number: int) -> int:
        await asyncio.sleep(0.01)
        return number + self.context.rank


@dataclass(frozen=True)
class Kind:
    """One of the clusters."""

    name: str
    open: Callable[[], AbstractAsyncContextManager[Cluster]]
    run: Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["simulated", "inline", pytest.param("ray", marks=[pytest.mark.serial, pytest.mark.slow])])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "ray":
        request.getfixturevalue("local_ray")
        return Kind("ray", open_ray, asyncio.run)
    if request.param == "inline":
        return Kind("inline", open_inline, asyncio.run)
    return Kind("simulated", open_simulated, run_virtual)


WAITERS = one_role(Waiter, name="waiter")


def run(
    kind: Kind, body: Callable[[Workers], Awaitable[None]], layout: Layout = WAITERS, limit_s: float = 60.0
) -> None:
    async def main() -> None:
        async with asyncio.timeout(limit_s), kind.open() as cluster:
            await body(await cluster.start(layout, deadline_s=limit_s / 2))

    kind.run(main())


def test_calls_reach_all_or_one_in_rank_order(kind: Kind) -> None:
    async def body(workers: Workers) -> None:
        group = workers.role("waiter", Waiter)
        assert [answer.value for answer in await group.call_all(Waiter.rank)] == [0, 1]
        assert (await group.call_one(1, Waiter.rank)).value == 1
        assert [answer.worker for answer in await group.call_all(Waiter.rank)] == list(group.workers)

    run(kind, body)


def test_a_worker_does_one_call_after_the_other_and_control_calls_beside_them(kind: Kind) -> None:
    async def body(workers: Workers) -> None:
        group = workers.role("waiter", Waiter)
        first = asyncio.create_task(group.call_one(0, Waiter.work_until_stopped, "first"))
        await group.control_one(0, Waiter.begun)
        second = asyncio.create_task(group.call_one(0, Waiter.work, "second", 0.0))
        beside = await group.control_one(0, Waiter.work, "beside", 0.0)
        assert beside.value == ["first begins", "beside begins", "beside ends"]
        await group.control_one(0, Waiter.stop)
        await first
        assert (await second).value == [
            "first begins", "beside begins", "beside ends", "first ends", "second begins", "second ends",
        ]  # fmt: skip

    run(kind, body)


def test_blocks_of_a_stream_come_one_by_one_and_can_be_read(kind: Kind) -> None:
    async def body(workers: Workers) -> None:
        group = workers.role("waiter", Waiter)
        shards = [Request(ids=ids(range(3))), Request(ids=ids(range(3, 5)))]
        blocks = [block async for block in group.stream_sharded(Waiter.generate, shards, 0.01)]
        assert [len(block.ids) for block in blocks] == [1] * 10  # two of each prompt
        rows = stored_rows(blocks)
        assert rows.ids.same_as(ids(range(5)))
        assert rows.read().ids.same_as(ids(range(5)))

    run(kind, body)


def test_many_control_calls_read_the_same_rows_at_the_same_time(kind: Kind) -> None:
    """Ray 2.60 loses a value where one thread of a worker drops a reference while another gets it: 1 read in 1,000
    waited forever."""

    async def body(workers: Workers) -> None:
        group = workers.role("waiter", Waiter)
        for _ in range(12):
            blocks = [block async for block in group.stream_one(0, Waiter.generate, Request(ids=ids(range(4))), 0.0)]
            batches = [Batch(block=stored_rows([block])) for block in blocks for _ in range(8)]
            tokens = await asyncio.gather(*(group.control_one(1, Waiter.tokens_of, batch) for batch in batches))
            assert [answer.value for answer in tokens] == [int(batch.block.lengths_N.sum()) for batch in batches]

    run(kind, body)


def test_a_control_call_ends_a_stream_that_waits_for_it(kind: Kind) -> None:
    async def body(workers: Workers) -> None:
        group = workers.role("waiter", Waiter)
        stream = group.stream_one(0, Waiter.generate_until_stopped, Request(ids=ids(range(2))))
        arriving = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        assert not arriving.done()
        await group.control_all(Waiter.stop)
        assert len((await arriving).ids) == 4

    run(kind, body)


def test_an_exception_of_a_role_names_its_worker(kind: Kind) -> None:
    async def body(workers: Workers) -> None:
        group = workers.role("waiter", Waiter)
        with pytest.raises(RoleError, match="the work went wrong") as caught:
            await group.call_one(1, Waiter.fail, 0.01)
        assert str(group.workers[1]) in str(caught.value)
        blocks: list[Any] = []
        stream = group.stream_one(0, Waiter.generate_and_fail, Request(ids=ids(range(2))))
        with pytest.raises(RoleError, match="the stream went wrong"):
            await drain(stream, then=blocks.append)
        assert len(blocks) == 1

    run(kind, body)


def test_a_call_that_takes_too_long_ends_at_its_deadline(kind: Kind) -> None:
    async def body(workers: Workers) -> None:
        group = workers.role("waiter", Waiter)
        with pytest.raises(DeadlineError):
            await group.within(0.3).call_one(0, Waiter.work, "late", 2.0)

    run(kind, body)


def test_a_worker_that_is_ended_fails_its_calls_and_is_replaced(kind: Kind) -> None:
    async def body(workers: Workers) -> None:
        group, restored = workers.role("waiter", Waiter), []

        async def restore(new: tuple[Any, ...]) -> None:
            restored.append(new)

        workers.restore_with("waiter", restore)
        lost = group.workers[1]
        busy = asyncio.create_task(group.call_one(1, Waiter.work, "lost", 30.0))
        await asyncio.sleep(0.1)
        await workers.end_worker(lost)
        with pytest.raises(WorkerDiedError):
            await busy
        with pytest.raises(WorkerDiedError):
            await group.call_one(1, Waiter.rank)
        new = await workers.recover("gen")
        assert [worker.index for worker in new] == [1]
        assert restored == [new]
        assert group.workers[1] != lost
        assert [answer.value for answer in await group.call_all(Waiter.rank)] == [0, 1]

    run(kind, body)


def test_workers_call_each_other_over_a_channel(kind: Kind) -> None:
    layout = Layout(
        pools=(Pool(name="gen", slots=1, collectives=False), Pool(name="other", slots=2, collectives=False)),
        roles=(
            RoleSpec(name="waiter", kind=Waiter, pool="gen", mesh=MeshShape(replica=1)),
            RoleSpec(name="answerer", kind=Answerer, pool="other", mesh=MeshShape(replica=2)),
        ),
    )

    async def body(workers: Workers) -> None:
        await workers.open_channel("answerer", to="waiter")
        group = workers.role("waiter", Waiter)
        assert (await group.call_one(0, Waiter.ask, 1)).value == 21

    run(kind, body, layout)


def test_a_channel_is_opened_again_beside_a_caller_that_is_dead(kind: Kind) -> None:
    """The caller's successor gets the handles when it starts."""
    layout = Layout(
        pools=(Pool(name="gen", slots=1, collectives=False), Pool(name="other", slots=1, collectives=False)),
        roles=(
            RoleSpec(name="waiter", kind=Waiter, pool="gen", mesh=MeshShape(replica=1)),
            RoleSpec(name="answerer", kind=Answerer, pool="other", mesh=MeshShape(replica=1)),
        ),
    )

    async def body(workers: Workers) -> None:
        await workers.open_channel("answerer", to="waiter")
        waiters, answerers = workers.role("waiter", Waiter), workers.role("answerer", Answerer)
        for group in (waiters, answerers):
            await workers.end_worker(group.workers[0])
        await workers.recover("other")
        await workers.recover("gen")
        assert (await waiters.call_one(0, Waiter.ask, 0)).value == 20

    run(kind, body, layout)


# Of the simulated one alone


def _simulated(body: Callable[[Workers], Awaitable[None]]) -> None:
    run(Kind("simulated", open_simulated, run_virtual), body, limit_s=1e6)


def test_a_simulated_day_takes_no_time() -> None:
    async def body(workers: Workers) -> None:
        group, clock = workers.role("waiter", Waiter), asyncio.get_running_loop().time
        before = clock()
        await group.within(1e6).call_all(Waiter.work, "long", 86_400.0)
        assert clock() - before == pytest.approx(86_400.0)

    began = time.monotonic()
    _simulated(body)
    assert time.monotonic() - began < 5


def test_a_simulation_takes_the_same_course_every_time() -> None:
    def course() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def body(workers: Workers) -> None:
            group, clock = workers.role("waiter", Waiter), asyncio.get_running_loop().time
            shards = [Request(ids=ids(range(6))), Request(ids=ids(range(6, 9)))]
            stream = group.stream_sharded(Waiter.generate, shards, 0.7)
            await drain(stream, then=lambda block: seen.append((clock(), str(block.ids))))

        _simulated(body)
        return seen

    assert course() == course()
    assert len(course()) == 18


def test_simulated_pools_with_collectives_and_links_need_no_torch() -> None:
    layout = Layout(
        pools=(Pool(name="train", slots=64), Pool(name="rollout", slots=32, collectives=False)),
        roles=(
            RoleSpec(name="waiter", kind=Waiter, pool="train", mesh=MeshShape(shard=64)),
            RoleSpec(name="answerer", kind=Answerer, pool="rollout", mesh=MeshShape(replica=32)),
        ),
    )

    async def body(workers: Workers) -> None:
        await workers.connect("weights", ["waiter", "answerer"])
        group = workers.role("waiter", Waiter)
        assert [answer.value for answer in await group.call_all(Waiter.rank)] == list(range(64))
        await workers.end_worker(group.workers[3])
        assert len(await workers.recover("train")) == 64  # all of them: they meet in collectives

    run(Kind("simulated", open_simulated, run_virtual), body, layout)


def test_a_program_that_waits_for_nothing_is_a_deadlock() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(ClusterError, match="stands still"):
        run_virtual(forever())


def test_a_simulated_cluster_needs_a_virtual_clock() -> None:
    async def main() -> None:
        async with open_simulated():
            pass

    with pytest.raises(ClusterError, match="run_virtual"):
        asyncio.run(main())
