# SPDX-License-Identifier: Apache-2.0
"""Memory, processors and GPUs of this machine, as Linux and the driver count them. Elsewhere there are no figures."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from podium.observe.gpus import GpuFigures

MACHINE_FILE = "machine.jsonl"  # in the folder of a run
_GIB = 1 << 30
_EVERY_S = 10.0
# Reading takes at most a thousandth of the time.
_TIMES = 1000.0


class MachineFigures:
    """Figures for trackers and the page, at most one set in ten seconds. Only one thread may use it."""

    def __init__(
        self, proc: Path = Path("/proc"), *, every_s: float = _EVERY_S, gpus: GpuFigures | None = None
    ) -> None:
        self._proc, self._every_s = proc, every_s
        self._gpus = gpus or GpuFigures()
        self._next_s = 0.0
        self._ticks = self._processor_ticks()

    def due(self) -> dict[str, float]:
        """The figures, or nothing if the last ones are new enough. `machine/cpu` is the share of all processors that
        was busy since then, memory is in GiB."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return {}
        figures = {**self._memory(), **self._cpu(), **self._gpus.read()}
        ended_s = time.monotonic()
        self._next_s = now_s + max(self._every_s, _TIMES * (ended_s - now_s) if self._every_s else 0.0)
        return figures

    def _memory(self) -> dict[str, float]:
        figures = {}
        try:
            pages = int((self._proc / "self" / "statm").read_text().split()[1])
            figures["machine/process_memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / _GIB
            sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", (self._proc / "meminfo").read_text(), re.MULTILINE))
            used = int(sizes["MemTotal"]) - int(sizes["MemAvailable"])
            figures["machine/memory_gib"] = used * 1024 / _GIB
        except (OSError, KeyError, IndexError, ValueError):
            pass
        return figures

    def _cpu(self) -> dict[str, float]:
        before, now = self._ticks, self._processor_ticks()
        self._ticks = now
        if before is None or now is None or now[1] <= before[1]:
            return {}
        return {"machine/cpu": (now[0] - before[0]) / (now[1] - before[1])}

    def _processor_ticks(self) -> tuple[int, int] | None:
        """(busy, all) of all processors since the machine has started."""
        try:
            first = (self._proc / "stat").read_text().partition("\n")[0]
            user, nice, system, idle, iowait, *rest = (int(field) for field in first.split()[1:9])
        except (OSError, ValueError):
            return None
        busy = user + nice + system + sum(rest)
        return busy, busy + idle + iowait
