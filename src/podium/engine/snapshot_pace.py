# SPDX-License-Identifier: Apache-2.0
"""How often snapshots are taken, so that they cost little. Pure; torch-free."""

from __future__ import annotations

import math
from collections import deque

MOST_OF_TIME = 0.02
"""The most of its time that a run may spend on snapshots."""
# Copies that are shorter count as nothing: what surrounds them takes as long.
_SHORT_S = 0.01
_NUM_LAST = 3


def steps_between(cost_s: float, step_s: float) -> int:
    """Steps from one snapshot to the next, if one of them costs this much."""
    return max(1, math.ceil(cost_s / (MOST_OF_TIME * max(step_s, 1e-6))))


class SnapshotPace:
    """After which steps there are snapshots, by the time that the copies of the last ones took. Their cost is at most
    that: a device that copies can do most other things as well."""

    def __init__(self) -> None:
        self._copies_s: deque[float] = deque(maxlen=_NUM_LAST)
        self._begun: tuple[int, float] | None = None
        self._next = 0

    def is_due(self, step: int) -> bool:
        """Whether there is one after this step."""
        return step >= self._next

    def copied(self, seconds: float) -> None:
        """Notes how long the copy of one took."""
        self._copies_s.append(seconds)

    def begin(self, step: int, now_s: float) -> None:
        """Notes that one begins, and which is the next."""
        before, self._begun, self._next = self._begun, (step, now_s), step + 1
        if before is None or len(self._copies_s) < _NUM_LAST:  # the first ones create their files
            return
        copy_s = min(self._copies_s)  # a process that had to wait for a core copies no longer
        if copy_s >= _SHORT_S:
            self._next = step + steps_between(copy_s, (now_s - before[1]) / max(1, step - before[0]))
