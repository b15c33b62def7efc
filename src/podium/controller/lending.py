# SPDX-License-Identifier: Apache-2.0
"""When the learner's devices are lent to generation: layout elastic. Pure, like the scheduler that asks. Torch-free."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from podium.controller.scheduling import LearnerIdle

Episode = TypeVar("Episode", int, tuple[int, int])
"""In the order of groups and samples."""

# Lending must gain more than it costs, which is known only roughly. Two thresholds: a run whose waits are about as long
# as a switch does not change its mind with every step, nor within a wait.
_START_AT, _CONTINUE_AT = 3.0, 1.5
LOOK_AGAIN = 1.5
"""How much longer the learner has waited with each LearnerWaits: who tells them counts on with this factor."""


@dataclass(slots=True)
class Lending:
    """Where the learner's devices are, and whether lending them is worth it in the wait that is in progress."""

    state: Literal["home", "leaving", "lent", "returning"] = "home"
    was_worth_it: bool = True  # in this wait, or in the last one
    num_lent: int | None = None  # workers on the devices; 0: episode runners use them; None: they were never lent
    looks_again: bool = False  # whether the estimate may have grown since it was not worth it
    lacked_work: bool = False  # whether the devices would have had nothing to do
    _measured: LearnerIdle | None = None  # None: the learner is not idle
    _num_lanes: int = 0  # of generators with devices of their own, when that was measured
    _is_first: bool = False  # whether nothing was decided in this wait
    _waited_s: float = 0.0  # since the wait began
    _progressed_s: float = 0.0  # when the number of missing episodes was last seen to change
    _num_missing: int = 0  # then

    @property
    def is_idle(self) -> bool:
        """Whether the learner's devices have nothing to do."""
        return self._measured is not None

    def begin(self, measured: LearnerIdle, num_lanes: int, num_missing: int) -> None:
        """The learner has nothing to do from now on. `num_lanes`: of generators with devices of their own.
        `num_missing`: episodes that the next step waits for."""
        self._measured, self._num_lanes, self._num_missing = measured, num_lanes, num_missing
        self._is_first = self.looks_again = True
        self._waited_s = self._progressed_s = 0.0

    def end(self) -> None:
        """The next step has started."""
        self._measured, self.looks_again, self.lacked_work = None, False, False

    def note_waited(self, waited_s: float, num_missing: int) -> None:
        """The wait is this long, and so many episodes are missing."""
        self._waited_s = waited_s
        if num_missing != self._num_missing:
            self._progressed_s, self._num_missing = waited_s, num_missing

    def left_s(self, num_missing: int, num_lanes: int) -> float:
        """Seconds until the missing episodes have ended, the longest of three estimates. The first: at the measured
        rate, of as many lanes as are left. The second: the rest of a wait as long as the last one, because the last
        episodes are the long ones. The third: as long as none of them has ended now. Infinite where nothing is known,
        or no generator is left."""
        measured = self._measured
        if not num_missing or measured is None:
            return 0.0
        rate = measured.episodes_per_s * (num_lanes / self._num_lanes if self._num_lanes else 1.0)
        if not rate or not num_lanes:
            return math.inf
        return max(num_missing / rate, measured.waited_s - self._waited_s, self._waited_s - self._progressed_s)

    def is_worth_it(self, num_missing: int, num_lanes: int) -> bool:
        """Whether to lend now: the time that is left must exceed the cost of switching. What was not worth it when the
        wait began, or has been paid once in this wait, must be worth twice as much."""
        if not num_missing or self._measured is None:
            return False
        threshold = _CONTINUE_AT if self.was_worth_it and self._is_first else _START_AT
        is_worth_it = self.left_s(num_missing, num_lanes) > threshold * self._measured.switch_s
        self.was_worth_it = is_worth_it or (self.was_worth_it and not self._is_first)
        self._is_first = False
        return is_worth_it

    def stays_worth_it(self, num_missing: int, num_lanes: int) -> bool:
        """Whether devices that are lent and have nothing to do should get more."""
        switch_s = 0.0 if self._measured is None else self._measured.switch_s
        return self.left_s(num_missing, num_lanes) > _CONTINUE_AT * switch_s

    @property
    def grades_within_recall(self) -> bool:
        """Whether rewards alone take no longer than to recall the devices, as far as both were measured."""
        measured = self._measured
        return measured is not None and measured.recall_s > 0 and measured.graded_s <= measured.recall_s


def would_get(num_episodes: int, num_own: int, num_lent: int | None) -> bool:
    """Whether lent workers would get some of the episodes that `num_own` workers run, if all had an even part. Episode
    runners (`num_lent` 0) ask lent engines for a part of any."""
    if not num_lent or not num_own:
        return num_episodes > 0
    return -(-num_episodes // num_own) > -(-num_episodes // (num_own + num_lent))


def to_give_back(
    running: Mapping[str, Collection[Episode]], lent: Sequence[str]
) -> Iterator[tuple[str, tuple[Episode, ...]]]:
    """Which episodes each worker gives back, so that the lent ones get an even part of all that run. The newest groups
    move: they have the fewest tokens, which must be computed again elsewhere."""
    loads = {worker: len(episodes) for worker, episodes in running.items()}
    even = -(-sum(loads.values()) // max(1, len(loads)))  # rounded up
    wanted = sum(max(0, even - loads.pop(worker)) for worker in lent)
    others = [(-load, worker) for worker, load in loads.items() if load > even]
    heapq.heapify(others)
    while others:
        _, worker = heapq.heappop(others)
        count = min(len(running[worker]) - even, wanted)
        if count <= 0:
            return
        wanted -= count
        yield worker, tuple(sorted(running[worker])[-count:])
