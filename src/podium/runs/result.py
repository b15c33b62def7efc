# SPDX-License-Identifier: Apache-2.0
"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


def end_status(recipe: Recipe, step: int) -> EndStatus:
    """Whether a run that ended at this step did all its steps."""
    return "finished" if step >= recipe.steps else "stopped"
