# SPDX-License-Identifier: Apache-2.0
"""A controller takes over the workers of another one that is gone, here threads: their state is kept, the calls of the
other one are void, and workers that cannot be taken over are replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from helpers.clusters import one_role
from helpers.roles import Counter
from podium.cluster import Cluster, Computed, Interruptible, Layout, Pool, RoleSpec, WorkerContext, Workers
from podium.cluster import attaching as attaching_module
from podium.cluster.inline import InlineTransport
from podium.cluster.layout import Resources
from podium.cluster.member import Timeouts
from podium.cluster.transport import LeftBehind
from podium.cluster.worker_pool import WorkerPool
from podium.errors import AttachError, RoleError

LIMIT_S = 30.0


class Waiter(Counter, Interruptible):
    """Waits for its controller, until that is gone."""

    def __init__(self, context: WorkerContext, start: int = 0) -> None:
        super().__init__(context, start)
        self.begun, self.ended, self.resets = threading.Event(), threading.Event(), 0

    def wait(self) -> None:
        self.begun.set()
        assert self.ended.wait(LIMIT_S)

    def wait_on(self, rank: int) -> None:  # type: ignore[override]
        if self.context.rank == rank:
            self.wait()

    def has_begun(self) -> bool:
        return self.begun.wait(LIMIT_S)

    def stream(self) -> Iterator[Computed[Any]]:
        self.wait()
        yield from ()

    def num_resets(self) -> int:
        return self.resets

    def abandon(self) -> None:
        self.ended.set()

    def reset(self) -> None:
        self.resets += 1
        self.ended.clear()


class Deaf(Waiter):
    """Does not stop for anybody."""

    def abandon(self) -> None:
        """Nothing ends."""


Body = Callable[[Cluster, Workers], Awaitable[None]]


def after_a_death(layout: Layout, before: Body, after: Body, *, next_layout: Layout | None = None) -> None:
    """`before` runs with the workers of a first controller, which then is forgotten, and `after` with those of the
    second."""

    async def main() -> None:
        transport = InlineTransport()
        first = Cluster(transport)
        workers = await first.start(layout)
        await before(first, workers)
        for pool in workers.pools:
            forget(workers.worker_pool(pool))
        second = Cluster(transport)
        try:
            await after(second, await second.attach(next_layout or layout))
        finally:
            second.end()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def forget(pool: WorkerPool) -> None:
    """Nobody looks at heartbeats any more."""
    for member in pool.members:
        assert member.watcher is not None
        member.watcher.cancel()


async def nothing(cluster: Cluster, workers: Workers) -> None:
    """Does nothing."""


def test_workers_keep_their_state_and_are_the_next_incarnation() -> None:
    async def before(cluster: Cluster, workers: Workers) -> None:
        await workers.role("counter", Counter).call_one(1, Counter.add, 4)

    async def after(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        assert workers.num_attached == 2
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 9]
        assert [worker.incarnation for worker in group.workers] == [1, 1]

    after_a_death(one_role(Counter, (5,)), before, after)


def test_a_call_that_waits_for_the_dead_controller_ends_and_queued_ones_are_refused() -> None:
    refused: list[asyncio.Task[Any]] = []

    async def before(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Waiter)
        waiting = asyncio.create_task(group.call_one(0, Waiter.wait))
        assert (await group.control_one(0, Waiter.has_begun)).value
        refused.append(asyncio.create_task(group.call_one(0, Waiter.add, 100)))
        await asyncio.sleep(0)
        assert not waiting.done()

    async def after(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Waiter)
        assert [answer.value for answer in await group.call_all(Waiter.value)] == [5, 5]
        assert [answer.value for answer in await group.call_all(Waiter.num_resets)] == [1, 1]
        with pytest.raises(RoleError, match="which is another worker"):
            await refused[0]

    after_a_death(one_role(Waiter, (5,)), before, after)


def test_a_worker_that_does_not_get_free_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching_module, "_FREE_S", 0.3)
    calls: list[asyncio.Task[Any]] = []

    async def before(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Deaf)
        await group.call_all(Deaf.add, 1)
        calls.append(asyncio.create_task(group.call_one(0, Deaf.wait)))
        assert (await group.control_one(0, Deaf.has_begun)).value

    async def after(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Deaf)
        assert workers.num_attached == 1
        assert [answer.value for answer in await group.call_all(Deaf.value)] == [5, 6]
        assert [worker.incarnation for worker in group.workers] == [2, 1]
        calls[0].cancel()

    after_a_death(one_role(Deaf, (5,)), before, after)


def test_a_dead_worker_is_replaced() -> None:
    async def before(cluster: Cluster, workers: Workers) -> None:
        await workers.end_worker(workers.role("counter", Counter).workers[1])

    async def after(cluster: Cluster, workers: Workers) -> None:
        assert workers.num_attached == 1
        assert len(await workers.role("counter", Counter).call_all(Counter.value)) == 2

    after_a_death(one_role(Counter), before, after)


def test_a_worker_whose_roles_were_not_all_built_is_replaced() -> None:
    layout = one_role(Counter, (5,), slots=1)
    both = Layout(
        pools=layout.pools,
        roles=(*layout.roles, RoleSpec(name="other", kind=Counter, pool="gen", arguments=(7,))),
    )

    async def after(cluster: Cluster, workers: Workers) -> None:
        assert (await workers.role("other", Counter).call_one(0, Counter.value)).value == 7

    with pytest.raises(AttachError, match="no worker"):
        after_a_death(layout, nothing, after, next_layout=both)

    more = Layout(
        pools=(*both.pools, Pool(name="free", slots=1, each=Resources(cpus=0.1), collectives=False)),
        roles=(*both.roles, RoleSpec(name="third", kind=Counter, pool="free")),
    )
    without = Layout(pools=more.pools, roles=(layout.roles[0], more.roles[2]))
    after_a_death(without, nothing, after, next_layout=more)


def test_ranks_of_which_only_some_began_a_call_are_out_of_step() -> None:
    async def main() -> None:
        transport = InlineTransport()
        first = Cluster(transport)
        workers = await first.start(one_role(Counter))
        group = workers.role("counter", Counter)
        await group.call_all(Counter.add, 1)
        await group.call_one(0, Counter.add, 1)  # of this one rank
        forget(workers.worker_pool("gen"))
        meeting = one_role(Counter, collectives=True)
        assert await broken(transport, meeting) == ""
        second = workers.worker_pool("gen").members[1].process
        second._host._serial += 1  # type: ignore[attr-defined]
        assert "has reached some workers only" in await broken(transport, meeting)
        first.end()

    async def broken(transport: InlineTransport, layout: Layout) -> str:
        workers = Workers(layout, transport, Timeouts(), deadline_s=LIMIT_S)
        pool = workers.worker_pool("gen")
        await attaching_module.attach([pool], layout, await transport.left_behind(layout.pools))
        forget(pool)
        return pool.broken

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_what_has_another_name_is_not_touched() -> None:
    async def main() -> None:
        workers = Workers(one_role(Counter), InlineTransport(), Timeouts(), deadline_s=LIMIT_S)
        left = LeftBehind(processes={"somebody": object()})  # type: ignore[dict-item]
        pools = [workers.worker_pool("gen")]
        assert await attaching_module.attach(pools, one_role(Counter), left) == {"gen": 0}

    asyncio.run(main())


def test_an_unfinished_start_is_ended_and_its_places_are_free() -> None:
    """Its controller died before all workers had started, so that the next one starts all of them."""

    async def main() -> None:
        transport = InlineTransport()
        first = Cluster(transport)
        workers = await first.start(one_role(Counter, (5,)))
        await workers.role("counter", Counter).call_all(Counter.add, 4)
        forget(workers.worker_pool("gen"))
        second = Cluster(transport)

        await second.end_left()

        left = await transport.left_behind(one_role(Counter).pools)
        assert (left.processes, tuple(left.places)) == ({}, ())
        again = await second.start(one_role(Counter, (5,)))
        assert again.num_attached == 0
        assert [answer.value for answer in await again.role("counter", Counter).call_all(Counter.value)] == [5, 5]
        second.end()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
