# SPDX-License-Identifier: Apache-2.0
"""When each slot of a run had a worker, and which one: from its first start to the end of the run, without the time in
which it was vacant. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from podium.observe.timeline import TimelineSpan, TimelineWorker, slot_change


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """An interval in which a slot is not vacant: it has a worker, or one that died is being replaced."""

    begin_s: float
    end_s: float
    workers: Sequence[str]  # each is the successor of the one before

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """The part of a spell that belongs to one worker. From `gone_s` on its successor is waited for."""

    worker: str
    begin_s: float
    gone_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChanges:
    """Workers that came to a vacant slot, and when those were gone that left theirs vacant."""

    joined: frozenset[str]
    vacated_s: Mapping[str, float]

    @classmethod
    def of(cls, spans: Iterable[TimelineSpan]) -> SlotChanges:
        """From the marks among spans."""
        changes = [(change, span.begin_s) for span in spans if (change := slot_change(span)) is not None]
        return cls(
            joined=frozenset(change.worker for change, _ in changes if change.has_joined),
            vacated_s={change.worker: at_s for change, at_s in changes if not change.has_joined},
        )


def spells(
    spans: Mapping[str, Sequence[TimelineSpan]], changes: SlotChanges, begin_s: float, end_s: float
) -> Iterator[Spell]:
    """When the slots of workers with these spans were not vacant, in a launch with this begin and end."""
    slots: dict[tuple[str, int], list[str]] = {}
    for worker in spans:
        name = TimelineWorker.of(worker)
        slots.setdefault((name.kind, name.slot), []).append(worker)
    for workers in slots.values():
        workers.sort(key=lambda worker: TimelineWorker.of(worker).incarnation)
        since_s = max(begin_s, _first_s(spans[workers[0]])) if workers[0] in changes.joined else begin_s
        mine: list[str] = []
        for worker in workers:
            if not mine and worker != workers[0]:  # the slot was vacant before
                since_s = min(end_s, max(since_s, _first_s(spans[worker])))
            mine.append(worker)
            if worker in changes.vacated_s:
                gone_s = max(since_s, changes.vacated_s[worker], _last_s(spans[worker]))
                yield Spell(begin_s=since_s, end_s=min(end_s, gone_s), workers=mine)
                since_s, mine = min(end_s, gone_s), []
        if mine:
            yield Spell(begin_s=since_s, end_s=end_s, workers=mine)


def lives(spell: Spell, spans: Mapping[str, Sequence[TimelineSpan]]) -> Iterator[WorkerLife]:
    """Cuts a spell where successors begin: with their first span. What a worker that died did after its last span is
    lost, and belongs to its replacement."""
    begins = [spell.begin_s]
    for worker in spell.workers[1:]:
        begins.append(min(spell.end_s, max(begins[-1], _first_s(spans[worker]))))
    last = spell.workers[-1]
    for worker, (begin_s, end_s) in zip(spell.workers, pairwise([*begins, spell.end_s]), strict=True):
        gone_s = end_s if worker == last else min(end_s, max(begin_s, _last_s(spans[worker])))
        yield WorkerLife(worker=worker, begin_s=begin_s, gone_s=gone_s, end_s=end_s)


def last_incarnations(workers: Iterable[str]) -> set[str]:
    """Workers that nobody has replaced."""
    newest: dict[tuple[str, int], tuple[int, str]] = {}
    for worker in workers:
        name = TimelineWorker.of(worker)
        slot = name.kind, name.slot
        newest[slot] = max(newest.get(slot, (-1, "")), (name.incarnation, worker))
    return {worker for _, worker in newest.values()}


def _first_s(spans: Sequence[TimelineSpan]) -> float:
    return min(span.begin_s for span in spans)


def _last_s(spans: Sequence[TimelineSpan]) -> float:
    return max(span.end_s for span in spans)
