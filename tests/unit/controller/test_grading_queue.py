# SPDX-License-Identifier: Apache-2.0
"""Episodes are graded as they are submitted: batches are shared among graders and grow while all are busy. A grader
that grades one episode after the other gets no more than it needs to stay busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.made_batches import make_answer, make_rollouts
from podium.cluster.deadlines import now_s
from podium.cluster.virtual_time import run_virtual
from podium.controller.grading_queue import GradedPart, GradingQueue
from podium.roles.carriers import GraderFacts
from podium.roles.grading_handle import Rewarded
from podium.roles.stages import Rollouts


class HeldGraders:
    """Graders that answer when the test says so."""

    def __init__(self, num_graders: int) -> None:
        self.num_graders = num_graders
        self.open: list[tuple[int, list[int], asyncio.Future[Rewarded]]] = []

    async def grade_on(self, rank: int, rollouts: Rollouts) -> Rewarded:
        answer: asyncio.Future[Rewarded] = asyncio.get_running_loop().create_future()
        self.open.append((rank, np.unique(rollouts.group_N).tolist(), answer))
        return await answer

    def answer(self, at: int = 0) -> None:
        _, groups, answer = self.open.pop(at)
        answer.set_result(Rewarded(rewards=(0,), values_NR=np.ones((len(groups), 1)), errors={}, extras={}))


def _group(number: int) -> Rollouts:
    return make_rollouts([make_answer(number)])


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _queue(num_graders: int) -> tuple[HeldGraders, GradingQueue, list[GradedPart | Exception]]:
    graders: Any = HeldGraders(num_graders)
    delivered: list[GradedPart | Exception] = []
    queue = GradingQueue(graders, delivered.append)
    queue.open(GraderFacts(inputs=("sample",), overlaps=True))
    return graders, queue, delivered


def test_what_ends_while_all_graders_are_busy_makes_the_next_batch_larger() -> None:
    async def main() -> None:
        graders, queue, delivered = _queue(2)
        for number in range(12):
            queue.submit(_group(number))
        await _settled()
        # Four batches of one episode for each grader; the others wait.
        assert [(rank, groups) for rank, groups, _ in graders.open] == [(n % 2, [n]) for n in range(8)]
        graders.answer(1)
        await _settled()
        assert graders.open[-1][:2] == (1, [8, 9])  # the other half is for the other grader
        assert not queue.is_idle
        while graders.open:
            graders.answer()
            await _settled()
        assert queue.is_idle
        graded = [part for part in delivered if isinstance(part, GradedPart)]
        assert sorted(index for part in graded for index in part.rollouts.group_N.tolist()) == list(range(12))

    asyncio.run(main())


def test_the_queue_is_idle_when_the_last_result_is_delivered() -> None:
    async def main() -> None:
        graders: Any = HeldGraders(1)
        idle: list[bool] = []
        queue = GradingQueue(graders, lambda part: idle.append(queue.is_idle))
        queue.submit(_group(0))
        queue.submit(_group(1))
        await _settled()
        graders.answer()
        await _settled()
        graders.answer()
        await _settled()
        assert idle == [False, True]

    asyncio.run(main())


def test_an_error_is_delivered_and_closing_gives_up_the_rest() -> None:
    async def main() -> None:
        graders, queue, delivered = _queue(1)
        for number in range(9):
            queue.submit(_group(number))
        await _settled()
        graders.open[0][2].set_exception(ValueError("no grader"))
        await _settled()
        assert [str(each) for each in delivered] == ["no grader"]
        await queue.close()
        assert len(delivered) == 1

    asyncio.run(main())


class SerialGraders:
    """Each grades one episode after the other, as a synchronous reward does; in virtual time."""

    def __init__(self, num_graders: int, seconds: Callable[[int], float]) -> None:
        self.num_graders, self._seconds = num_graders, seconds
        self._turns = [asyncio.Lock() for _ in range(num_graders)]
        self.batches: list[tuple[int, list[int]]] = []

    async def grade_on(self, rank: int, rollouts: Rollouts) -> Rewarded:
        episodes = rollouts.group_N.tolist()
        self.batches.append((rank, episodes))
        async with self._turns[rank]:
            for each in episodes:
                await asyncio.sleep(self._seconds(each))
        return Rewarded(rewards=(0,), values_NR=np.ones((len(episodes), 1)), errors={}, extras={})


async def _graded(num_episodes: int, seconds: Callable[[int], float]) -> tuple[SerialGraders, float]:
    """All episodes at once on four graders: who graded what, and how long that took."""
    graders: Any = SerialGraders(4, seconds)
    delivered: list[GradedPart | Exception] = []
    queue, begin_s = GradingQueue(graders, delivered.append), now_s()
    queue.open(GraderFacts(inputs=("sample",), overlaps=False))
    for number in range(num_episodes):
        queue.submit(_group(number))
    while not queue.is_idle:
        await asyncio.sleep(0.001)
    assert sum(len(part.rollouts) for part in delivered if isinstance(part, GradedPart)) == num_episodes
    return graders, now_s() - begin_s


def test_slow_blocking_rewards_keep_every_grader_busy_to_the_end() -> None:
    # 64 gradings of 0.3 s on four graders: 16 each, 4.8 s. One that is twice as long delays the end by itself only.
    graders, seconds = run_virtual(_graded(64, lambda number: 0.3))
    assert seconds == pytest.approx(4.8, abs=0.01)
    assert all(len(episodes) == 1 for _, episodes in graders.batches)
    graders, seconds = run_virtual(_graded(64, lambda number: 3.0 if number == 0 else 0.3))
    assert seconds < (63 * 0.3 + 3.0) / 4 + 0.6  # without loss, and at most two more gradings


def test_fast_blocking_rewards_are_graded_in_large_batches() -> None:
    graders, seconds = run_virtual(_graded(1000, lambda number: 0.0005))
    assert seconds == pytest.approx(1000 * 0.0005 / 4, rel=0.2)
    assert len(graders.batches) < 60  # of at most 0.05 s, so at least ten, and some to find out


def test_the_oldest_group_is_graded_first() -> None:
    async def main() -> None:
        graders, queue, _ = _queue(1)
        for number in (5, 6, 7, 8, 3, 9, 1, 2):
            queue.submit(_group(number))
        await _settled()
        assert [groups for _, groups, _ in graders.open] == [[5], [6], [7], [8]]  # sent before the others came
        graders.answer()
        await _settled()
        assert graders.open[-1][1] == [1, 2, 3, 9]  # all that waits is one grader's share

    asyncio.run(main())
