# SPDX-License-Identifier: Apache-2.0
"""Accounts the time of a run that goes on. New spans change what workers did only since the first of them began: that
part is accounted again, with all spans that reach into it, and the rest stays. Pure and torch-free.

The result is that of `caused_segments` over all spans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from podium.observe.timeline import CONTROLLER, TimelineSpan, TimelineWorker, is_mark, slot_change
from podium.observe.timing import LAUNCH
from podium.runs.accounting import STEP_OF_RANK, CausedSegment, caused_segments, last_launch
from podium.runs.waits import duties_of
from podium.runs.worker_lives import SlotChanges, last_incarnations

# Spans that are kept, and how many of them remain when there are more.
_MOST_SPANS, _KEPT_SPANS = 40_000, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange:
    """What every worker did from a moment on, in place of what was known. `is_exact`: no span was dropped that reaches
    into it."""

    since_s: float
    segments: Mapping[str, Sequence[CausedSegment]]
    is_exact: bool = True


class GrowingAccounts:
    """Keeps the spans of the newest time, and of each worker the first one and the last one of each role: when its time
    begins and what it is there for follows from them."""

    def __init__(self, spans: Sequence[TimelineSpan]) -> None:
        """`spans`: what was accounted already."""
        self._spans = list(last_launch(spans))
        self._dropped_s = -math.inf  # all that was dropped had ended by then
        self._controlled_s: float | None = None  # the end of the controller's last span
        self._last: dict[tuple[str, str], TimelineSpan] = {}
        self._first: dict[str, TimelineSpan] = {}  # by worker
        self._remember(self._spans)
        workers = {worker for worker, role in self._last if role != LAUNCH}
        self._slot_changes = [span for span in self._spans if slot_change(span) is not None]
        changes = SlotChanges.of(self._slot_changes)
        self._staying = last_incarnations(workers) - changes.vacated_s.keys()
        self._joined = changes.joined

    def add(self, spans: Sequence[TimelineSpan]) -> AccountChange | None:
        """What new spans change. None: all must be accounted again. The run was launched again; or a worker was not
        there before, joined or left, or something comes late of one that is gone, and times of others may begin or end
        otherwise; or a worker has a role that it did not have."""
        if any(map(self._changes_lives, spans)) or self._has_new_duty(spans):
            return None
        since_s = min([self._settled_s(), *(span.begin_s for span in spans)])
        self._spans += spans
        since_s = min([since_s, *(span.begin_s for span in self._spans if span.end_s > since_s and _is_step(span))])
        is_exact = since_s >= self._dropped_s
        since_s = max(since_s, self._dropped_s)
        self._remember(spans)
        window = [span for span in self._spans if span.end_s > since_s]
        kept = (*self._first.values(), *self._last.values(), *self._slot_changes)
        window += {id(span): span for span in kept if span.end_s <= since_s}.values()
        segments = {
            worker: [replace(each, begin_s=max(each.begin_s, since_s)) for each in parts if each.end_s > since_s]
            for worker, parts in caused_segments(window).items()
        }
        self._forget()
        return AccountChange(since_s=since_s, segments=segments, is_exact=is_exact)

    def _changes_lives(self, span: TimelineSpan) -> bool:
        """Whether the time of some worker begins or ends otherwise with this span."""
        if span.name == LAUNCH or span.worker not in self._staying or slot_change(span) is not None:
            return True
        came_later = TimelineWorker.of(span.worker).incarnation > 0 or span.worker in self._joined
        return came_later and span.begin_s < self._first[span.worker].begin_s

    def _has_new_duty(self, spans: Sequence[TimelineSpan]) -> bool:
        """Whether a worker is there for something that its spans did not show before."""
        for worker in {span.worker for span in spans if (span.worker, _role(span)) not in self._last}:
            known = [role for each, role in self._last if each == worker]
            new = [_role(span) for span in spans if span.worker == worker]
            if duties_of(worker, known) != duties_of(worker, known + new):
                return True
        return False

    def _settled_s(self) -> float:
        """Until when it is known what the controller does. Without one, until the end of all spans."""
        known_s = max((span.end_s for span in self._last.values()), default=math.inf)
        return known_s if self._controlled_s is None else self._controlled_s

    def _remember(self, spans: Iterable[TimelineSpan]) -> None:
        for span in spans:
            key = span.worker, _role(span)
            known = self._last.get(key)
            if is_mark(span):
                continue
            first = self._first.setdefault(span.worker, span)
            if span.begin_s < first.begin_s:
                self._first[span.worker] = span
            if known is None or known.end_s <= span.end_s:
                self._last[key] = span
            if span.worker == CONTROLLER and span.end_s > span.begin_s:
                self._controlled_s = max(span.end_s, self._controlled_s or span.end_s)

    def _forget(self) -> None:
        if len(self._spans) > _MOST_SPANS:
            self._spans.sort(key=lambda span: span.end_s)
            self._dropped_s = self._spans[-_KEPT_SPANS - 1].end_s
            self._spans = self._spans[-_KEPT_SPANS:]


def _role(span: TimelineSpan) -> str:
    return span.name.partition(".")[0]


def _is_step(span: TimelineSpan) -> bool:
    """Whether ranks compute a step together in this span: when one began changes what the others waited for."""
    return span.name == STEP_OF_RANK and TimelineWorker.of(span.worker).kind == "ranks"
