# SPDX-License-Identifier: Apache-2.0
"""The learner's devices while episode runners ask their engines: what is kept between two lendings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

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
from podium.roles.handles import GeneratorHandle
from podium.roles.interfaces import Generator, GeneratorUsage
from podium.roles.mailboxes import Mailboxes
from podium.rollout.engine import Load
from podium.rollout.requests import Completion, Request, Sampling, given_back

POOL, ENGINES, RUNNER = "train", "lent", "runner"
REQUEST = Request(id=TrajectoryId(3, 0), prompt=np.zeros(2, np.int32), sampling=Sampling(max_new_tokens=4))


class Engine(Generator):
    """Answers nothing until it gives everything back."""

    def __init__(self, context: WorkerContext) -> None:
        self._boxes, self._requests = Mailboxes(), dict[TrajectoryId, Request]()

    def begin_serving(self, keeps_answers: bool = False) -> None:
        self._boxes.open(keeps_answers)

    async def serve(self) -> tuple[()]:  # type: ignore[override]
        while self._boxes.wait_for_work(0.0):
            await asyncio.sleep(1.0)
        return ()

    def stop_serving(self, give_back: bool = False) -> None:
        self._boxes.close()
        for id in self._boxes.open_ids:
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


class Runners:
    """Nobody: the test asks engines itself."""

    async def use_lent(self, are_lent: bool) -> None:
        pass


Test = Callable[[LentDevices, RoleGroup[Engine]], Awaitable[None]]


def run_with(test: Test, *, num_engines: int = 1) -> None:
    """Runs a test with devices that are not lent yet."""

    async def run() -> None:
        async with _opened(num_engines) as (lent, group):
            await test(lent, group)

    run_virtual(run(), limit_s=1e6)


@asynccontextmanager
async def _opened(num_engines: int) -> AsyncIterator[tuple[LentDevices, RoleGroup[Engine]]]:
    pool = Pool(name=POOL, slots=num_engines, each=Resources(cpus=0.9))
    role = RoleSpec(name=ENGINES, kind=Engine, pool=POOL, mesh=MeshShape(replica=num_engines))
    async with open_simulated((), start_s=1.0) as cluster:
        workers = await cluster.start(Layout(pools=(pool,), roles=(role,)), deadline_s=1e9)
        group = workers.role(ENGINES, Engine)
        parts: Any = SimpleNamespace(
            names=SimpleNamespace(lent=ENGINES), leaving=(), roles=SimpleNamespace(runner=Runners())
        )
        flow: Any = SimpleNamespace(note_lent=lambda lanes: None, note_returned=lambda workers: None)
        state: Any = SimpleNamespace(version=1)

        async def note(arrival: object, worker: str) -> None:
            raise AssertionError("episodes arrive at runners")

        failures: list[Exception] = []
        yield LentDevices(parts, flow, state, GeneratorHandle(group), note, failures.append), group
        assert not failures


async def exchanged(group: RoleGroup[Engine], *requests: Request) -> list[Completion]:
    """What a runner gets that sends these requests."""
    return (await group.control_one(0, Engine.exchange, RUNNER, requests, 0.0)).value


def test_devices_that_are_lent_again_keep_what_a_runner_has_not_fetched() -> None:
    """The runner's episode would wait for its answer forever."""

    async def test(lent: LentDevices, group: RoleGroup[Engine]) -> None:
        await lent.lend()
        assert await exchanged(group, REQUEST) == []
        await lent.recall()
        await lent.lend()
        assert [(each.id, each.finish) for each in await exchanged(group)] == [(REQUEST.id, "cancelled")]
        await lent.recall()

    run_with(test)


def test_streams_that_begin_anew_get_no_answers_of_those_before() -> None:
    async def test(lent: LentDevices, group: RoleGroup[Engine]) -> None:
        await lent.lend()
        await exchanged(group, REQUEST)
        await lent.recall()
        lent.begin_streams()
        await lent.lend()
        assert await exchanged(group) == []
        await lent.recall()

    run_with(test)
