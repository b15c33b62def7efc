# SPDX-License-Identifier: Apache-2.0
"""A Podium logger that notes wall time and the processor time of all processes of the command, at two steps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_clock import tree_cpu_s
from podium.observe import StepMetrics

CLOCK_FILE, STEPS_FILE = "clock.json", "clocked_steps.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Seconds of a step, and of a processor."""

    wall_s: float
    cpu_s: float


class CommandClock:
    """Plugged in through run.loggers; the steps are in a file beside the run folder."""

    def __init__(self, folder: Path) -> None:
        self._steps = json.loads((folder.parent / STEPS_FILE).read_text(encoding="utf-8"))
        self._file, self._seen = folder / CLOCK_FILE, list[tuple[float, float]]()

    def log(self, metrics: StepMetrics) -> None:
        if "step_s" in metrics.values and metrics.step in self._steps:
            # The command has a session of its own: its leader is the parent of all ranks, or the only one.
            self._seen.append((time.perf_counter(), tree_cpu_s(os.getsid(0))))
            self._file.write_text(json.dumps(self._seen), encoding="utf-8")

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


def clocked(run: Path, steps: Sequence[int]) -> Clocks:
    """What a step took on average between the two steps."""
    (wall_s, cpu_s), (end_wall_s, end_cpu_s) = json.loads((run / CLOCK_FILE).read_text(encoding="utf-8"))
    first, last = steps
    return Clocks(wall_s=(end_wall_s - wall_s) / (last - first), cpu_s=(end_cpu_s - cpu_s) / (last - first))
