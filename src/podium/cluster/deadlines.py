# SPDX-License-Identifier: Apache-2.0
"""Clocks that a simulation moves, and a deadline: a point in time, and how much is left until it."""

from __future__ import annotations

import asyncio
import contextlib
import time

from podium.cluster.virtual_time import VirtualLoop
from podium.observe.timing import wall_clock_s


def now_s() -> float:
    """The clock of the running event loop, which a simulation moves; the system's where none runs."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def wall_s() -> float:
    """The time of day, which clocks of several machines share; in a simulation its virtual clock."""
    with contextlib.suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            return loop.time()
    return wall_clock_s()


class Deadline:
    """A deadline that starts when it is created."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_s = now_s() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until it expires, at least 0."""
        return max(0.0, self._ends_s - now_s())

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0.0

    def at_most(self, seconds: float) -> Deadline:
        """This deadline, or one that ends earlier."""
        return Deadline(min(seconds, self.left_s))
