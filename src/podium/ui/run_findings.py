# SPDX-License-Identifier: Apache-2.0
"""What stands out in a run, for the page. A process of its own looks for it: no request waits for that."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podium.observe.metrics import METRICS_FILE
from podium.ui.apart import Apart

_MOST_READ_S = 180.0
# Of the timeline: some twenty thousand spans, whose time is accounted in a second.
_TIMELINE_BYTES = 1 << 20
# A run that goes on is looked at again after so many seconds, and after so many times what the last look took: it
# takes at most 0.3% of a processor.
_AGAIN_S, _AGAIN_TIMES = 10.0, 333.0
Json = dict[str, Any]


class RunFindings:
    """The findings of one run, of the last time that somebody asked."""

    def __init__(self, run: Path, apart: Apart, executor: concurrent.futures.Executor) -> None:
        self._run, self._apart, self._executor = run, apart, executor
        self._lock = threading.Lock()
        self._found: list[Json] | None = None
        self._is_pending = True
        self._stamp: object = None
        self._next_s = 0.0
        self._future: concurrent.futures.Future[None] | None = None

    def view(self, wait_s: float = 0.0) -> Json:
        """`findings` are null where the run cannot be read; `pending`: not all of the first look are there yet."""
        with self._lock:
            stamp = _stamp(self._run)
            is_due = stamp != self._stamp and time.monotonic() >= self._next_s
            if is_due and (self._future is None or self._future.done()):
                self._future = self._executor.submit(self._read, stamp)
            future = self._future
        if future is not None and wait_s > 0:
            concurrent.futures.wait([future], timeout=wait_s)
        return {"findings": self._found, "pending": self._is_pending}

    def _read(self, stamp: object) -> None:
        begin_s = time.monotonic()
        found: list[Json] | None = None
        with contextlib.closing(self._apart.each(read_findings, self._run, most_s=_MOST_READ_S)) as parts:
            for part in parts:
                found = [*(found or ()), *part]
                if self._is_pending:
                    self._found = found
        end_s = time.monotonic()
        with self._lock:
            self._found, self._stamp, self._is_pending = found, stamp, False
            self._next_s = end_s + max(_AGAIN_S, _AGAIN_TIMES * (end_s - begin_s))


def read_findings(run: Path) -> Iterator[list[Json]]:
    """Findings as JSON, and then suggestions: simulations may take longer. For a process of its own: only that one
    needs the planner."""
    from podium.planning.findings import findings_of, suggestions_of
    from podium.planning.run_records import newest_spans

    spans = newest_spans(run, _TIMELINE_BYTES)
    yield [asdict(each) for each in findings_of(run, spans)]
    yield [asdict(each) for each in suggestions_of(run, spans)]


def _stamp(run: Path) -> tuple[tuple[str, int, int], ...]:
    found = []
    for path in (run / METRICS_FILE, *sorted(run.glob("timeline*.jsonl"))):
        try:
            stat = path.stat()
        except OSError:
            continue
        found.append((path.name, stat.st_size, stat.st_ino))
    return tuple(found)
