# SPDX-License-Identifier: Apache-2.0
"""Accounts the time of every worker to exactly one cause: what it did, or what the controller did while it was idle.
Pure and torch-free.

A worker's time begins with the start of its run, or with its first span if it came later, and ends with the run, or
with its last span if it was replaced. Each moment belongs to the span that began last; a moment without one is idle."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from podium.observe.timeline import CONTROLLER, TimelineSpan, TimelineWorker, rank_name
from podium.observe.timing import LAUNCH, NESTED

# The processes whose launch is that of the run.
_FIRST = (CONTROLLER, rank_name(0))


@dataclass(frozen=True, slots=True)
class Segment:
    """An interval in which a process did one thing; None: nothing."""

    begin_s: float
    end_s: float
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTime:
    """Seconds of one worker by cause. They add up to its time."""

    worker: str
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """All of its time."""
        return sum(self.seconds.values())


def worker_times(spans: Sequence[TimelineSpan]) -> list[WorkerTime]:
    """The time of every worker, by launches of the run: between two of them nobody had time."""
    found: dict[str, dict[str, float]] = {}
    for launch in _launches(spans) if spans else ():
        for worker, seconds in _times_of(launch).items():
            whole = found.setdefault(worker, {})
            for cause, spent in seconds.items():
                whole[cause] = whole.get(cause, 0.0) + spent
    return [WorkerTime(worker=worker, seconds=seconds) for worker, seconds in found.items()]


def segments(spans: Sequence[TimelineSpan], begin_s: float, end_s: float) -> Iterator[Segment]:
    """What a process did in an interval, without gaps. Of spans at the same time the one that began last counts."""
    ordered = sorted(spans, key=lambda span: (span.begin_s, -span.end_s))
    cuts = sorted(
        {begin_s, end_s, *(at for span in ordered for at in (span.begin_s, span.end_s) if begin_s < at < end_s)}
    )
    open_spans: list[tuple[float, int, float, str]] = []  # a heap, the one that began last first
    at = 0
    for begin, end in pairwise(cuts):
        while at < len(ordered) and ordered[at].begin_s <= begin:
            span = ordered[at]
            heapq.heappush(open_spans, (-span.begin_s, -at, span.end_s, span.name))
            at += 1
        while open_spans and open_spans[0][2] <= begin:
            heapq.heappop(open_spans)
        yield Segment(begin, end, open_spans[0][3] if open_spans else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """One start of the run."""

    begin_s: float
    end_s: float
    spans: Sequence[TimelineSpan]


def _launches(spans: Sequence[TimelineSpan]) -> Iterator[_Launch]:
    """A launch ends with its last span, or when the next one begins. What the file has lost is not accounted."""
    begins = sorted({span.begin_s for span in spans if span.name == LAUNCH and span.worker in _FIRST})
    starts = begins if begins and begins[0] <= min(span.begin_s for span in spans) else [float("-inf"), *begins]
    for begin, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        mine = [span for span in spans if begin <= span.begin_s < end]
        if mine:
            last = min(end, max(span.end_s for span in mine))
            yield _Launch(begin_s=min(span.begin_s for span in mine), end_s=last, spans=mine)


def _times_of(launch: _Launch) -> dict[str, dict[str, float]]:
    by_worker: dict[str, list[TimelineSpan]] = {}
    for span in launch.spans:
        if span.name != LAUNCH:
            by_worker.setdefault(span.worker, []).append(span)
    controlling = list(segments(by_worker.get(CONTROLLER, ()), launch.begin_s, launch.end_s))
    last = _last_incarnations(by_worker)
    times = {}
    for worker, mine in by_worker.items():
        begin = launch.begin_s if TimelineWorker.of(worker).incarnation == 0 else min(span.begin_s for span in mine)
        end = launch.end_s if worker in last else min(launch.end_s, max(span.end_s for span in mine))
        times[worker] = _by_cause(segments(mine, begin, end), () if worker == CONTROLLER else controlling)
    return times


def _by_cause(done: Iterator[Segment], controlling: Sequence[Segment]) -> dict[str, float]:
    """Idle time is accounted to what the controller did meanwhile."""
    seconds: dict[str, float] = {}

    def add(cause: str, spent: float) -> None:
        seconds[cause] = seconds.get(cause, 0.0) + spent

    at = 0
    for segment in done:
        if segment.name is not None:
            add(_cause(segment.name), segment.end_s - segment.begin_s)
            continue
        begin = segment.begin_s
        while at < len(controlling) and controlling[at].end_s <= begin:
            at += 1
        place = at
        while begin < segment.end_s:
            if place == len(controlling):
                add("idle", segment.end_s - begin)
                break
            meanwhile = controlling[place]
            end = min(segment.end_s, meanwhile.end_s)
            add("idle" if meanwhile.name is None else f"idle in {_cause(meanwhile.name)}", end - begin)
            begin, place = end, place + 1
    return seconds


def _cause(name: str) -> str:
    """The call that a worker got, or what it waited for inside."""
    parts = name.split(NESTED)
    return parts[-1] if parts[-1].startswith("waiting") else parts[0]


def _last_incarnations(workers: Iterable[str]) -> set[str]:
    """Workers that nobody has replaced."""
    newest: dict[tuple[str, int], tuple[int, str]] = {}
    for worker in workers:
        name = TimelineWorker.of(worker)
        slot = name.kind, name.slot
        newest[slot] = max(newest.get(slot, (-1, "")), (name.incarnation, worker))
    return {worker for _, worker in newest.values()}


def time_lines(times: Sequence[WorkerTime], *, most_causes: int = 5) -> list[str]:
    """A line for every kind of worker: its causes with their shares, the largest first."""
    kinds: dict[str, list[WorkerTime]] = {}
    for each in times:
        kinds.setdefault(TimelineWorker.of(each.worker).kind, []).append(each)
    lines = []
    for kind, workers in kinds.items():
        total_s, seconds = sum(each.total_s for each in workers), dict[str, float]()
        for each in workers:
            for cause, spent in each.seconds.items():
                seconds[cause] = seconds.get(cause, 0.0) + spent
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        shares = [
            f"{cause} {spent / total_s:.0%}" for cause, spent in ordered[:most_causes] if spent >= 0.005 * total_s
        ]
        rest = 1.0 - sum(spent for _, spent in ordered[: len(shares)]) / total_s if total_s else 0.0
        lines.append(f"{kind}: {', '.join(shares)}" + (f", other {rest:.0%}" if rest >= 0.005 else ""))
    return lines
