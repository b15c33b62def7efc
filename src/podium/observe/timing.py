# SPDX-License-Identifier: Apache-2.0
"""Accounts every second of a run to exactly one cause, and says when each span was."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

OTHER = "other"
NESTED = " > "
"""Between the names of an outer and an inner span."""
LAUNCH = "launch"
"""The first span of a stopwatch, without length: a process of the run begins."""
PUBLISHED = "published version "
"""With its number, a mark: a span without length, at the moment from which generators can have these weights."""
LENT, RECALLED = "devices lent", "devices recalled"
"""Marks: the learner's devices generate from now on; they learn again."""
JOINED, VACATED = "joined: ", "vacated: "
"""Marks, with the name of a worker: it has come to a vacant slot; it is gone, and has left its slot vacant."""
DIED = "died"
"""A span of a worker, without length: it is dead, or was ended."""
RESTART = "restart"
"""The span of a process that takes the place of one that died, from that death until its own launch."""
LOST = "lost"
"""The inner span of a call that never returned, because a worker died."""
# Spans that nobody takes; the oldest are lost first.
_MOST_SPANS = 100_000
# The time of day when the monotonic clock was 0.
_DAY_S = time.time() - time.monotonic()


def wall_clock_s() -> float:
    """The time of day. It is read once per process and counted on from there, so that a clock that is set during the
    run changes no duration."""
    return _DAY_S + time.monotonic()


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """A span by the stopwatch's clock. Names of outer spans come first: "evaluation > rollout"."""

    name: str
    begin_s: float
    end_s: float


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

    def __init__(self, clock: Callable[[], float] = wall_clock_s) -> None:
        self._clock = clock
        self._marked_at = clock()
        self._seconds: dict[str, float] = {OTHER: 0.0}
        self._open = [OTHER]
        self._names: list[str] = []
        self._spans: deque[FinishedSpan] = deque(maxlen=_MOST_SPANS)
        self._spans.append(FinishedSpan(LAUNCH, self._marked_at, self._marked_at))
        self._launched_at = self._marked_at

    @contextmanager
    def span(self, cause: str) -> Iterator[None]:
        """Accounts the time inside to `cause`."""
        self._settle()
        begin_s = self._marked_at
        self._open.append(cause)
        self._names.append(f"{self._names[-1]}{NESTED}{cause}" if self._names else cause)
        self._seconds.setdefault(cause, 0.0)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()
            self._spans.append(FinishedSpan(self._names.pop(), begin_s, self._marked_at))

    @contextmanager
    def detail(self, name: str) -> Iterator[None]:
        """Says what happens inside the open span. The seconds stay with that one."""
        self._settle()
        begin_s, path = self._marked_at, f"{self._names[-1]}{NESTED}{name}" if self._names else name
        try:
            yield
        finally:
            self._settle()
            self._spans.append(FinishedSpan(path, begin_s, self._marked_at))

    def mark(self, name: str) -> None:
        """Notes a moment, as a span without length. It belongs to no open span."""
        self._settle()
        self._spans.append(FinishedSpan(name, self._marked_at, self._marked_at))

    def note_before(self, name: str, seconds: float) -> None:
        """Says what its process, or one before it, did in these last seconds, as far as they were before its launch.
        No cause gets them: they are not its time."""
        begin_s = self._clock() - seconds
        if begin_s < self._launched_at:
            self._spans.append(FinishedSpan(name, begin_s, self._launched_at))

    def take_spans(self) -> list[FinishedSpan]:
        """Spans that ended since the last call."""
        taken = list(self._spans)
        self._spans.clear()
        return taken

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
