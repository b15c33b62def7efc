# SPDX-License-Identifier: Apache-2.0
"""What one worker did, as columns, and as the spans of a view: fine parts are merged, so that an answer has a bounded
size; the seconds of every cause stay what they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.runs.accounting import CausedSegment

STRETCH = 8
"""Fine parts are merged into stretches of so many points, each with its largest causes."""
_MOST_CAUSES = 5
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

    def after(self, moment_s: float) -> WorkerSegments:
        """What it did from a moment on."""
        first = int(np.searchsorted(self.end_s, moment_s, "right"))
        return replace(
            self,
            begin_s=np.maximum(self.begin_s[first:], moment_s),
            end_s=self.end_s[first:],
            cause=self.cause[first:],
            span=self.span[first:],
        )

    def followed_by(self, later: WorkerSegments) -> WorkerSegments:
        """Both, one after the other. A part that was cut in two is one again."""
        causes = list(dict.fromkeys((*self.causes, *later.causes)))
        places = np.array([causes.index(each) for each in later.causes], dtype=np.int64)
        names = list(dict.fromkeys((*self.names, *later.names)))
        name_places = np.array([names.index(each) for each in later.names], dtype=np.int64)
        cause, span = places[later.cause], name_places[later.span]
        kept, begin_s = len(self.end_s), later.begin_s
        is_cut = kept and len(cause) and self.end_s[-1] == begin_s[0]
        if is_cut and (self.cause[-1], self.span[-1]) == (cause[0], span[0]):
            kept -= 1
            begin_s = np.concatenate((self.begin_s[kept:], begin_s[1:]))
        return replace(
            self, begin_s=np.concatenate((self.begin_s[:kept], begin_s)),
            end_s=np.concatenate((self.end_s[:kept], later.end_s)),
            cause=np.concatenate((self.cause[:kept], cause)), causes=causes,
            span=np.concatenate((self.span[:kept], span)), names=names,
        )  # fmt: skip

    def spans(self, begin_s: float, end_s: float, point_s: float) -> list[Json]:
        """What it did in an interval. Where it has more parts than points, those that are shorter than a point are
        merged with their neighbours into stretches, in which each cause has its share; those are marked as merged."""
        first, last = np.searchsorted(self.end_s, begin_s, "right"), np.searchsorted(self.begin_s, end_s, "left")
        begins = np.clip(self.begin_s[first:last], begin_s, end_s)
        ends, causes = np.clip(self.end_s[first:last], begin_s, end_s), self.cause[first:last]
        is_kept = ends > begins
        begins, ends, causes, spans = begins[is_kept], ends[is_kept], causes[is_kept], self.span[first:last][is_kept]
        if not len(begins):
            return []
        is_long = (ends - begins >= point_s) | (len(begins) <= round((end_s - begin_s) / point_s))
        stretch = ((begins - begin_s) / (STRETCH * point_s)).astype(np.int64)
        is_gap = np.append(True, begins[1:] > ends[:-1] + point_s)  # between two launches of the run, or a vacant slot
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
