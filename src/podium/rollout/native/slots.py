# SPDX-License-Identifier: Apache-2.0
"""Arranges slots in memory on devices without a paged kernel. Slots that are read in one call must be adjacent, and
rows of similar length together, because a call reads every row as far as its longest. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# In units of reading one position of one row in one layer.
_CALL_COST = 1200
_MOVE_COST = 3.0  # of a position, layer by layer
_ANY_MOVE_COST = 2000
# Number of steps that an arrangement may last: rows come and go.
_HORIZON = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """A permutation of slots, and how many of their positions are worth moving."""

    target_of: dict[int, int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop), in the order of their slots, that are read together."""

    start: int
    stop: int


def segments(slots: Ints, lengths: Ints) -> list[Segment]:
    """Splits rows, ordered by slot, into calls over neighbouring slots at the lowest cost of positions read (padding
    included) and calls."""
    count = len(slots)
    best = np.zeros(count + 1)
    cut = np.zeros(count + 1, np.int64)
    first = 0  # of the run of neighbours that ends here
    for stop in range(1, count + 1):
        if stop > 1 and slots[stop - 1] != slots[stop - 2] + 1:
            first = stop - 1
        longest = np.maximum.accumulate(lengths[first:stop][::-1])[::-1]  # of [start, stop) for every start
        cost = best[first:stop] + _CALL_COST + longest * np.arange(stop - first, 0, -1)
        at = int(cost.argmin())
        best[stop], cut[stop] = cost[at], first + at
    reversed_segments: list[Segment] = []
    stop = count
    while stop > 0:
        reversed_segments.append(Segment(int(cut[stop]), stop))
        stop = int(cut[stop])
    return reversed_segments[::-1]


def reading_cost(slots: Ints, lengths: Ints) -> float:
    """Cost of one layer's attention over rows in these slots, split as `segments` does."""
    order = np.argsort(slots)
    slots, lengths = slots[order], lengths[order]
    cuts = segments(slots, lengths)
    return float(sum(_CALL_COST + int(lengths[s.start : s.stop].max()) * (s.stop - s.start) for s in cuts))


def arrange(slots: Ints, lengths: Ints) -> Arrangement | None:
    """Leaves rows in place, moves some to the front so that they are neighbours, or sorts all by length, whichever is
    cheapest over the next steps."""
    if len(slots) == 0:
        return None
    tokens = int(lengths.max())
    best, least = slots, _HORIZON * reading_cost(slots, lengths)
    if least <= _HORIZON * (_CALL_COST + float(lengths.sum())) + _ANY_MOVE_COST:
        return None  # no arrangement could win
    for target in (_filled(slots), _sorted(slots, lengths)):
        price = _ANY_MOVE_COST + 2 * _MOVE_COST * tokens * int((target != slots).sum())
        cost = _HORIZON * reading_cost(target, lengths) + price
        if cost < least:
            best, least = target, cost
    moved = np.flatnonzero(best != slots)
    if not len(moved):
        return None
    return Arrangement(target_of=_permutation(slots, best, moved), tokens=tokens)


def _filled(slots: Ints) -> Ints:
    """Fewest moves: rows beyond the front fill its holes."""
    target = slots.copy()
    holes = np.setdiff1d(np.arange(len(slots)), slots)
    target[np.flatnonzero(slots >= len(slots))] = holes
    return target


def _sorted(slots: Ints, lengths: Ints) -> Ints:
    target = np.empty(len(slots), np.int64)
    target[np.argsort(-lengths, kind="stable")] = np.arange(len(slots))
    return target


def _permutation(slots: Ints, target: Ints, moved: Ints) -> dict[int, int]:
    """A displaced slot moves to a place that a row leaves."""
    to = dict(zip(slots[moved].tolist(), target[moved].tolist(), strict=True))
    left = sorted(set(to) - set(to.values()))
    entered = sorted(set(to.values()) - set(to))
    return {**to, **dict(zip(entered, left, strict=True))}
