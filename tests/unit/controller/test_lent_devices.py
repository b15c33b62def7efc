# SPDX-License-Identifier: Apache-2.0
"""The learner's devices while runners ask their engines: what is kept between two lendings, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from podium.controller.lent_devices import LentDevices
from podium.data.trajectories import TrajectoryId
from podium.errors import RoleError
from podium.roles.handles import GeneratorHandle
from podium.roles.interfaces import Generator, GeneratorPart, GeneratorUsage
from podium.roles.mailboxes import Mailboxes
from podium.rollout.engine import Load
from podium.rollout.requests import Completion, Request, Sampling, given_back

POOL, ENGINES, FOLLOWERS, RUNNER = "train", "lent", "parts", "runner"
REQUEST = Request(id=TrajectoryId(3, 0), prompt=np.zeros(2, np.int32), sampling=Sampling(max_new_tokens=4))


class Engine(Generator):
    """Answers nothing until it gives everything back."""

    def __init__(self, context: WorkerContext, is_broken: bool) -> None:
        """`is_broken`: it cannot be stopped."""
        self._boxes, self._requests = Mailboxes(), dict[TrajectoryId, Request]()
        self._is_broken = is_broken

    def begin_serving(self, keeps_answers: bool = False) -> None:
        self._boxes.open(keeps_answers)

    async def serve(self) -> tuple[()]:  # type: ignore[override]
        while self._boxes.wait_for_work(0.0):
            await asyncio.sleep(1.0)
        return ()

    def stop_serving(self, give_back: bool = False) -> None:
        if self._is_broken:
            raise ValueError("the engine does not stop")
        self._boxes.close()
        for id in self._boxes.open_ids if give_back else ():
            self._boxes.deliver(given_back(self._requests.pop(id)))

    def exchange(self, runner: str, requests: tuple[Request, ...], wait_s: float) -> list[Completion]:
        self._requests.update({each.id: each for each in requests})
        assert not requests or self._boxes.expect(runner, [each.id for each in requests])
        return self._boxes.fetch(runner, 0.0)

    def lanes(self) -> int:
        return 4

    def share(self, number: int) -> str:
        return "fingerprint"

    def usage(self) -> GeneratorUsage:
        return GeneratorUsage(load=Load(**dict.fromkeys(Load.__slots__, 0)), idle_s=0.0, install_s=0.0)


Engine.__abstractmethods__ = frozenset()  # the rest of a generator is not called


class Follower(GeneratorPart):
    """Does nothing but follow the engine until it is told to leave."""

    def __init__(self, context: WorkerContext) -> None:
        self._follows = False

    async def accompany(self) -> None:  # type: ignore[override]
        self._follows = True
        while self._follows:
            await asyncio.sleep(1.0)

    def leave(self) -> None:
        self._follows = False

    def reset(self) -> None:
        self._follows = False

    def follows(self) -> bool:
        return self._follows

    def refill(self, number: int) -> str:
        return "fingerprint"


class Runners:
    """Nobody: the test asks engines itself."""

    async def use_lent(self, are_lent: bool) -> None:
        pass


Test = Callable[[LentDevices, RoleGroup[Engine], RoleGroup[Follower]], Awaitable[None]]


def run_with(test: Test, *, is_broken: bool = False) -> list[Exception]:
    """Runs a test with two devices, of one engine, that are not lent yet. Returns what failed while they were lent."""

    async def run() -> list[Exception]:
        async with _opened(is_broken) as (lent, engines, followers, failures):
            await test(lent, engines, followers)
            return failures

    return run_virtual(run(), limit_s=1e6)


@asynccontextmanager
async def _opened(
    is_broken: bool,
) -> AsyncIterator[tuple[LentDevices, RoleGroup[Engine], RoleGroup[Follower], list[Exception]]]:
    pool = Pool(name=POOL, slots=2, each=Resources(cpus=0.9))
    roles = (
        RoleSpec(name=FOLLOWERS, kind=Follower, pool=POOL, mesh=MeshShape(replica=2)),
        RoleSpec(name=ENGINES, kind=Engine, pool=POOL, arguments=(is_broken,), slots=(0,)),
    )
    async with open_simulated((), start_s=1.0) as cluster:
        workers = await cluster.start(Layout(pools=(pool,), roles=roles), deadline_s=1e9)
        engines, followers = workers.role(ENGINES, Engine), workers.role(FOLLOWERS, Follower)
        parts: Any = SimpleNamespace(
            names=SimpleNamespace(lent=ENGINES), leaving=(), roles=SimpleNamespace(runner=Runners())
        )
        flow: Any = SimpleNamespace(note_lent=lambda lanes: None, note_returned=lambda workers: None)
        state: Any = SimpleNamespace(version=1)

        async def note(arrival: object, worker: str) -> None:
            raise AssertionError("episodes arrive at runners")

        failures: list[Exception] = []
        generator = GeneratorHandle(engines, followers)
        yield LentDevices(parts, flow, state, generator, note, failures.append), engines, followers, failures


async def exchanged(group: RoleGroup[Engine], *requests: Request) -> list[Completion]:
    """What a runner gets that sends these requests."""
    return (await group.control_one(0, Engine.exchange, RUNNER, requests, 0.0)).value


def test_devices_that_are_lent_again_keep_what_a_runner_has_not_fetched() -> None:
    """The runner's episode would wait for its answer forever."""

    async def test(lent: LentDevices, engines: RoleGroup[Engine], followers: RoleGroup[Follower]) -> None:
        await lent.lend()
        assert await exchanged(engines, REQUEST) == []
        await lent.recall()
        await lent.lend()
        assert [(each.id, each.finish) for each in await exchanged(engines)] == [(REQUEST.id, "cancelled")]
        await lent.recall()

    assert not run_with(test)


def test_streams_that_begin_anew_get_no_answers_of_those_before() -> None:
    async def test(lent: LentDevices, engines: RoleGroup[Engine], followers: RoleGroup[Follower]) -> None:
        await lent.lend()
        await exchanged(engines, REQUEST)
        await lent.recall()
        lent.begin_streams()
        await lent.lend()
        assert await exchanged(engines) == []
        await lent.recall()

    assert not run_with(test)


def test_an_engine_that_does_not_stop_leaves_no_other_device_lent() -> None:
    """The device beside it followed it, and would do so forever."""

    async def test(lent: LentDevices, engines: RoleGroup[Engine], followers: RoleGroup[Follower]) -> None:
        await lent.lend()
        await asyncio.sleep(1.0)
        assert (await followers.control_one(1, Follower.follows)).value

        with pytest.raises(RoleError, match="the engine does not stop"):
            await lent.close()

        await asyncio.sleep(2.0)  # it looks once a second
        assert not (await followers.control_one(1, Follower.follows)).value

    run_with(test, is_broken=True)
