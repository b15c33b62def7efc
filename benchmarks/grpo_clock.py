# SPDX-License-Identifier: Apache-2.0
"""A Podium logger that notes when each step was recorded, and the processor time of the controller and of everything
that it started: how the benchmark reads the clocks inside a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from podium.observe import StepMetrics


class StepClock:
    """Plugged in through run.loggers; `wall_s` has the clock at the end of every step, `cpu_s` only at the steps in
    `cpu_at`: looking through all processes takes milliseconds."""

    cpu_at: frozenset[int] = frozenset()
    wall_s: list[float] = []
    cpu_s: dict[int, float] = {}

    def __init__(self, folder: Path) -> None:
        self.wall_s.clear()
        self.cpu_s.clear()

    def log(self, metrics: StepMetrics) -> None:
        if "step_s" in metrics.values:
            self.wall_s.append(time.perf_counter())
            if metrics.step in self.cpu_at:
                self.cpu_s[metrics.step] = tree_cpu_s(os.getpid())

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


def tree_cpu_s(root: int, proc: Path = Path("/proc")) -> float:
    """Processor seconds of a process and all its descendants that are alive; NaN where there is no /proc."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            # The name in brackets may hold spaces and brackets itself.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    if root not in seconds:
        return float("nan")
    return sum(spent for pid, spent in seconds.items() if _is_below(pid, root, parents))


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root
