# SPDX-License-Identifier: Apache-2.0
"""Pools that wait for room, lose their node and come back, on nodes that are numbers and workers that are threads."""

import asyncio
import re

import pytest

from helpers.roles import Counter
from podium.cluster.cluster import Cluster
from podium.cluster.inline import InlineTransport
from podium.cluster.layout import Layout, Pool, RoleSpec
from podium.cluster.member import Timeouts
from podium.cluster.meshes import MeshShape
from podium.cluster.placement import NodeState
from podium.cluster.transport import BundlePlace
from podium.errors import PlacementError

HURRIED = Timeouts(place_s=0.3, start_s=10, beat_s=0.05)


class Nodes(InlineTransport):
    """Threads on nodes that have so many CPUs; what is reserved is counted."""

    def __init__(self, **cpus):
        super().__init__()
        self.cpus, self.places, self.looks = cpus, [], 0

    def nodes(self):
        self.looks += 1
        used = {name: sum(p.bundle.needs["CPU"] for p in self.places if p.node.id == name) for name in self.cpus}
        return tuple(
            NodeState(id=name, name=name, total={"CPU": cpus}, free={"CPU": cpus - used[name]})
            for name, cpus in self.cpus.items()
        )

    async def reserve(self, bundles, nodes, deadline_s):
        made = [BundlePlace(bundle=bundle, node=node, handle=None) for bundle, node in zip(bundles, nodes, strict=True)]
        self.places += made
        return made

    def release(self, place):
        if place in self.places:
            self.places.remove(place)

    async def next_look(self):
        """Somebody has looked for room, in vain if he is not done by then."""
        before = self.looks
        while self.looks == before:
            await asyncio.sleep(0)

    def where(self, pool):
        """Node of each slot of a pool."""
        return [
            place.node.id
            for place in sorted(self.places, key=lambda place: place.bundle.slots)
            if place.bundle.pool == pool
            for _ in place.bundle.slots
        ]


def layout(*pools):
    return Layout(
        pools=pools,
        roles=tuple(
            RoleSpec(name=f"role of {pool.name}", kind=Counter, pool=pool.name, mesh=MeshShape(replica=pool.slots))
            for pool in pools
        ),
    )


def pool(name, slots, **kind):
    return Pool(name=name, slots=slots, collectives=False, **kind)


def in_cluster(transport, body):
    """Runs `body(cluster)`; whatever comes of it, nothing stays reserved."""

    async def main():
        cluster = Cluster(transport)
        try:
            await body(cluster)
        finally:
            cluster.end()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert transport.places == []


async def started(cluster, *pools):
    return await cluster.start(layout(*pools), HURRIED, deadline_s=10)


def test_neighbours_share_nodes_and_a_pool_stays_on_few():
    transport = Nodes(a=2.0, b=2.0, c=2.0)

    async def body(cluster):
        await started(cluster, pool("gen", 4))
        assert transport.where("gen") == ["a", "a", "b", "b"]

    in_cluster(transport, body)


def test_what_can_never_fit_is_refused_at_once():
    async def body(cluster):
        with pytest.raises(PlacementError, match=r"\bgen\b.*1 × 3 slots"):
            await started(cluster, pool("gen", 3, one_node=True))

    in_cluster(Nodes(a=2.0, b=2.0), body)


def test_groups_of_slots_are_never_on_two_nodes():
    transport = Nodes(a=3.0, b=3.0)

    async def body(cluster):
        await started(cluster, pool("learn", 4, together=2))
        assert transport.where("learn") == ["a", "a", "b", "b"]

    in_cluster(transport, body)


def test_a_group_whose_node_is_gone_moves_as_a_whole():
    transport = Nodes(a=2.0, b=3.0, c=2.0)

    async def body(cluster):
        workers = await started(cluster, pool("learn", 4, together=2))
        first, second = transport.where("learn")[::2]
        assert first != second
        for worker in workers.role("role of learn", Counter).workers[:2]:
            await workers.end_worker(worker)
        del transport.cpus[first]
        await workers.recover("learn", deadline_s=10)
        (rest,) = {"a", "b", "c"} - {first, second}
        assert transport.where("learn") == [rest, rest, second, second]

    in_cluster(transport, body)


def test_a_pool_waits_until_others_give_back_what_it_needs():
    transport = Nodes(a=2.0)

    async def body(cluster):
        others = await started(cluster, pool("first", 2))
        waiting = asyncio.create_task(started(cluster, pool("second", 1)))
        await transport.next_look()
        assert not waiting.done()
        others.end()
        await waiting
        assert transport.where("second") == ["a"]

    in_cluster(transport, body)


def test_a_pool_that_waited_in_vain_says_how_long_and_for_what():
    async def body(cluster):
        await started(cluster, pool("first", 2))
        with pytest.raises(PlacementError) as refused:
            await started(cluster, pool("second", 1))
        assert re.search(r"  a: .*2 CPU.*0 CPU", str(refused.value))
        assert "Waited" in str(refused.value)

    in_cluster(Nodes(a=2.0), body)


@pytest.mark.parametrize("order", [("wide", "whole"), ("whole", "wide")])
def test_pools_that_fit_together_start_whatever_their_order(order):
    # The one-node pool needs a whole node: the spread one must not take a slot on each.
    pools = {"wide": pool("wide", 2, spread=True), "whole": pool("whole", 2, one_node=True)}
    transport = Nodes(a=2.0, b=2.0)

    async def body(cluster):
        await started(cluster, *(pools[name] for name in order))
        assert len({*transport.where("wide"), *transport.where("whole")}) == 2

    in_cluster(transport, body)


def test_a_pool_whose_node_is_gone_is_placed_on_another():
    transport = Nodes(a=1.0, b=1.0, c=1.0)

    async def body(cluster):
        workers = await started(cluster, pool("gen", 2))
        before = workers.role("role of gen", Counter).workers
        lost = before[0]
        await workers.end_worker(lost)
        del transport.cpus[transport.where("gen")[0]]
        (new,) = await workers.recover("gen", deadline_s=10)
        assert (new.index, new.incarnation) == (lost.index, lost.incarnation + 1)
        assert sorted(transport.where("gen")) == ["b", "c"]
        answers = await workers.role("role of gen", Counter).call_all(Counter.value)
        assert [answer.worker for answer in answers] == [new, before[1]]

    in_cluster(transport, body)


def test_a_recovery_waits_for_a_node_that_joins():
    transport = Nodes(a=1.0)

    async def body(cluster):
        workers = await started(cluster, pool("gen", 1))
        await workers.end_worker(workers.role("role of gen", Counter).workers[0])
        transport.cpus.clear()
        recovering = asyncio.create_task(workers.recover("gen", deadline_s=10))
        await transport.next_look()
        transport.cpus["b"] = 1.0
        await recovering
        assert transport.where("gen") == ["b"]

    in_cluster(transport, body)


def test_a_recovery_that_failed_for_want_of_room_can_be_tried_again():
    transport = Nodes(a=1.0)

    async def body(cluster):
        workers = await started(cluster, pool("gen", 1))
        await workers.end_worker(workers.role("role of gen", Counter).workers[0])
        transport.cpus.clear()
        with pytest.raises(PlacementError, match="no node"):
            await workers.recover("gen", deadline_s=10)
        transport.cpus["b"] = 1.0
        (new,) = await workers.recover("gen", deadline_s=10)
        (answer,) = await workers.role("role of gen", Counter).call_all(Counter.value)
        assert answer.worker == new

    in_cluster(transport, body)
