# SPDX-License-Identifier: Apache-2.0
"""Grades episodes as they end, on whichever grader has the fewest batches."""

# N episodes · R reward functions

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from podium.roles.grading_handle import GraderHandle, Rewarded
from podium.roles.stages import Rollouts

# Batches that one grader has at the same time. What ends meanwhile waits and makes the next batch larger.
_MOST_OPEN = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradedPart:
    """Episodes with the results of the reward functions."""

    rollouts: Rollouts
    rewarded: Rewarded


class GradingQueue:
    """Used by one task of the controller. `deliver` gets each graded part, or the error that ended the grading."""

    def __init__(self, grader: GraderHandle, deliver: Callable[[GradedPart | Exception], None]) -> None:
        self._grader, self._deliver = grader, deliver
        self._waiting: list[Rollouts] = []
        self._open = [0] * grader.num_graders  # batches of each grader
        self._num_open = [0] * grader.num_graders  # and their episodes
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether everything is graded."""
        return not self._waiting and not any(self._open)

    def submit(self, rollouts: Rollouts) -> None:
        """Grades these episodes soon. Episodes that a reward compares come together."""
        self._waiting.append(rollouts)
        self._send()

    async def close(self) -> None:
        """Gives up what is not graded."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self) -> None:
        """Shares what waits among the graders that have room."""
        while self._waiting and min(self._open) < _MOST_OPEN:
            free = [rank for rank, count in enumerate(self._open) if count < _MOST_OPEN]
            rank = min(free, key=lambda each: self._num_open[each])
            share = -(-len(self._waiting) // len(self._open))  # also for graders that have no room yet
            parts, self._waiting = self._waiting[:share], self._waiting[share:]
            rollouts = Rollouts.join(parts)
            self._open[rank] += 1
            self._num_open[rank] += len(rollouts)
            task = asyncio.create_task(self._grade(rank, rollouts))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _grade(self, rank: int, rollouts: Rollouts) -> None:
        result: GradedPart | Exception
        try:
            result = GradedPart(rollouts=rollouts, rewarded=await self._grader.grade_on(rank, rollouts))
        except Exception as error:
            result = error
        self._open[rank] -= 1
        self._num_open[rank] -= len(rollouts)
        self._send()
        self._deliver(result)  # last: who waits for it may look whether more is to come
