# SPDX-License-Identifier: Apache-2.0
"""Calls that reach a role while it works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from helpers.roles import Summer
from podium.cluster import Cluster, Layout, MeshShape, Pool, RoleSpec, WorkerContext
from podium.errors import RoleError

Opener = Callable[[], AbstractAsyncContextManager[Cluster]]


class Pausable:
    """Works until it gets a request to stop."""

    def __init__(self, context: WorkerContext) -> None:
        self._stop, self._turns = threading.Event(), 0

    def work(self) -> int:
        while not self._stop.wait(0.01):
            self._turns += 1
        return self._turns

    def turns(self) -> int:
        return self._turns

    def stop(self, *, quietly: bool = True) -> str:
        if not quietly:
            raise ValueError("not like that")
        self._stop.set()
        return "stopping"


def run(open_cluster: Opener, layout: Layout, body: Callable[..., object]) -> None:
    async def main() -> None:
        async with open_cluster() as cluster:
            await body(await cluster.start(layout, deadline_s=60))  # type: ignore[misc]

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_control_call_reaches_a_role_that_is_at_work(open_cluster: Opener) -> None:
    layout = Layout(
        pools=(Pool(name="gen", slots=2, collectives=False),),
        roles=(RoleSpec(name="generator", kind=Pausable, pool="gen", mesh=MeshShape(replica=2)),),
    )

    async def body(workers: object) -> None:
        group = workers.role("generator", Pausable)  # type: ignore[attr-defined]
        working = asyncio.create_task(group.call_all(Pausable.work))
        while min(answer.value for answer in await group.control_all(Pausable.turns)) < 3:
            assert not working.done()
        with pytest.raises(RoleError, match="not like that"):
            await group.control_one(1, Pausable.stop, quietly=False)
        assert not working.done()
        assert [answer.value for answer in await group.control_all(Pausable.stop)] == ["stopping"] * 2
        assert min(answer.value for answer in await working) >= 3

    run(open_cluster, layout, body)


def test_calls_that_several_tasks_make_at_once_reach_all_ranks_in_one_order(open_on_ray: Opener) -> None:
    """Else the collectives of different calls would meet each other."""
    layout = Layout(
        pools=(Pool(name="train", slots=2),),
        roles=(RoleSpec(name="policy", kind=Summer, pool="train", mesh=MeshShape(shard=2)),),
    )

    async def body(workers: object) -> None:
        group = workers.role("policy", Summer)  # type: ignore[attr-defined]

        async def call(number: int) -> list[float]:
            if number % 3 == 0:  # a large argument is sent by reference, which takes another way
                await group.call_all(Summer.measure, np.zeros(100_000 + number))
            return [answer.value for answer in await group.call_all(Summer.all_sum, float(number))]

        found = await asyncio.gather(*(call(number) for number in range(30)))
        assert found == [[3.0 * number] * 2 for number in range(30)]

    run(open_on_ray, layout, body)
