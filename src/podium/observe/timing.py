# SPDX-License-Identifier: Apache-2.0
"""Accounts every second of a run to exactly one cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseTime:
    """The seconds that one cause took, and their share of the whole."""

    cause: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSummary:
    """All causes, the largest first and "other" last. The seconds add up to `total_s`."""

    total_s: float
    rows: tuple[CauseTime, ...]

    def lines(self) -> list[str]:
        """The table as text, one line per cause and one for the sum."""
        rows = [*self.rows, CauseTime(cause="total", seconds=self.total_s, share=1.0)]
        width = max(len(row.cause) for row in rows)
        return [f"{row.cause:<{width}}  {row.seconds:>9.2f} s  {row.share:>6.1%}" for row in rows]


class Stopwatch:
    """Runs from its creation. A span inside another pauses the outer one, so no second counts twice. Used by one
    thread: the one that runs the program."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._marked_at = clock()
        self._seconds: dict[str, float] = {OTHER: 0.0}
        self._open = [OTHER]

    @contextmanager
    def span(self, cause: str) -> Iterator[None]:
        """Accounts the time inside to `cause`."""
        self._settle()
        self._open.append(cause)
        self._seconds.setdefault(cause, 0.0)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def seconds(self) -> Mapping[str, float]:
        """The seconds of every cause up to now; subtract two readings for the time in between."""
        self._settle()
        return dict(self._seconds)

    def summary(self) -> TimeSummary:
        """The table up to now."""
        seconds = self.seconds()
        total_s = sum(seconds.values())
        ordered = sorted(seconds.items(), key=lambda item: (item[0] == OTHER, -item[1]))
        rows = tuple(
            CauseTime(cause=cause, seconds=spent, share=spent / total_s if total_s > 0 else 0.0)
            for cause, spent in ordered
        )
        return TimeSummary(total_s=total_s, rows=rows)

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._marked_at
        self._marked_at = now
