# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run for the page: what every worker did when, and while it was idle, what the controller did. Fine
parts are merged, so that an answer has a bounded size; the seconds of every cause stay what they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.observe.timeline import TimelineWorker, earlier_file, read_timeline, timeline_file
from podium.runs.accounting import CausedSegment, caused_segments
from podium.ui.apart import Apart
from podium.ui.summaries import event_marks

# Of every file, what is read before the first answer. It is enough for most runs.
_NEWEST_BYTES = 1 << 20
# Reading all files, which have at most 64 MiB each.
_MOST_READ_S, _ENDING_S = 120.0, 10.0
# Fine parts are merged into stretches of so many points, each with its largest causes.
_STRETCH, _MOST_CAUSES = 8, 5
# Reading again takes at most this share of the time.
_BUSY_SHARE = 0.2
_MOST_WORKERS = 256
# Spans of one answer, about.
_MOST_SPANS = 400_000
_OTHER = "other"
Json = dict[str, Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSegments:
    """All that one worker did, as columns: no gaps within a launch of the run."""

    worker: str
    begin_s: Floats
    end_s: Floats
    cause: NDArray[np.int64]  # its place in `causes`
    causes: Sequence[tuple[str, bool]]  # name, and whether it is idle time
    span: NDArray[np.int64]  # its place in `names`
    names: Sequence[str]  # of spans; empty: the worker was in none

    @classmethod
    def of(cls, worker: str, segments: Iterable[CausedSegment]) -> WorkerSegments:
        """From segments in the order of time."""
        causes: dict[tuple[str, bool], int] = {}
        names: dict[str, int] = {}
        rows = [
            (
                each.begin_s, each.end_s, causes.setdefault((each.cause, each.is_idle), len(causes)),
                names.setdefault(each.name or "", len(names)),
            )
            for each in segments
        ]  # fmt: skip
        columns = np.array(rows, dtype=np.float64).reshape(-1, 4)
        return cls(
            worker=worker, begin_s=columns[:, 0], end_s=columns[:, 1], cause=columns[:, 2].astype(np.int64),
            causes=list(causes), span=columns[:, 3].astype(np.int64), names=list(names),
        )  # fmt: skip

    def before(self, moment_s: float) -> WorkerSegments:
        """What it did until a moment."""
        last = int(np.searchsorted(self.begin_s, moment_s, "left"))
        return replace(
            self,
            begin_s=self.begin_s[:last],
            end_s=np.minimum(self.end_s[:last], moment_s),
            cause=self.cause[:last],
            span=self.span[:last],
        )

    def followed_by(self, later: WorkerSegments) -> WorkerSegments:
        """Both, one after the other."""
        causes = list(dict.fromkeys((*self.causes, *later.causes)))
        places = np.array([causes.index(each) for each in later.causes], dtype=np.int64)
        names = list(dict.fromkeys((*self.names, *later.names)))
        name_places = np.array([names.index(each) for each in later.names], dtype=np.int64)
        return replace(
            self, begin_s=np.concatenate((self.begin_s, later.begin_s)),
            end_s=np.concatenate((self.end_s, later.end_s)),
            cause=np.concatenate((self.cause, places[later.cause])), causes=causes,
            span=np.concatenate((self.span, name_places[later.span])), names=names,
        )  # fmt: skip

    def spans(self, begin_s: float, end_s: float, points: int) -> list[Json]:
        """What it did in an interval. Parts that are shorter than a point are merged with their neighbours into
        stretches, in which each cause has its share; those are marked as merged."""
        first, last = np.searchsorted(self.end_s, begin_s, "right"), np.searchsorted(self.begin_s, end_s, "left")
        begins = np.clip(self.begin_s[first:last], begin_s, end_s)
        ends, causes = np.clip(self.end_s[first:last], begin_s, end_s), self.cause[first:last]
        is_kept = ends > begins
        begins, ends, causes, spans = begins[is_kept], ends[is_kept], causes[is_kept], self.span[first:last][is_kept]
        if not len(begins):
            return []
        point_s = (end_s - begin_s) / points
        is_long = (ends - begins >= point_s) | (len(begins) <= points)
        stretch = ((begins - begin_s) / (_STRETCH * point_s)).astype(np.int64)
        is_gap = np.append(True, begins[1:] > ends[:-1] + point_s)  # between two launches of the run
        is_new = is_long | np.append(True, is_long[:-1]) | np.append(True, stretch[1:] != stretch[:-1]) | is_gap
        starts = np.flatnonzero(is_new)
        stops = np.append(starts[1:], len(begins))
        found: list[Json] = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            if stop == start + 1:
                name, is_idle = self.causes[causes[start]]
                _append(found, name, is_idle, float(begins[start]), float(ends[start]), is_merged=False)
                if self.names[spans[start]]:
                    found[-1]["span"] = self.names[spans[start]]
            else:
                self._merge(found, begins[start:stop], ends[start:stop], causes[start:stop])
        return found

    def _merge(self, found: list[Json], begins: Floats, ends: Floats, causes: NDArray[np.int64]) -> None:
        seconds = np.bincount(causes, weights=ends - begins, minlength=len(self.causes))
        order = np.argsort(-seconds, kind="stable")
        shown = [at for at in order[:_MOST_CAUSES].tolist() if seconds[at] > 0]
        rest = float(seconds.sum() - seconds[shown].sum())
        at_s = float(begins[0])
        for place in sorted(shown):  # in one order everywhere, so that bands line up
            name, is_idle = self.causes[place]
            length = float(seconds[place])
            _append(found, name, is_idle, at_s, at_s + length, is_merged=True)
            at_s += length
        if rest > 1e-9:
            _append(found, _OTHER, False, at_s, at_s + rest, is_merged=True)


def _append(found: list[Json], name: str, is_idle: bool, begin_s: float, end_s: float, *, is_merged: bool) -> None:
    found.append({"name": name, "begin_s": round(begin_s, 6), "end_s": round(end_s, 6), "idle": is_idle})
    if is_merged:
        found[-1]["merged"] = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Read:
    """What was read of the files. `is_whole`: they have no more than that."""

    stamp: object = None
    workers: Sequence[WorkerSegments] = ()
    is_whole: bool = True
    read_s: float = 0.0  # how long it took
    at_s: float = 0.0  # when


class RunTimeline:
    """The timeline of one run. The newest part of large files is read at once, the rest by a process of its own. They
    are read again when they have grown, but not all the time."""

    def __init__(self, run: Path, apart: Apart) -> None:
        self._run, self._apart = run, apart
        self._lock = threading.Lock()
        self._newest, self._whole = _Read(), _Read()
        self._reader: threading.Thread | None = None

    def read_rest(self) -> bool:
        """Waits until large files are read to their beginning. Returns whether they are."""
        if self._current().is_whole:
            return True
        if self._reader is not None:
            self._reader.join(_MOST_READ_S + _ENDING_S)
        return self._current().is_whole

    def view(self, begin_s: float | None, end_s: float | None, points: int) -> Json:
        """An interval, by default the whole."""
        read = self._current()
        workers = read.workers
        points = min(points, _MOST_SPANS // max(1, min(len(workers), _MOST_WORKERS)))
        whole = _extent(workers)
        begin, end = whole[0] if begin_s is None else begin_s, whole[1] if end_s is None else end_s
        marks = event_marks(self._run)
        if not workers or end <= begin:
            return {
                "begin_s": begin,
                "end_s": end,
                "whole": list(whole),
                "is_whole": True,
                "workers": [],
                "marks": marks,
            }
        return {
            "begin_s": begin,
            "end_s": end,
            "whole": list(whole),
            "is_whole": read.is_whole,
            "workers": [
                {
                    "name": each.worker, "kind": TimelineWorker.of(each.worker).kind,
                    "spans": each.spans(begin, end, points),
                }
                for each in workers[:_MOST_WORKERS]
            ],
            "left_out": max(0, len(workers) - _MOST_WORKERS),
            "marks": [mark for mark in marks if begin <= mark["time_s"] <= end],
        }  # fmt: skip

    def accounting(self) -> Json:
        """The seconds of every worker by cause."""
        read = self._current()
        times = [(each.worker, _seconds(each)) for each in read.workers]
        return {
            "is_whole": read.is_whole,
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

    def _current(self) -> _Read:
        with self._lock:  # a second request waits for the reader instead of reading too
            stamp = tuple(_stamps(self._run))
            if _is_due(self._newest, stamp):
                begin_s = time.monotonic()
                workers = read_workers(self._run, _NEWEST_BYTES)
                is_whole = all(size <= _NEWEST_BYTES for _, size, _ in stamp) and not _has_earlier(self._run)
                end_s = time.monotonic()
                self._newest = _Read(
                    stamp=stamp, workers=workers, is_whole=is_whole, read_s=end_s - begin_s, at_s=end_s
                )
            if self._newest.is_whole:
                return self._newest
            if _is_due(self._whole, stamp) and (self._reader is None or not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read_whole, args=(stamp,), daemon=True)
                self._reader.start()
            if self._whole.stamp is None:
                return self._newest
            return replace(self._newest, workers=_joined(self._whole.workers, self._newest.workers), is_whole=True)

    def _read_whole(self, stamp: object) -> None:
        begin_s = time.monotonic()
        workers = self._apart.call(read_workers, self._run, None, most_s=_MOST_READ_S)
        end_s = time.monotonic()
        if workers is not None:
            self._whole = _Read(stamp=stamp, workers=workers, read_s=end_s - begin_s, at_s=end_s)


def read_workers(run: Path, most_bytes: int | None) -> list[WorkerSegments]:
    """What all workers did, by the last bytes of every file, or by all."""
    accounted = caused_segments(list(read_timeline(run, most_bytes=most_bytes)))
    return [WorkerSegments.of(worker, segments) for worker, segments in accounted.items()]


def _is_due(last: _Read, stamp: object) -> bool:
    """Whether files that changed are read again now."""
    if last.stamp is None:
        return True
    return stamp != last.stamp and time.monotonic() - last.at_s >= last.read_s / _BUSY_SHARE - last.read_s


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


def _has_earlier(run: Path) -> bool:
    return earlier_file(timeline_file(run)).is_file()


def _stamps(run: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(run.glob("timeline*.jsonl")):
        try:
            stat = path.stat()
        except OSError:
            continue
        yield path.name, stat.st_size, stat.st_ino
