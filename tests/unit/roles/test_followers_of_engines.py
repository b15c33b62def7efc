# SPDX-License-Identifier: Apache-2.0
"""Workers that follow an engine on the learner's devices: a death of either ends the wait for the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from podium.cluster import (
    Layout,
    MeshShape,
    Pool,
    Resources,
    RoleGroup,
    RoleSpec,
    WorkerContext,
    open_simulated,
    run_virtual,
)
from podium.cluster.simulated_faults import SimulatedDeath
from podium.errors import WorkerDiedError
from podium.roles.handles import GeneratorHandle
from podium.roles.interfaces import Generator, GeneratorPart

PARTS, LEADER, DIES_AT_S = "parts", "generator", 10.0


class Part(GeneratorPart):
    """Follows until it is told to leave, and lives on."""

    def __init__(self, context: WorkerContext) -> None:
        self._left = False

    async def accompany(self) -> None:  # type: ignore[override]
        while not self._left:
            await asyncio.sleep(1.0)

    def leave(self) -> None:
        self._left = True

    def reset(self) -> None:
        self._left = False

    def refill(self, number: int) -> str:
        raise AssertionError("nothing is published here")


class Leader(Generator):
    """An engine that generates for long, and does nothing else."""

    def __init__(self, context: WorkerContext) -> None:
        pass

    async def generate(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def begin_serving(self, keeps_answers: bool = False) -> None:
        self._is_served = False

    async def serve(self) -> tuple[()]:  # type: ignore[override]
        while not self._is_served:
            await asyncio.sleep(1.0)
        return ()

    def stop_serving(self, give_back: bool = False) -> None:
        self._is_served = True


Leader.__abstractmethods__ = frozenset()  # the rest of a generator is not called


@asynccontextmanager
async def opened(
    faults: tuple[SimulatedDeath, ...],
) -> AsyncIterator[tuple[GeneratorHandle, RoleGroup[Leader]]]:
    """An engine of two devices."""
    pool = Pool(name="train", slots=2, each=Resources(cpus=0.9))
    roles = (
        RoleSpec(name=PARTS, kind=Part, pool="train", mesh=MeshShape(replica=2)),
        RoleSpec(name=LEADER, kind=Leader, pool="train", mesh=MeshShape(replica=1), slots=(0,)),
    )
    async with open_simulated(faults, start_s=1.0) as cluster:
        workers = await cluster.start(Layout(pools=(pool,), roles=roles), deadline_s=1e9)
        leader = workers.role(LEADER, Leader).within(1e6)
        yield GeneratorHandle(leader, workers.role(PARTS, Part)), leader


async def left_after(faults: tuple[SimulatedDeath, ...], seconds: float) -> tuple[float, BaseException | None]:
    """When the handle had left the context in which workers follow the engine, and with which error."""
    async with opened(faults) as (handle, leader):
        error: BaseException | None = None
        try:
            async with handle._accompanied() as following:
                work = asyncio.ensure_future(leader.call_one(0, Leader.generate, seconds))
                await asyncio.wait((work, *following), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                work.cancel()
        except WorkerDiedError as death:
            error = death
        return asyncio.get_running_loop().time(), error


@pytest.mark.parametrize("slot", [0, 1], ids=["engine", "follower"])
def test_a_death_is_raised_at_once(slot: int) -> None:
    death = SimulatedDeath(at_s=DIES_AT_S, pool="train", slot=slot)
    at_s, error = run_virtual(left_after((death,), 1000.0), limit_s=1e6)
    assert isinstance(error, WorkerDiedError)
    assert at_s < DIES_AT_S + 60


def test_followers_leave_when_the_engine_is_done() -> None:
    at_s, error = run_virtual(left_after((), 30.0), limit_s=1e6)
    assert error is None
    assert 30 < at_s < 60


@pytest.mark.parametrize("slot", [0, 1], ids=["engine", "follower"])
def test_a_death_ends_the_wait_for_engines_that_answer_runners(slot: int) -> None:
    async def served() -> float:
        async with opened((SimulatedDeath(at_s=DIES_AT_S, pool="train", slot=slot),)) as (handle, _):
            with pytest.raises(WorkerDiedError, match=rf"train\[{slot}\]"):
                async with handle.serving() as serving:
                    await serving
            return asyncio.get_running_loop().time()

    assert run_virtual(served(), limit_s=1e6) < DIES_AT_S + 60
