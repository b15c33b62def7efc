# SPDX-License-Identifier: Apache-2.0
"""Calls that reach a role while it works, and streams of data ranks that have several workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from helpers.roles import Request, Summer, ids, make_block
from podium.cluster import Cluster, Computed, Layout, MeshShape, Pool, RoleSpec, WorkerContext
from podium.data.trajectories import TrajectoryBlock
from podium.errors import RoleError, WorkerDiedError

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


class PairGenerator(Summer):
    """Two workers make one trajectory together: they agree on it in a collective."""

    def generate_together(self, request: Request, dies_at: int = -1) -> Iterator[Computed[TrajectoryBlock]]:
        for position in range(len(request.ids)):
            if position == dies_at and not self.context.is_source:
                os.kill(os.getpid(), signal.SIGKILL)
            assert self.all_sum(1.0) == 3.0
            yield Computed(rows=make_block(request.ids.take(np.array([position]))))


@pytest.mark.slow
def test_a_data_rank_of_two_workers_streams_from_its_source(open_on_ray: Opener) -> None:
    layout = Layout(
        pools=(Pool(name="pair", slots=2),),
        roles=(RoleSpec(name="generator", kind=PairGenerator, pool="pair", mesh=MeshShape(tensor=2)),),
    )

    async def body(workers: object) -> None:
        group = workers.role("generator", PairGenerator)  # type: ignore[attr-defined]
        request = Request(ids=ids(range(2)))
        blocks = [block async for block in group.stream_sharded(PairGenerator.generate_together, [request])]
        assert [str(block.ids) for block in blocks] == ["0.0#0", "0.1#0", "1.0#0", "1.1#0"]
        assert {block.worker for block in blocks} == {group.workers[0]}

        came = []

        async def until_it_breaks() -> None:
            async for block in group.stream_one(0, PairGenerator.generate_together, request, 2):
                came.append(block)  # noqa: PERF401

        with pytest.raises(WorkerDiedError, match=r"pair\[1\]"):
            await until_it_breaks()
        assert len(came) == 2
        assert np.array_equal(came[1].stored.read().tokens_T, make_block(request.ids.take(np.array([1]))).tokens_T)
        with pytest.raises(WorkerDiedError, match="cannot be called"):
            await group.call_all(PairGenerator.value)
        assert len(await workers.recover("pair")) == 2  # type: ignore[attr-defined]
        assert [answer.value for answer in await group.call_all(PairGenerator.all_sum, 1.0)] == [3.0, 3.0]

    run(open_on_ray, layout, body)


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


class Librarian:
    """Says what its process has imported."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def has(self, module: str) -> bool:
        return module in sys.modules


def test_workers_that_only_need_tokenizers_import_no_torch(open_on_ray: Opener) -> None:
    layout = Layout(
        pools=(Pool(name="read", slots=1, collectives=False, tokenizers_only=True),),
        roles=(RoleSpec(name="librarian", kind=Librarian, pool="read"),),
    )

    async def body(workers: object) -> None:
        group = workers.role("librarian", Librarian)  # type: ignore[attr-defined]
        found = [(await group.call_one(0, Librarian.has, module)).value for module in ("transformers", "torch")]
        assert found == [True, False]

    run(open_on_ray, layout, body)
