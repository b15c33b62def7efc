# SPDX-License-Identifier: Apache-2.0
"""Episode runners whose generators die: what they were asked is asked of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from podium.cluster.transport import GoneError
from podium.data.trajectories import TrajectoryId
from podium.errors import RoleError, WorkerDiedError
from podium.roles.carriers import SamplingPlan
from podium.roles.episode_runner import EnginePolicy
from podium.rollout.requests import Completion, Request

PLAN = SamplingPlan(max_new_tokens=4, temperature=1.0, seed=7)


class Generators:
    """A channel to generators that answer when they are let, with their own number as the only token."""

    def __init__(self, count: int) -> None:
        self.taken: list[list[TrajectoryId]] = [[] for _ in range(count)]
        self.may_answer = asyncio.Event()
        self.error: dict[int, BaseException] = {}
        self._open: list[dict[TrajectoryId, Request]] = [{} for _ in range(count)]
        self._given_back: list[list[Completion]] = [[] for _ in range(count)]

    def __len__(self) -> int:
        return len(self.taken)

    async def call(self, rank: int, deadline_s: float, method: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0.001)
        if rank in self.error:
            raise self.error[rank]
        return getattr(self, f"_{method.__name__}")(rank, *arguments)

    def _exchange(self, rank: int, name: str, requests: Sequence[Request], wait_s: float) -> list[Completion]:
        self.taken[rank] += [each.id for each in requests]
        self._open[rank] |= {each.id: each for each in requests}
        done, self._given_back[rank] = self._given_back[rank], []
        if self.may_answer.is_set():
            done += [completion(each, rank, "stop") for each in self._open[rank].values()]
            self._open[rank] = {}
        return done

    def _give_back(self, rank: int, ids: Sequence[TrajectoryId]) -> None:
        self._given_back[rank] += [completion(self._open[rank].pop(id), rank, "cancelled") for id in ids]


def completion(request: Request, rank: int, finish: Any) -> Completion:
    return Completion(
        id=request.id, prompt=request.prompt, tokens_L=np.array([rank], np.int32),
        logprobs_L=np.zeros(1, np.float32), versions_L=np.zeros(1, np.int32), finish=finish, stop=None,
    )  # fmt: skip


def asked(policy: EnginePolicy, prompt_index: int) -> asyncio.Task[Completion]:
    request = Request(
        id=TrajectoryId(prompt_index, 0), prompt=np.arange(3, dtype=np.int32), seed=7,
        sampling=policy.sampling(4, greedy=False),
    )  # fmt: skip
    return asyncio.create_task(policy.complete(request))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.001)


def run(count: int, body: Callable[[Generators, EnginePolicy], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        generators = Generators(count)
        async with EnginePolicy(generators, "runner", PLAN, frozenset(), 5.0) as policy:  # type: ignore[arg-type]
            await body(generators, policy)

    asyncio.run(asyncio.wait_for(main(), 30))


def answerers(tasks: Sequence[asyncio.Task[Completion]]) -> list[int]:
    return [int(task.result().tokens_L[0]) for task in tasks]


def test_what_a_generator_was_asked_that_dies_is_asked_of_the_others() -> None:
    async def body(generators: Generators, policy: EnginePolicy) -> None:
        tasks = [asked(policy, prompt) for prompt in range(6)]
        await until(lambda: sum(map(len, generators.taken)) == 6)
        generators.error[1] = GoneError("it was ended")
        await until(lambda: sum(map(len, generators.taken)) == 8)  # prompts 1 and 4
        generators.may_answer.set()
        await asyncio.gather(*tasks)
        assert answerers(tasks) == [0, 2, 2, 0, 0, 2]
        later = [asked(policy, prompt) for prompt in (6, 7, 8)]
        await asyncio.gather(*later)
        assert answerers(later) == [0, 2, 2]

    run(3, body)


def test_a_request_that_nobody_wants_ends_at_the_next_generator() -> None:
    async def body(generators: Generators, policy: EnginePolicy) -> None:
        task = asked(policy, 1)
        await until(lambda: bool(generators.taken[1]))
        generators.error[1] = GoneError("it was ended")
        policy.cancel(TrajectoryId(1, 0))
        answer = await task
        assert (answer.finish, answer.tokens_L.tolist()) == ("cancelled", [0])

    run(2, body)


def test_the_last_generator_takes_all_episodes_with_it() -> None:
    async def body(generators: Generators, policy: EnginePolicy) -> None:
        tasks = [asked(policy, prompt) for prompt in range(2)]
        await until(lambda: sum(map(len, generators.taken)) == 2)
        generators.error = {0: GoneError("first"), 1: GoneError("second")}
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, WorkerDiedError) for each in results)
        with pytest.raises(WorkerDiedError):
            await asked(policy, 0)

    run(2, body)


def test_a_failure_that_is_no_death_is_for_all() -> None:
    async def body(generators: Generators, policy: EnginePolicy) -> None:
        tasks = [asked(policy, prompt) for prompt in range(2)]
        await until(lambda: sum(map(len, generators.taken)) == 2)
        generators.error[0] = RoleError("the engine failed")
        with pytest.raises(RoleError, match="the engine failed"):
            await asyncio.gather(*tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(generators.taken[1]) == 1

    run(2, body)
