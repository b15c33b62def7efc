# SPDX-License-Identifier: Apache-2.0
"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podium.observe import TimeSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path
    status: Literal["finished", "stopped"]
    step: int
    loss: float | None
    heldout_loss: float | None
    score: float | None
    time: TimeSummary
