# SPDX-License-Identifier: Apache-2.0
"""A started layout for one test, and waiting for what its workers do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest

from helpers.processes import ray_workers, wait_until
from podium.cluster import Cluster, Layout, MeshShape, Pool, RoleSpec, Workers
from podium.cluster.health import Died
from podium.cluster.member import Timeouts

Opener = Callable[[], AbstractAsyncContextManager[Cluster]]
Value = TypeVar("Value")
Body = Callable[[Cluster, Workers], Awaitable[None]]


# For contracts of the controller's side, which both clusters share: inline always, on Ray in the slow group.
inline_then_ray = pytest.mark.parametrize(
    "open_cluster", ["inline", pytest.param("ray", marks=pytest.mark.slow)], indirect=True
)


def in_cluster(
    open_cluster: Opener, what: Layout, body: Body, *, timeouts: Timeouts | None = None, limit_s: float = 60.0
) -> None:
    """Runs `body` with the layout started, within the limit."""

    async def main() -> None:
        async with open_cluster() as cluster:
            started = await cluster.start(what, timeouts or Timeouts(), deadline_s=limit_s / 2)
            await body(cluster, started)

    asyncio.run(asyncio.wait_for(main(), limit_s))


def one_role(
    kind: type[Any],
    arguments: tuple[Any, ...] = (),
    *,
    slots: int = 2,
    collectives: bool = False,
    mesh: MeshShape | None = None,
    name: str = "counter",
    pool: str = "gen",
) -> Layout:
    """One pool with one role on all of its slots."""
    shape = mesh or (MeshShape(shard=slots) if collectives else MeshShape(replica=slots))
    return Layout(
        pools=(Pool(name=pool, slots=slots, collectives=collectives),),
        roles=(RoleSpec(name=name, kind=kind, pool=pool, mesh=shape, arguments=arguments),),
    )


async def next_death(workers: Workers, *, within_s: float) -> Died:
    """Waits until one of the current workers has died."""
    deaths = [member.death for pool in workers._worker_pools.values() for member in pool.members]
    async with asyncio.timeout(within_s):
        done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()


async def eventually(happened: Callable[[], Awaitable[bool]], what: str, *, deadline_s: float = 20.0) -> None:
    """Returns as soon as it has happened, and lets other tasks run meanwhile."""
    end = time.monotonic() + deadline_s
    while not await happened():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s:.0f} s"
        await asyncio.sleep(0.01)


async def drain(stream: AsyncIterator[Value], *, then: Callable[[Value], object] = lambda each: None) -> None:
    """Everything that a stream gives, handed on as it comes: what came before an error is not lost."""
    async for each in stream:
        then(each)


async def until_all_in(workers: Workers, pool: str, span: str) -> None:
    """Returns when the work thread of every worker of the pool is inside the span."""

    async def there() -> bool:
        report = await workers.where(pool)
        return [place for place, _ in report.groups() if f"{span}," not in place] == []

    await eventually(there, f"all of {pool} being in {span}")


def wait_until_gone(*processes: int, deadline_s: float = 10.0) -> None:
    """Returns when none of these workers' processes lives."""
    wait_until(lambda: not set(processes) & set(ray_workers()), f"the end of {processes}", deadline_s=deadline_s)
