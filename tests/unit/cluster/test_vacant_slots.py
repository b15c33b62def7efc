# SPDX-License-Identifier: Apache-2.0
"""Pools that go on with fewer workers, and get more when there is room: on nodes that are numbers, and on simulated
ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from helpers.roles import Counter
from podium.cluster import Cluster, Layout, MeshShape, Pool, Resources, RoleSpec, Workers, open_simulated, run_virtual
from podium.cluster.health import Leaving
from podium.cluster.inline import InlineTransport
from podium.cluster.placement import Bundle, Fits, NodeState, TooLarge, preflight
from podium.cluster.simulated_faults import (
    GENERATOR_SLOT,
    NodeFault,
    SimulatedDrain,
    SimulatedJoin,
    SimulatedNodeLoss,
    SimulatedNotice,
    WorkerFault,
)
from podium.errors import PlacementError, WorkerDiedError

EACH = Resources(cpus=0.9, custom={GENERATOR_SLOT: 1.0})


def gen(slots: int, **more: Any) -> Pool:
    return Pool(name="gen", slots=slots, each=EACH, collectives=False, **more)


def simulated(
    pool: Pool, body: Callable[[Workers], Awaitable[None]], *faults: WorkerFault | NodeFault, num_nodes: int = 2
) -> None:
    """Runs `body` with the workers of this pool on so many nodes."""
    role = RoleSpec(name="counter", kind=Counter, pool=pool.name, mesh=MeshShape(replica=pool.slots))

    async def main() -> None:
        async with open_simulated(faults, start_s=1.0, num_nodes=num_nodes) as cluster:
            await body(await cluster.start(Layout(pools=(pool,), roles=(role,)), deadline_s=1e9))

    run_virtual(main(), limit_s=1e6)


async def ranks_that_answer(workers: Workers) -> list[int]:
    return [answer.worker.index for answer in await workers.role("counter", Counter).call_all(Counter.value)]


async def until(time_s: float) -> None:
    await asyncio.sleep(time_s - asyncio.get_running_loop().time())


def test_slots_beyond_those_of_the_start_are_vacant_until_a_node_joins() -> None:
    async def body(workers: Workers) -> None:
        group = workers.role("counter", Counter)
        assert await ranks_that_answer(workers) == [0, 1]
        assert await workers.fill("gen") == ()  # there is no room
        with pytest.raises(WorkerDiedError, match=r"rank 2 .* vacant"):
            await group.call_one(2, Counter.value)

        await workers.nodes_changed("gen")
        await until(10.5)
        assert await workers.fill("gen") == (2,)
        assert await ranks_that_answer(workers) == [0, 1]  # nobody has admitted it
        (new,) = await workers.admit("gen")

        assert (new.index, new.incarnation) == (2, 0)
        assert await ranks_that_answer(workers) == [0, 1, 2]
        assert (await group.call_one(2, Counter.add, 5)).worker == new

    simulated(gen(4, at_start=2), body, SimulatedJoin(at_s=10.0))


def test_a_pool_goes_on_without_a_worker_whose_node_is_gone_until_there_is_another() -> None:
    async def body(workers: Workers) -> None:
        await until(5.5)
        with pytest.raises(WorkerDiedError):
            await ranks_that_answer(workers)
        workers.vacate("gen", workers.worker_pool("gen").dead)
        assert await ranks_that_answer(workers) == [1]
        assert not workers.is_damaged("gen")
        assert await workers.recover("gen") == ()
        assert await workers.fill("gen") == ()

        await until(15.5)
        assert await workers.fill("gen") == (0,)
        (new,) = await workers.admit("gen")
        assert (new.index, new.incarnation) == (0, 1)
        assert await ranks_that_answer(workers) == [0, 1]

    simulated(gen(2), body, SimulatedNodeLoss(at_s=5.0, node=0, seconds=10.0))


def test_a_worker_that_dies_keeps_its_place_for_the_next() -> None:
    async def body(workers: Workers) -> None:
        (first, _) = workers.role("counter", Counter).workers
        await workers.end_worker(first)
        workers.vacate("gen", [0])
        assert await workers.fill("gen") == (0,)
        (new,) = await workers.admit("gen")
        assert new.node == first.node

    simulated(gen(2), body)


def test_a_new_worker_that_dies_before_it_is_admitted_is_started_again() -> None:
    async def body(workers: Workers) -> None:
        workers.vacate("gen", [0])
        assert await workers.fill("gen") == (0,)
        (member,) = [each for each in workers.worker_pool("gen").members if each.slot == 0]
        workers.worker_pool("gen").mark_dead(member, "it was ended")
        assert await workers.admit("gen") == ()
        assert await workers.fill("gen") == (0,)
        (new,) = await workers.admit("gen")
        assert new.incarnation == 2

    simulated(gen(2), body)


@pytest.mark.parametrize(
    "fault",
    [
        SimulatedNotice(at_s=5.0, pool="gen", slot=1, grace_s=4.0),
        SimulatedDrain(at_s=5.0, node=1, grace_s=4.0, seconds=1e9),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_worker_that_will_be_gone_is_reported_works_on_and_dies_after_its_grace_period(
    fault: SimulatedNotice | SimulatedDrain,
) -> None:
    async def body(workers: Workers) -> None:
        reported: list[tuple[float, Leaving]] = []
        workers.report_leaving_to(lambda each: reported.append((asyncio.get_running_loop().time(), each)))
        looking = asyncio.create_task(look(workers))
        await until(8.9)
        assert await ranks_that_answer(workers) == [0, 1]
        ((time_s, leaving),) = reported
        assert (time_s, leaving.worker.index) == (5.0, 1)
        await until(9.1)
        assert workers.worker_pool("gen").dead == (1,)
        looking.cancel()

    async def look(workers: Workers) -> None:
        while True:
            await workers.nodes_changed("gen")

    simulated(gen(2, grace_s=4.0), body, fault)


def test_the_node_of_a_worker_that_left_is_avoided_for_the_grace_period() -> None:
    async def body(workers: Workers) -> None:
        await until(10.0)
        workers.vacate("gen", [1], frees_places=True)
        assert await workers.fill("gen") == ()
        await workers.nodes_changed("gen")  # its place is free
        await workers.nodes_changed("gen")
        assert asyncio.get_running_loop().time() == pytest.approx(30.0)
        assert await workers.fill("gen") == (1,)

    simulated(gen(2, grace_s=20.0), body)


def test_a_node_that_is_being_drained_takes_nobody() -> None:
    node = NodeState(id="a", name="a", total={"CPU": 4.0}, free={"CPU": 4.0})
    bundle = Bundle(pool="gen", slots=(0,), needs={"CPU": 1.0})

    assert isinstance(preflight([bundle], [node]), Fits)
    assert isinstance(preflight([bundle], [replace(node, is_draining=True)]), TooLarge)


def test_a_start_needs_room_for_its_first_slots_only() -> None:
    class Small(InlineTransport):
        def nodes(self) -> tuple[NodeState, ...]:
            return (NodeState(id="a", name="a", total={"CPU": 2.0}, free={"CPU": 2.0}),)

    def layout(at_start: int) -> Layout:
        pool = Pool(name="gen", slots=5, collectives=False, at_start=at_start)
        return Layout(pools=(pool,), roles=(RoleSpec(name="c", kind=Counter, pool="gen", mesh=MeshShape(replica=5)),))

    Cluster(Small()).check(layout(2))
    with pytest.raises(PlacementError, match="3 ×"):
        Cluster(Small()).check(layout(3))


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"slots": 2, "at_start": 3, "collectives": False}, "fills 3"),
        ({"slots": 2, "at_start": 0, "collectives": False}, "fills 0"),
        ({"slots": 2, "at_start": 1}, "collectives"),
    ],
)
def test_a_pool_that_cannot_start_so_is_refused(pool: dict[str, Any], words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        Pool(name="gen", **pool)
