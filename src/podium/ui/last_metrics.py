# SPDX-License-Identifier: Apache-2.0
"""The last value of every metric of a run, read on as its file grows. A stream asks after every step."""

from __future__ import annotations

import threading
from pathlib import Path

from podium.observe.metrics import StepMetrics, parse_line

# What is read of a file at first, or of one that has grown by more.
_TAIL_BYTES = 1 << 18


class LastMetrics:
    """Of one file. One that was replaced or shortened is read anew. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inode, self._offset = -1, 0
        self._last: StepMetrics | None = None

    def read(self, path: Path) -> StepMetrics | None:
        """The last values of all metrics, with the greatest step and the last time; None if there are none. Lines that
        are not whole yet, or that no run wrote, are left out."""
        with self._lock:
            try:
                stat = path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset, self._last = stat.st_ino, 0, None
                begin = max(self._offset, stat.st_size - _TAIL_BYTES)
                with path.open("rb") as file:
                    file.seek(begin)
                    content = file.read(stat.st_size - begin)
            except OSError:
                self._inode, self._offset, self._last = -1, 0, None
                return None
            *lines, rest = content.split(b"\n")
            self._offset = begin + len(content) - len(rest)
            for line in lines:
                found = parse_line(line)
                if found is not None:
                    self._last = found if self._last is None else _merged(self._last, found)
            return self._last


def _merged(before: StepMetrics, line: StepMetrics) -> StepMetrics:
    return StepMetrics(step=max(before.step, line.step), time_s=line.time_s, values={**before.values, **line.values})
