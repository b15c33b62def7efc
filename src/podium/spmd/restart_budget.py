# SPDX-License-Identifier: Apache-2.0
"""How often the ranks of a program are started again: `placement.restarts` bounds failures without a completed step
between them, so that a long run which makes progress is not ended by its age. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart of all ranks after one of them died or failed."""

    attempt: int  # 1, 2, ... in this launch
    number: int  # 1, 2, ... since a step was completed that no attempt before had completed
    most: int
    cause: str
    failed_s: float  # when it was noticed, on the monotonic clock of this machine

    @property
    def seconds(self) -> float:
        """Since the failure."""
        return time.monotonic() - self.failed_s

    @property
    def title(self) -> str:
        """How the console names it."""
        return f"restart {self.number} of {self.most}"

    @property
    def left(self) -> int:
        """How many may follow without a completed step."""
        return self.most - self.number


class RestartBudget:
    """The restarts of one launch."""

    def __init__(self, most: int) -> None:
        """`most`: failures without progress between them that are answered."""
        self._most = most
        self._num_restarts = self._num_in_a_row = self._newest_step = 0

    def has_left(self, step: int) -> bool:
        """Whether a failure now is answered. `step`: the newest that was ever completed."""
        return self._most > (0 if step > self._newest_step else self._num_in_a_row)

    def restart(self, cause: str, *, step: int, failed_s: float) -> Restart | None:
        """The answer to a failure; None: the run ends. `step` is as above."""
        if not self.has_left(step):
            return None
        if step > self._newest_step:
            self._newest_step, self._num_in_a_row = step, 0
        self._num_restarts += 1
        self._num_in_a_row += 1
        return Restart(
            attempt=self._num_restarts, number=self._num_in_a_row, most=self._most, cause=cause, failed_s=failed_s
        )
