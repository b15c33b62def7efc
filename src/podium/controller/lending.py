# SPDX-License-Identifier: Apache-2.0
"""When the learner's devices are lent to generation: layout elastic. Pure, like the scheduler that asks. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from podium.controller.scheduling import LearnerIdle

Episode = TypeVar("Episode", int, tuple[int, int])
"""In the order of groups and samples."""

# Lending must gain more than it costs, which is known only roughly. Two thresholds, so that a run whose waits are about
# as long as a switch does not change its mind with every step.
_START_AT, _CONTINUE_AT = 3.0, 1.5


@dataclass(slots=True)
class Lending:
    """Where the learner's devices are, and whether lending them is worth it."""

    state: Literal["home", "leaving", "lent", "returning"] = "home"
    was_worth_it: bool = True

    def is_worth_it(self, num_missing: int, measured: LearnerIdle) -> bool:
        """Whether to lend now. `num_missing`: episodes that the next step waits for. The time until they have ended
        must exceed the cost of switching: at the measured rate, or as long as the last wait if that was longer, because
        the last episodes are the long ones. Without a rate nothing is known, and all devices generate."""
        if not num_missing or not measured.episodes_per_s:
            return bool(num_missing)
        threshold = _CONTINUE_AT if self.was_worth_it else _START_AT
        left_s = max(num_missing / measured.episodes_per_s, measured.waited_s)
        self.was_worth_it = left_s > threshold * measured.switch_s
        return self.was_worth_it


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
