# SPDX-License-Identifier: Apache-2.0
"""Stops a run that no longer learns."""

from __future__ import annotations

from pathlib import Path

from podium.errors import TrainingDivergedError


class DivergenceGuard:
    """Counts consecutive steps without a finite loss or gradient, which are skipped."""

    def __init__(self, limit: int, metrics_file: Path, *, in_a_row: int = 0) -> None:
        self._limit, self._metrics_file = limit, metrics_file
        self.in_a_row = in_a_row

    def check(self, step: int, *, is_skipped: bool, suspect: str) -> None:
        """Raises an error after `optimizer.max_skipped_in_a_row` steps. `suspect` names another possible cause beside
        the optimizer."""
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if self.in_a_row >= self._limit:
            first = step - self.in_a_row + 1
            raise TrainingDivergedError(
                f"steps {first} to {step} had a non-finite loss or gradient, and those updates were skipped. Lower "
                f"optimizer.lr, lengthen optimizer.warmup_steps, or look at the {suspect} of these steps; "
                f"{self._metrics_file} has the numbers."
            )
