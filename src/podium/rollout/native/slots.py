# SPDX-License-Identifier: Apache-2.0
"""Where slots lie in memory, on devices without a paged kernel: what is read in one call must lie side by side, and
rows of like length together, because a call reads every row as far as its longest. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A call costs as much as reading this many positions.
_CALL_COST = 600
# Moving a position costs as much as reading it this many times; an arrangement is worth as many steps as it may last.
_MOVE_COST = 3.0
_HORIZON = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """A permutation of slots, and how many of their positions are worth moving."""

    target_of: dict[int, int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring slots [start, stop) that are read together."""

    start: int
    stop: int


def segments(lengths: Ints) -> list[Segment]:
    """Cuts neighbours into calls so that the positions read, padding included, and the calls cost least."""
    count = len(lengths)
    best = np.zeros(count + 1)
    cut = np.zeros(count + 1, np.int64)
    for stop in range(1, count + 1):
        longest = np.maximum.accumulate(lengths[stop - 1 :: -1])[::-1]  # of [start, stop) for every start
        cost = best[:stop] + _CALL_COST + longest[:stop] * np.arange(stop, 0, -1)
        cut[stop] = int(cost.argmin())
        best[stop] = cost[cut[stop]]
    found: list[Segment] = []
    stop = count
    while stop > 0:
        found.append(Segment(int(cut[stop]), stop))
        stop = int(cut[stop])
    return found[::-1]


def reading_cost(lengths: Ints) -> float:
    """What one layer's attention over neighbours of these lengths costs, cut as `segments` cuts them."""
    return float(sum(_CALL_COST + int(lengths[s.start : s.stop].max()) * (s.stop - s.start) for s in segments(lengths)))


def arrange(slots: Ints, lengths: Ints) -> Arrangement | None:
    """Moves the rows that are under way to the front, and sorts them by length where that soon pays."""
    count = len(slots)
    if count == 0:
        return None
    filled = _filled(slots)
    in_place = np.argsort(filled)
    by_length = np.argsort(-lengths, kind="stable")
    gain = reading_cost(lengths[in_place]) - reading_cost(lengths[by_length])
    target = filled
    if gain > 0:
        sorted_target = np.empty(count, np.int64)
        sorted_target[by_length] = np.arange(count)
        price = _MOVE_COST * float(lengths[sorted_target != slots].sum() - lengths[filled != slots].sum())
        if gain * _HORIZON > price:
            target = sorted_target
    moved = np.flatnonzero(target != slots)
    if not len(moved):
        return None
    return Arrangement(target_of=_permutation(slots, target, moved), tokens=int(lengths.max()))


def _filled(slots: Ints) -> Ints:
    """Fewest moves: rows beyond the front fill its holes."""
    target = slots.copy()
    holes = np.setdiff1d(np.arange(len(slots)), slots)
    target[np.flatnonzero(slots >= len(slots))] = holes
    return target


def _permutation(slots: Ints, target: Ints, moved: Ints) -> dict[int, int]:
    """Whatever lies where a row goes takes a place that a row leaves."""
    to = dict(zip(slots[moved].tolist(), target[moved].tolist(), strict=True))
    left = sorted(set(to) - set(to.values()))
    entered = sorted(set(to.values()) - set(to))
    return {**to, **dict(zip(entered, left, strict=True))}
