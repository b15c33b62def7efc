# SPDX-License-Identifier: Apache-2.0
"""Accounts the time of every worker to exactly one cause of observe/causes.py. Pure and torch-free.

The time of a slot begins with the start of its run, or with its first worker if that joined later, and ends with the
run. Where workers replace each other in it, all of it belongs to one of them: from the death of one until the first
span of its successor it waits for recovery. Only the time in which a slot was vacant is nobody's. Each moment belongs
to the span that began last. What a worker waits for in a moment without one, or inside a call, follows from what the
controller and the other workers do then."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from podium.observe.causes import FOR_RANKS, Cause, is_idle
from podium.observe.timeline import CONTROLLER, TimelineSpan, TimelineWorker, is_mark, rank_name
from podium.observe.timing import LAUNCH, NESTED, RESTART
from podium.runs.waits import Duties, Moment, computing_cause, duties_of, moments, phase_cause, waiting_cause, waits
from podium.runs.worker_lives import SlotChanges, Spell, lives, spells

# The processes whose launch is that of the run.
_FIRST = (CONTROLLER, rank_name(0))
STEP_OF_RANK = "compute"
"""The span in which a rank computes a step."""
# The causes of a worker may differ from its time by this share: times in a timeline are rounded.
_ROUNDING = 0.005


@dataclass(frozen=True, slots=True)
class Segment:
    """An interval in which a process did one thing; None: nothing."""

    begin_s: float
    end_s: float
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CausedSegment:
    """An interval of the time of one worker with its cause."""

    worker: str
    begin_s: float
    end_s: float
    cause: Cause
    name: str | None  # of the span; None: the worker was in none

    @property
    def is_idle(self) -> bool:
        """Whether the worker did nothing useful."""
        return is_idle(self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTime:
    """Seconds of one worker by cause. They add up to its time."""

    worker: str
    seconds: Mapping[Cause, float]

    @property
    def total_s(self) -> float:
        """All of its time."""
        return sum(self.seconds.values())

    @property
    def idle_s(self) -> float:
        """In which it did nothing useful."""
        return sum(spent for cause, spent in self.seconds.items() if is_idle(cause))


def worker_times(spans: Sequence[TimelineSpan]) -> list[WorkerTime]:
    """The time of every worker by cause, over all launches of the run: between two of them nobody had time. A worker
    that died has time until its successor begins."""
    times = []
    for worker, parts in caused_segments(spans).items():
        seconds: dict[Cause, float] = {}
        for part in parts:
            seconds[part.cause] = seconds.get(part.cause, 0.0) + part.end_s - part.begin_s
        times.append(WorkerTime(worker=worker, seconds=seconds))
    return times


def caused_segments(spans: Sequence[TimelineSpan]) -> dict[str, list[CausedSegment]]:
    """What every worker did, and what it waited for: segments in the order of time, without gaps but between two
    launches of the run. Those of a worker and its successors are those of their slot."""
    found: dict[str, list[CausedSegment]] = {}
    for launch in _launches(spans) if spans else ():
        for segment in _segments_of(launch):
            found.setdefault(segment.worker, []).append(segment)
    return found


def last_launch(spans: Sequence[TimelineSpan]) -> Sequence[TimelineSpan]:
    """The spans since the run was launched for the last time."""
    found: Sequence[TimelineSpan] = ()
    for launch in _launches(spans) if spans else ():
        found = launch.spans
    return found


def idle_segments(spans: Sequence[TimelineSpan]) -> list[CausedSegment]:
    """When each worker was idle, and why, one worker after the other. Neighbours with the same cause are one."""
    found: list[CausedSegment] = []
    for each in (part for parts in caused_segments(spans).values() for part in parts if part.is_idle):
        last = found[-1] if found else None
        if last is not None and (last.worker, last.cause, last.end_s) == (each.worker, each.cause, each.begin_s):
            found[-1] = CausedSegment(
                worker=each.worker, begin_s=last.begin_s, end_s=each.end_s, cause=each.cause, name=None
            )
        else:
            found.append(each)
    return found


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
    begins = _begins([span for span in spans if span.name == LAUNCH])
    starts = begins if begins and begins[0] <= min(span.begin_s for span in spans) else [float("-inf"), *begins]
    for begin, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        mine = [span for span in spans if begin <= span.begin_s < end]
        if mine:
            last = min(end, max(span.end_s for span in mine))
            yield _Launch(begin_s=min(span.begin_s for span in mine), end_s=last, spans=mine)


def _begins(launches: Sequence[TimelineSpan]) -> list[float]:
    """When each launch of the run began. Ranks of one launch start at nearly the same time, in any order."""
    begins = {span.begin_s: span.begin_s for span in launches if span.worker in _FIRST}
    for span in launches if begins else ():
        nearest = min(begins, key=lambda begin_s: abs(begin_s - span.begin_s))
        begins[nearest] = min(begins[nearest], span.begin_s)
    return sorted(begins.values())


def _segments_of(launch: _Launch) -> Iterator[CausedSegment]:
    by_worker: dict[str, list[TimelineSpan]] = {}
    for span in launch.spans:
        if span.name != LAUNCH and not is_mark(span):
            by_worker.setdefault(span.worker, []).append(span)
    _add_rank_waits(by_worker)
    _add_lost_times(by_worker, launch.begin_s)
    spells_of_slots = list(spells(by_worker, SlotChanges.of(launch.spans), launch.begin_s, launch.end_s))
    of_workers = {life.worker: life for spell in spells_of_slots for life in lives(spell, by_worker)}
    done = {
        each.worker: list(segments(by_worker[each.worker], each.begin_s, each.gone_s)) for each in of_workers.values()
    }
    duties = {worker: duties_of(worker, (span.name for span in mine)) for worker, mine in by_worker.items()}
    others = {worker: (duties[worker], done[worker]) for worker in by_worker if worker != CONTROLLER}
    controlling = [(each.begin_s, each.end_s, each.name) for each in done.get(CONTROLLER, ())]
    all_moments = list(moments(controlling, others))
    phases = _phases(all_moments)
    accounted_s: dict[str, float] = {}
    for worker in by_worker:
        found = list(_caused(worker, duties[worker], done[worker], _Cuts(all_moments), _Cuts(phases)))
        life = of_workers[worker]
        if life.end_s > life.gone_s:
            found.append(
                CausedSegment(
                    worker=worker, begin_s=life.gone_s, end_s=life.end_s, cause="waiting for recovery", name=None
                )
            )
        accounted_s[worker] = sum(each.end_s - each.begin_s for each in found)
        yield from found
    for spell in spells_of_slots:
        _check(spell, accounted_s)


def _caused(
    worker: str, duties: Duties, done: Sequence[Segment], cuts: _Cuts, coarse: _Cuts
) -> Iterator[CausedSegment]:
    """The causes of what a worker did. `coarse`: cuts where only the phase of the controller changes."""
    for segment in done:
        is_wait = waits(segment.name)
        for moment in (cuts if is_wait else coarse).of(segment):
            if worker == CONTROLLER:
                cause = phase_cause(segment.name, moment.meanwhile)
            elif segment.name is None or is_wait:
                cause = waiting_cause(duties, segment.name, moment.meanwhile)
            else:
                cause = computing_cause(duties, segment.name, moment.meanwhile)
            yield CausedSegment(
                worker=worker, begin_s=moment.begin_s, end_s=moment.end_s, cause=cause, name=segment.name
            )


def _check(spell: Spell, accounted_s: Mapping[str, float]) -> None:
    """The causes of all workers of a slot add up to its time, however it was cut into theirs."""
    total_s, whole_s = sum(accounted_s[worker] for worker in spell.workers), spell.seconds
    assert abs(total_s - whole_s) <= _ROUNDING * whole_s + 1e-3, (
        f"{' and '.join(spell.workers)}: causes of {total_s} s in {whole_s} s"
    )


def _add_rank_waits(by_worker: dict[str, list[TimelineSpan]]) -> None:
    """Ranks of an SPMD program compute each step together: none gets further than its first collective before the last
    one is there."""
    steps = [
        sorted((span for span in spans if span.name == STEP_OF_RANK), key=lambda span: span.begin_s)
        for worker, spans in by_worker.items()
        if TimelineWorker.of(worker).kind == "ranks"
    ]
    if len(steps) < 2:
        return
    for together in _same_steps(steps):
        last_s = max(span.begin_s for span in together)
        for span in together:
            if span.begin_s < last_s:
                name = f"{STEP_OF_RANK}{NESTED}{FOR_RANKS}"
                by_worker[span.worker].append(TimelineSpan(span.worker, name, span.begin_s, last_s))


def _add_lost_times(by_worker: dict[str, list[TimelineSpan]], begin_s: float) -> None:
    """What ranks or a controller did after their last span is lost when they are restarted, and belongs to the
    recovery."""
    for worker, spans in by_worker.items():
        for restart in [span for span in spans if span.name == RESTART]:
            last_s = max((span.end_s for span in spans if span.begin_s < restart.begin_s), default=begin_s)
            if last_s < restart.begin_s:
                spans.append(TimelineSpan(worker, RESTART, last_s, restart.begin_s))


def _same_steps(steps: Sequence[Sequence[TimelineSpan]]) -> Iterator[list[TimelineSpan]]:
    """The spans of all ranks in one step, which end at nearly the same time. A file may have lost its oldest spans, or
    not have its newest ones yet."""
    at = [0] * len(steps)
    while all(number < len(mine) for number, mine in zip(at, steps, strict=True)):
        together = [mine[number] for number, mine in zip(at, steps, strict=True)]
        common_s = min(span.end_s for span in together) - max(span.begin_s for span in together)
        if 2 * common_s > min(span.end_s - span.begin_s for span in together):
            yield together
            at = [number + 1 for number in at]
        else:
            at[min(range(len(at)), key=lambda rank: together[rank].end_s)] += 1


def _phases(all_moments: Sequence[Moment]) -> list[Moment]:
    """Moments without what workers do: neighbours in the same phase of the controller are one."""
    merged: list[Moment] = []
    for each in all_moments:
        if merged and merged[-1].meanwhile.phase == each.meanwhile.phase:
            merged[-1] = Moment(merged[-1].begin_s, each.end_s, merged[-1].meanwhile)
        else:
            merged.append(each)
    return merged


class _Cuts:
    """Cuts segments of one worker, in their order, at the borders of moments. What is outside of all of them is one
    moment in which nothing is known."""

    def __init__(self, all_moments: Sequence[Moment]) -> None:
        self._moments, self._at = all_moments, 0

    def of(self, segment: Segment) -> Iterator[Moment]:
        """The parts of a segment."""
        found, begin = self._moments, segment.begin_s
        while self._at < len(found) and found[self._at].end_s <= begin:
            self._at += 1
        at = self._at
        while begin < segment.end_s:
            if at == len(found):
                yield Moment(begin, segment.end_s)
                return
            if begin < found[at].begin_s:
                end = min(segment.end_s, found[at].begin_s)
                yield Moment(begin, end)
            else:
                end = min(segment.end_s, found[at].end_s)
                yield Moment(begin, end, found[at].meanwhile)
                at += 1
            begin = end


def time_lines(times: Sequence[WorkerTime], *, most_causes: int = 5) -> list[str]:
    """A line for every kind of worker: its causes with their shares, the largest first."""
    lines = []
    for kind, each in times_by_kind(times).items():
        total_s = each.total_s
        ordered = sorted(each.seconds.items(), key=lambda item: -item[1])
        shares = [
            f"{cause} {spent / total_s:.0%}" for cause, spent in ordered[:most_causes] if spent >= 0.005 * total_s
        ]
        rest = 1.0 - sum(spent for _, spent in ordered[: len(shares)]) / total_s if total_s else 0.0
        lines.append(f"{kind}: {', '.join(shares)}" + (f", other {rest:.0%}" if rest >= 0.005 else ""))
    return lines


def times_by_kind(times: Sequence[WorkerTime]) -> dict[str, WorkerTime]:
    """The time of all workers of each kind together, under the name of the kind."""
    kinds: dict[str, dict[Cause, float]] = {}
    for each in times:
        seconds = kinds.setdefault(TimelineWorker.of(each.worker).kind, {})
        for cause, spent in each.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
    return {kind: WorkerTime(worker=kind, seconds=seconds) for kind, seconds in kinds.items()}
