# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run for the page: what every worker did when, and while it was idle, what the controller did. While
a run goes on only what is new is read, accounted and sent."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from podium.observe.timeline import TimelineWorker, read_timeline
from podium.observe.timeline_growth import TimelineGrowth
from podium.runs.accounting import CausedSegment, caused_segments
from podium.runs.growing_accounts import GrowingAccounts
from podium.ui.apart import Apart
from podium.ui.timeline_marks import SpanMark, TimelineMarks, span_marks
from podium.ui.worker_segments import STRETCH, WorkerSegments

# Of every file, what is read before the first answer. It is enough for most runs.
_NEWEST_BYTES = 1 << 20
# Reading all files, which have at most 64 MiB each.
_MOST_READ_S, _ENDING_S = 120.0, 10.0
# Reading the newest part, or all, again takes at most this share of the time.
_BUSY_SHARE, _WHOLE_SHARE = 0.02, 0.003
_MOST_WORKERS = 256
# Spans of one answer, about.
_MOST_SPANS = 400_000
# What changed when is known of so many reads: a page that has an older version gets the whole again.
_MOST_CHANGES = 100
# Marks that are nearer to each other than so many points are one. Answers with only what is new begin at such a border.
_MARK_POINTS = 2 * STRETCH
Json = dict[str, Any]


@dataclass(slots=True)
class _Changes:
    """From which moment on the timeline changed, by version. Another instance has other versions."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(4))
    number: int = 0
    since_s: dict[int, float] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return f"{self.nonce}-{self.number}"

    def note(self, since_s: float) -> None:
        if since_s < math.inf:
            self.number += 1
            self.since_s[self.number] = since_s
            self.since_s.pop(self.number - _MOST_CHANGES, None)

    def after(self, version: str) -> float | None:
        """From which moment on something changed since a version; None: that is not known."""
        nonce, _, number = version.partition("-")
        if nonce != self.nonce or not number.isascii() or not number.isdigit():
            return None
        missing = range(int(number) + 1, self.number + 1)
        if len(missing) > len(self.since_s):
            return None
        return min((self.since_s[each] for each in missing), default=math.inf)


@dataclass(slots=True)
class _Pace:
    """How often something that takes long is done again."""

    share: float
    next_s: float = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.next_s

    def done(self, began_s: float) -> None:
        ended_s = time.monotonic()
        self.next_s = ended_s + (ended_s - began_s) / self.share


class RunTimeline:
    """The timeline of one run. The newest part of large files is read at once, the rest by a process of its own. What
    is written later is added: all is read again only when files were replaced, the run was launched again, or a worker
    is new. Used by several threads."""

    def __init__(self, run: Path, apart: Apart) -> None:
        self._run, self._apart = run, apart
        self._lock = threading.Lock()
        self._growth: TimelineGrowth | None = None
        self._accounts = GrowingAccounts([])
        self._workers: dict[str, WorkerSegments] = {}
        self._marks = TimelineMarks(run)
        self._is_whole, self._exact_s = True, -math.inf
        self._rotated_s = -math.inf  # when the files that are there now began, but for the full ones
        self._changes = _Changes()
        self._beginning, self._reading = _Pace(_BUSY_SHARE), _Pace(_WHOLE_SHARE)
        self._reader: threading.Thread | None = None
        self._older: tuple[list[WorkerSegments], list[SpanMark]] | None = None

    def read_rest(self) -> bool:
        """Waits until large files are read to their beginning. Returns whether they are."""
        with self._lock:
            self._refresh()
            reader = None if self._is_whole else self._reader
        if reader is not None:
            reader.join(_MOST_READ_S + _ENDING_S)
        with self._lock:
            self._refresh()
            return self._is_whole

    def view(
        self, begin_s: float | None, end_s: float | None, points: int,
        *, after: str = "", point_s: float | None = None,
    ) -> Json:  # fmt: skip
        """An interval, by default the whole. `after`: the version of an earlier answer for the same begin; where it is
        known what changed since then, the answer has only that, from `since_s` on, with points of `point_s`."""
        with self._lock:
            self._refresh()
            workers, version, is_whole = list(self._workers.values()), self._changes.version, self._is_whole
            whole = _extent(workers)
            begin, end = whole[0] if begin_s is None else begin_s, whole[1] if end_s is None else end_s
            points = min(points, _MOST_SPANS // max(1, min(len(workers), _MOST_WORKERS)))
            first_s = None if point_s is None else self._first_new_s(after, begin, end, points, point_s)
            if point_s is None or first_s is None:
                point_s = max(0.0, end - begin) / points
            if not workers or end <= begin:
                marks = self._marks.between(-math.inf, math.inf, origin_s=0.0, width_s=1.0)
            else:
                shown_s = begin if first_s is None else first_s
                marks = self._marks.between(shown_s, end, origin_s=begin, width_s=_MARK_POINTS * point_s)
        common = {
            "begin_s": begin, "end_s": end, "whole": list(whole), "point_s": point_s, "version": version,
            "marks": marks, "left_out": max(0, len(workers) - _MOST_WORKERS),
        }  # fmt: skip
        if not workers or end <= begin:
            return common | {"is_whole": True, "workers": []}
        lanes = [
            {
                "name": each.worker,
                "kind": TimelineWorker.of(each.worker).kind,
                "spans": each.spans(shown_s, end, point_s),
            }
            for each in (workers[:_MOST_WORKERS] if shown_s < end else ())
        ]
        return common | {"is_whole": is_whole, "workers": lanes} | ({} if first_s is None else {"since_s": first_s})

    def _first_new_s(self, version: str, begin_s: float, end_s: float, points: int, point_s: float) -> float | None:
        """Where an answer with only what is new begins: at a border of merged parts and marks. None: it has all."""
        changed_s = self._changes.after(version)
        if changed_s is None or not point_s > 0:
            return None
        width_s = _MARK_POINTS * point_s
        if changed_s >= end_s:
            return end_s
        first_s = max(begin_s, begin_s + width_s * ((changed_s - begin_s) // width_s))
        return first_s if (end_s - first_s) / point_s <= points else None

    def accounting(self) -> Json:
        """The seconds of every worker by cause."""
        with self._lock:
            self._refresh()
            workers, is_whole = list(self._workers.values()), self._is_whole
        times = [(each.worker, _seconds(each)) for each in workers]
        return {
            "is_whole": is_whole,
            "workers": [
                {
                    "name": worker,
                    "kind": TimelineWorker.of(worker).kind,
                    "seconds": dict(sorted(seconds.items(), key=lambda item: -item[1])),
                    "total_s": sum(seconds.values()),
                }
                for worker, seconds in times
            ],
        }

    def _refresh(self) -> None:
        """Reads what is new."""
        if self._growth is None:
            if self._beginning.is_due:
                self._begin()
        else:
            self._grow(self._growth)
        if self._older is not None:
            self._join_older(*self._older)
        self._changes.note(self._marks.refresh())

    def _grow(self, growth: TimelineGrowth) -> None:
        spans = growth.read()
        if spans is None:  # written by another run: nothing of what is known is of this one
            self._growth, self._workers, self._marks = None, {}, TimelineMarks(self._run)
            self._begin()
            return
        if not spans:
            return
        change = self._accounts.add(spans)
        if change is None:
            self._growth = None
            if self._beginning.is_due:
                self._begin()
            return
        for worker, segments in change.segments.items():
            if segments:
                known, new = self._workers.get(worker), WorkerSegments.of(worker, segments)
                self._workers[worker] = new if known is None else known.before(change.since_s).followed_by(new)
        self._changes.note(min(change.since_s, self._marks.add(span_marks(spans))))
        if not change.is_exact:
            self._exact_s = max(self._exact_s, change.since_s)
            self._read_older()
        if growth.was_rotated:
            self._forget()

    def _forget(self) -> None:
        """What no file has any more is forgotten, so that memory is bounded."""
        kept = [each.after(self._rotated_s) for each in self._workers.values()]
        self._rotated_s = _extent(kept)[1]
        self._workers, self._changes = _by_name(each for each in kept if len(each.begin_s)), _Changes()

    def _begin(self) -> None:
        """Reads the newest part. What is known of earlier times stays."""
        began_s = time.monotonic()
        growth = TimelineGrowth(self._run, most_bytes=_NEWEST_BYTES)
        spans = growth.read() or []
        newest = _columns(caused_segments(spans))
        self._accounts, self._growth = GrowingAccounts(spans), growth
        self._marks.add(span_marks(spans))
        self._exact_s = _extent(newest)[0]
        self._is_whole = growth.is_whole or (bool(self._workers) and self._is_whole)
        self._workers = _by_name(newest if growth.is_whole else _joined(list(self._workers.values()), newest))
        self._changes = _Changes()
        self._beginning.done(began_s)
        if not self._is_whole:
            self._read_older()

    def _read_older(self) -> None:
        if (self._reader is None or not self._reader.is_alive()) and self._reading.is_due:
            self._reader = threading.Thread(target=self._read_all, daemon=True)
            self._reader.start()

    def _read_all(self) -> None:
        began_s = time.monotonic()
        found = self._apart.call(read_workers, self._run, most_s=_MOST_READ_S)
        self._reading.done(began_s)
        if found is not None:
            self._older = found

    def _join_older(self, workers: Sequence[WorkerSegments], marks: Sequence[SpanMark]) -> None:
        newer = [each.after(self._exact_s) for each in self._workers.values()]
        self._workers, self._is_whole, self._older = _by_name(_joined(workers, newer)), True, None
        self._marks.add(marks)
        self._changes = _Changes()


def read_workers(run: Path) -> tuple[list[WorkerSegments], list[SpanMark]]:
    """What all workers did, and the marks, by all that the files have."""
    spans = list(read_timeline(run))
    return _columns(caused_segments(spans)), span_marks(spans)


def _columns(accounted: Mapping[str, Iterable[CausedSegment]]) -> list[WorkerSegments]:
    return [WorkerSegments.of(worker, segments) for worker, segments in accounted.items()]


def _by_name(workers: Iterable[WorkerSegments]) -> dict[str, WorkerSegments]:
    return {each.worker: each for each in workers}


def _joined(older: Sequence[WorkerSegments], newer: Sequence[WorkerSegments]) -> list[WorkerSegments]:
    """The newer ones, and before they begin the older ones."""
    begin_s = _extent(newer)[0]
    if not begin_s:
        return list(older)
    by_name = {each.worker: each.before(begin_s) for each in older}
    for each in newer:
        known = by_name.get(each.worker)
        by_name[each.worker] = each if known is None else known.followed_by(each)
    return list(by_name.values())


def _seconds(worker: WorkerSegments) -> dict[str, float]:
    sums = np.bincount(worker.cause, weights=worker.end_s - worker.begin_s, minlength=len(worker.causes))
    return {name: float(spent) for (name, _), spent in zip(worker.causes, sums, strict=True)}


def _extent(workers: Sequence[WorkerSegments]) -> tuple[float, float]:
    filled = [each for each in workers if len(each.begin_s)]
    if not filled:
        return 0.0, 0.0
    return min(float(each.begin_s[0]) for each in filled), max(float(each.end_s[-1]) for each in filled)
