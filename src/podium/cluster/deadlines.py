# SPDX-License-Identifier: Apache-2.0
"""A deadline: a point in time, and how much is left until it."""

from __future__ import annotations

import time


class Deadline:
    """A deadline that starts when it is created."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until it expires, at least 0."""
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0.0

    def at_most(self, seconds: float) -> Deadline:
        """This deadline, or one that ends earlier."""
        return Deadline(min(seconds, self.left_s))
