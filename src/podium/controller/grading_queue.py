# SPDX-License-Identifier: Apache-2.0
"""Grades episodes as they end, those of the oldest group first, on the grader that has the fewest."""

# N episodes · R reward functions

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from podium.cluster.deadlines import now_s
from podium.roles.carriers import GraderFacts
from podium.roles.grading_handle import GraderHandle, Rewarded
from podium.roles.stages import Rollouts

# Batches that one grader has at the same time. What ends meanwhile waits and makes the next batch larger.
_MOST_OPEN = 4
# The same where it grades one episode after the other: one batch that it works on, and the next. Each takes about so
# long, or is a single episode: what a grader has not got yet is graded by the next one that is free.
MOST_QUEUED, _BATCH_S = 2, 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradedPart:
    """Episodes with the results of the reward functions."""

    rollouts: Rollouts
    rewarded: Rewarded


class GradingQueue:
    """Used by one task of the controller. `deliver` gets each graded part, or the error that ended the grading."""

    def __init__(self, grader: GraderHandle, deliver: Callable[[GradedPart | Exception], None]) -> None:
        self._grader, self._deliver = grader, deliver
        self._overlaps = False
        # A heap by the first group: groups that are complete can be trained on, many that are begun cannot.
        self._waiting: list[tuple[int, int, Rollouts]] = []
        self._count = itertools.count()
        self._open = [0] * grader.num_graders  # batches of each grader
        self._num_open = [0] * grader.num_graders  # and their episodes
        self._done_s = [0.0] * grader.num_graders  # when its last batch ended
        self._single_s: float | None = None  # of an episode, if a grader grades one after the other
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether everything is graded."""
        return not self._waiting and not any(self._open)

    def open(self, facts: GraderFacts) -> None:
        """Says how the graders work. Before that, they are taken to grade one episode after the other."""
        self._overlaps = facts.overlaps

    def submit(self, rollouts: Rollouts) -> None:
        """Grades these episodes soon. Episodes that a reward compares come together."""
        heapq.heappush(self._waiting, (int(rollouts.group_N.min()), next(self._count), rollouts))
        self._send()

    async def close(self) -> None:
        """Gives up what is not graded."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self) -> None:
        """Shares what waits among the graders that have room."""
        most = _MOST_OPEN if self._overlaps else MOST_QUEUED
        while self._waiting and min(self._open) < most:
            free = [rank for rank, count in enumerate(self._open) if count < most]
            rank = min(free, key=lambda each: self._num_open[each])
            rollouts = Rollouts.join([heapq.heappop(self._waiting)[-1] for _ in range(self._share())])
            self._open[rank] += 1
            self._num_open[rank] += len(rollouts)
            task = asyncio.create_task(self._grade(rank, rollouts))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _share(self) -> int:
        """How many of the parts that wait become one batch."""
        even = -(-len(self._waiting) // len(self._open))  # also for graders that have no room yet
        if self._overlaps:
            return even
        if self._single_s is None:
            return 1
        return max(1, min(even, int(_BATCH_S / max(self._single_s * len(self._waiting[0][-1]), 1e-6))))

    async def _grade(self, rank: int, rollouts: Rollouts) -> None:
        result: GradedPart | Exception
        sent_s = now_s()
        try:
            result = GradedPart(rollouts=rollouts, rewarded=await self._grader.grade_on(rank, rollouts))
        except Exception as error:
            result = error
        ended_s = now_s()
        single_s = (ended_s - max(sent_s, self._done_s[rank])) / max(1, len(rollouts))
        self._single_s = single_s if self._single_s is None else (self._single_s + single_s) / 2
        self._done_s[rank] = ended_s
        self._open[rank] -= 1
        self._num_open[rank] -= len(rollouts)
        self._send()
        self._deliver(result)  # last: who waits for it may look whether more is to come
