# SPDX-License-Identifier: Apache-2.0
"""Counts the processes that a local Ray starts as workers, to notice one that died before it registered.

Ray's raylet gives up such a process only after a minute, without a report. A process that registers goes to the worker
that has waited longest, whichever it was started for. So a dead process is missing at the end of the queue, and a
worker that is given up takes its process with it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Hashable

from podium.cluster.processes import ProcessInfo

# The raylet starts no more than this at a time.
MOST_AT_ONCE = 64
# Consecutive checks, ten a second. Ray takes some 20 ms from a request to its process. A busy machine takes longer, but
# checks less often too.
_LOOKS = 20


class StartingProcesses:
    """The workers that have not started yet, and the processes that can become them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Hashable] = set()
        self._workers: set[tuple[int, int]] = set()
        self._looks = 0
        self._found_s = -math.inf

    def add(self, worker: Hashable) -> None:
        """Registers that Ray was asked for a process for this worker."""
        with self._lock:
            self._waiting.add(worker)
            self._looks = 0

    def discard(self, worker: Hashable, process: ProcessInfo | None = None) -> None:
        """Stops waiting for the worker: it was given up, or runs as `process`."""
        with self._lock:
            self._waiting.discard(worker)
            self._looks = 0
            if process is not None:
                self._workers.add((process.pid, process.started))

    def look(self, processes: Collection[ProcessInfo]) -> None:
        """Takes the living processes of the raylet that are workers or may become workers."""
        living = {(each.pid, each.started) for each in processes}
        with self._lock:
            is_short = len(living - self._workers) < min(len(self._waiting), MOST_AT_ONCE)
            self._looks = self._looks + 1 if is_short else 0
            if self._looks >= _LOOKS:
                self._looks, self._found_s = 0, time.monotonic()

    def is_missing(self, since_s: float) -> bool:
        """Whether a process was found missing since then (by time.monotonic). All workers that waited at that time must
        be started again: if only some are, the process is still missing for the others."""
        with self._lock:
            return self._found_s > since_s
