# SPDX-License-Identifier: Apache-2.0
"""A Podium logger that notes when each step was recorded: how the benchmark reads the clocks inside a run."""

from __future__ import annotations

import time
from pathlib import Path

from podium.observe import StepMetrics


class StepClock:
    """Plugged in through run.loggers; `wall_s` and `cpu_s` hold the clocks at the end of every step."""

    wall_s: list[float] = []
    cpu_s: list[float] = []

    def __init__(self, folder: Path) -> None:
        self.wall_s.clear()
        self.cpu_s.clear()

    def log(self, metrics: StepMetrics) -> None:
        if "step_s" in metrics.values:
            self.wall_s.append(time.perf_counter())
            self.cpu_s.append(time.process_time())

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...
