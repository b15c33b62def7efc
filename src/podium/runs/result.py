# SPDX-License-Identifier: Apache-2.0
"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podium.errors import ProgramError
from podium.observe import TimeSummary
from podium.recipe import Recipe

EndStatus = Literal["finished", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path
    status: EndStatus
    step: int
    loss: float | None
    heldout_loss: float | None
    score: float | None
    time: TimeSummary
    table: tuple[str, ...] = ()  # what the seconds of the workers went into

    def lines(self) -> list[str]:
        """Where the time went, how the run ended, the command that comes next, and the time of the workers."""
        spent = [f"  {line}" for line in self.time.lines()]
        if self.status == "finished":
            end = [f"finished at step {self.step}: {self.folder}", f"  export it with: podium export {self.folder} OUT"]
        elif self.step == 0:
            end = [f"stopped before the end of the first step: nothing is left of {self.folder}"]
        else:
            end = [f"stopped at step {self.step}; continue with: podium resume {self.folder}"]
        return [*spent, *end, *self.table]


def left_early(program: str, step: int) -> ProgramError:
    """The error for a program that returned before its last step."""
    return ProgramError(
        f"program {program} returned after step {step}, before the loop over run.steps() ended, and the last steps are "
        "not saved. Let the loop end by itself: it ends after `steps` steps, and when a stop is asked for."
    )


def end_status(recipe: Recipe, step: int) -> EndStatus:
    """Whether a run that ended at this step finished all its steps."""
    return "finished" if step >= recipe.steps else "stopped"
