# SPDX-License-Identifier: Apache-2.0
"""Moments on the timeline of the page: publishes of weights, devices that were lent or recalled, deaths, recoveries,
and generators that joined or left."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.observe.timeline import TimelineSpan, published_version
from podium.observe.timing import LENT, RECALLED
from podium.runs.events import EVENTS_FILE
from podium.ui.summaries import event_marks

# Of one kind, the newest.
_MOST_MARKS = 100_000
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class SpanMark:
    """A moment that the timeline itself has. `version`: of published weights, or -1."""

    time_s: float
    kind: str  # publish, lent, recalled
    version: int = -1


def span_marks(spans: Iterable[TimelineSpan]) -> list[SpanMark]:
    """The marks among spans, in the order of time, but for those of slots: the events of the run say more."""
    found = []
    for span in spans:
        if (version := published_version(span)) is not None:
            found.append(SpanMark(span.begin_s, "publish", version))
        elif span.name in (LENT, RECALLED):
            found.append(SpanMark(span.begin_s, "lent" if span.name == LENT else "recalled"))
    return sorted(found)


class TimelineMarks:
    """All marks of one run. Not for several threads at once."""

    def __init__(self, run: Path) -> None:
        self._file, self._run = run / EVENTS_FILE, run
        self._stamp: object = None
        self._events: list[Json] = []
        self._spans: dict[str, list[SpanMark]] = {}

    def add(self, marks: Iterable[SpanMark]) -> float:
        """Takes marks of new spans; those that are known are left out. Returns the time of the first new one."""
        first_s = math.inf
        for mark in marks:
            known = self._spans.setdefault(mark.kind, [])
            at = bisect_left(known, mark)
            if at == len(known) or known[at] != mark:
                insort(known, mark)
                first_s = min(first_s, mark.time_s)
                if len(known) > _MOST_MARKS:
                    del known[: _MOST_MARKS // 10]
        return first_s

    def refresh(self) -> float:
        """Reads the events if they have changed. Returns the time of the first that is new."""
        try:
            stat = self._file.stat()
            stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
        except OSError:
            stamp = None
        if stamp == self._stamp:
            return math.inf
        known = {repr(each) for each in self._events}
        self._events, self._stamp = list(_with_deaths(event_marks(self._run))), stamp
        return min((each["time_s"] for each in self._events if repr(each) not in known), default=math.inf)

    def between(self, begin_s: float, end_s: float, *, origin_s: float, width_s: float) -> list[Json]:
        """Marks of an interval in the order of time. Those of the timeline that are of one kind, and nearer to each
        other than can be told apart, are one with the text of all: pieces of `width_s` are counted from `origin_s`."""
        found = [each for each in self._events if begin_s <= each["time_s"] <= end_s]
        for kind, marks in self._spans.items():
            first, last = bisect_left(marks, SpanMark(begin_s, "")), bisect_right(marks, SpanMark(end_s, "~"))
            pieces: dict[int, list[SpanMark]] = {}
            for mark in marks[first:last]:
                pieces.setdefault(int((mark.time_s - origin_s) // width_s), []).append(mark)
            found += [_together(kind, piece) for piece in pieces.values()]
        return sorted(found, key=lambda each: each["time_s"])


def _together(kind: str, marks: Sequence[SpanMark]) -> Json:
    first, last, count = marks[0], marks[-1], len(marks)
    match kind:
        case "publish" if count == 1:
            text = f"weights of version {first.version}"
        case "publish":
            text = f"weights of versions {first.version} to {last.version}: {count} times"
        case "lent":
            text = "the learner's devices generate" + (f": {count} times" if count > 1 else "")
        case _:
            text = "the learner has its devices back" + (f": {count} times" if count > 1 else "")
    found = {"time_s": round(first.time_s, 6), "kind": kind, "text": text}
    return found if count == 1 else found | {"count": count, "end_s": round(last.time_s, 6)}


def _with_deaths(marks: Iterable[Json]) -> Iterable[Json]:
    """A recovery says when the run went on, and how long that took: something died before."""
    for mark in marks:
        if mark["kind"] == "recovery" and mark.get("seconds", 0.0) > 0:
            yield {**mark, "kind": "death", "time_s": mark["time_s"] - mark["seconds"]}
        yield mark
