# SPDX-License-Identifier: Apache-2.0
"""What a controller may rely on, whether its workers are Ray's processes or threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from helpers.roles import Counter
from podium.cluster import Cluster, Layout, MeshShape, Pool, RoleSpec, Workers

Opener = Callable[[], AbstractAsyncContextManager[Cluster]]


def layout(replicas: int = 2) -> Layout:
    return Layout(
        pools=(Pool(name="gen", slots=replicas, collectives=False),),
        roles=(RoleSpec(name="counter", kind=Counter, pool="gen", mesh=MeshShape(replica=replicas), arguments=(5,)),),
    )


def in_cluster(open_cluster: Opener, body: Callable[[Cluster, Workers], Awaitable[None]], what: Layout) -> None:
    """Runs `body` with the layout started, within a minute."""

    async def main() -> None:
        async with open_cluster() as cluster:
            await body(cluster, await cluster.start(what, deadline_s=30))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_to_all_is_answered_in_rank_order(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        answers = await group.call_all(Counter.add, 3, twice=True)
        assert [answer.value for answer in answers] == [11, 11]
        assert [answer.worker for answer in answers] == list(group.workers)

    in_cluster(open_cluster, body, layout())
