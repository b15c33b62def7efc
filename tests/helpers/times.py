# SPDX-License-Identifier: Apache-2.0
"""What the time of a finished run went into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from podium.observe.causes import Cause, is_idle
from podium.observe.timeline import TimelineSpan, TimelineWorker, read_timeline, slot_change
from podium.runs.accounting import WorkerTime, times_by_kind, worker_times

# Between two spans other processes may get the processor: of a run of 0.3 s that is more than its share.
_PREEMPTED_S = 0.02


def times_of(run: Path) -> dict[str, WorkerTime]:
    """By kind of worker. The causes of each slot, of all workers that were in it, add up to the time from the launch to
    the last span, but for the time in which it was vacant, and almost all of it is known. The run was launched once."""
    spans = list(read_timeline(run))
    times = worker_times(spans)
    begin_s, end_s = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    for slot in {_slot(each.worker) for each in times}:
        mine = [each for each in times if _slot(each.worker) == slot]
        whole_s = end_s - begin_s - sum(_vacancies(slot, spans, begin_s, end_s))
        assert sum(each.total_s for each in mine) == pytest.approx(whole_s, rel=0.005), (slot, mine)
        unknown_s = sum(each.seconds.get("unknown", 0.0) for each in mine)
        assert unknown_s < max(0.02 * whole_s, _PREEMPTED_S), (slot, mine)
    return times_by_kind(times)


def _vacancies(slot: tuple[str, int], spans: Sequence[TimelineSpan], begin_s: float, end_s: float) -> Iterator[float]:
    """Seconds before somebody joined a slot that was vacant at the start, and between workers that left it and the
    first span of the next one, or the end."""
    first_s: dict[str, float] = {}
    for span in spans:
        if _slot(span.worker) == slot:
            first_s[span.worker] = min(span.begin_s, first_s.get(span.worker, span.begin_s))
    first_s = dict(sorted(first_s.items(), key=lambda item: TimelineWorker.of(item[0]).incarnation))
    marks = [(change, span.begin_s) for span in spans if (change := slot_change(span)) is not None]
    first = next(iter(first_s))
    if any(change.worker == first and change.has_joined for change, _ in marks):
        yield first_s[first] - begin_s
    for change, at_s in marks:
        if not change.has_joined and change.worker in first_s:
            later = [began_s for worker, began_s in first_s.items() if began_s > at_s and worker != change.worker]
            yield min(later, default=end_s) - at_s


def _slot(worker: str) -> tuple[str, int]:
    name = TimelineWorker.of(worker)
    return name.kind, name.slot


def largest_wait(time: WorkerTime) -> Cause:
    """What a kind of worker waited for most, but for the start of the run."""
    waits = {
        cause: spent for cause, spent in time.seconds.items() if is_idle(cause) and cause != "waiting for start-up"
    }
    return max(waits, key=lambda cause: waits[cause])
