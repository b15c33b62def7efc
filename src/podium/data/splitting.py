# SPDX-License-Identifier: Apache-2.0
"""A step's documents spread over ranks and micro-steps so that no rank waits long for another; pure."""

# A bin is the documents of one rank in one micro-step; a level is the bins of one micro-step, one for each rank.

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from podium.errors import DataError

# How far a micro-batch may go over a soft limit for the sake of even work.
_SOFT_SLACK = 1.05
# Work this even is not worth another swap.
_EVEN_ENOUGH = 1.002
_MOST_SWAPS = 64
# With more documents than this the first spreading is even already.
_MOST_PAIRS = 4096

Bins = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Who computes what: equal numbers of micro-steps on all ranks, because they meet in collectives."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]  # [rank][micro-step] -> positions of documents
    imbalance: float  # sum over micro-steps of the slowest rank's cost, over the ideal of perfectly even work

    @property
    def num_micro_steps(self) -> int:
        return len(self.micro_batches[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Documents:
    """What splitting has to know of the documents; `order` is the longest, and so the dearest, first."""

    lengths: Sequence[int]
    costs: Sequence[float]
    order: Sequence[int]

    def tokens(self, held: Sequence[int]) -> int:
        return sum(self.lengths[index] for index in held)

    def cost(self, held: Sequence[int]) -> float:
        return sum(self.costs[index] for index in held)


def split_step(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    linear: float = 1.0,
    quadratic: float = 0.0,
    hard_cap: bool = True,
) -> StepPlan:
    """Spreads documents by cost `linear * L + quadratic * L**2` over the fewest micro-steps that hold them.

    With `hard_cap` no micro-batch has more than `max_tokens`; without, it is a target that evenness may overstep.
    """
    assert num_ranks >= 1
    assert max_tokens >= 1
    documents = _Documents(
        lengths=lengths,
        costs=[linear * length + quadratic * length * length for length in lengths],
        order=sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)),
    )
    total = sum(lengths)
    num_levels = max(1, -(-total // (num_ranks * max_tokens)))
    if not hard_cap:
        cap = int(max(max_tokens, total / (num_levels * num_ranks)) * _SOFT_SLACK)
        return _best_plan(documents, num_levels, num_ranks, cap) or _overflowing(documents, num_levels, num_ranks, cap)
    if total and max(lengths) > max_tokens:
        raise DataError(
            f"a document of {max(lengths)} tokens does not fit a micro-batch of {max_tokens}; it is never cut over "
            "two. Lower data.max_length, or raise micro_batch_tokens."
        )
    while (plan := _best_plan(documents, num_levels, num_ranks, max_tokens)) is None:
        num_levels += 1
    return plan


def _best_plan(documents: _Documents, num_levels: int, num_ranks: int, cap: int) -> StepPlan | None:
    """The most even of several ways to fill `num_levels` micro-steps; None when none of them fits."""
    even = _even_bins(documents, documents.order, num_levels * num_ranks, cap)
    found = [bins for bins in (even, _levelled_bins(documents, num_levels, num_ranks, cap)) if bins is not None]
    if not found:
        tight = _tight_bins(documents, num_levels * num_ranks, cap)
        found = [tight] if tight is not None else []
    plans = [_plan(documents, bins, num_ranks, cap) for bins in found]
    return min(plans, key=lambda plan: plan.imbalance, default=None)


def _overflowing(documents: _Documents, num_levels: int, num_ranks: int, cap: int) -> StepPlan:
    """With a soft limit that cannot be kept: what has no room goes where the fewest tokens are."""
    left: list[int] = []
    bins = _even_bins(documents, documents.order, num_levels * num_ranks, cap, left.append)
    assert bins is not None
    for index in left:
        min(bins, key=documents.tokens).append(index)
    return _plan(documents, bins, num_ranks, cap)


def _even_bins(
    documents: _Documents,
    order: Sequence[int],
    num_bins: int,
    cap: int,
    leave: Callable[[int], None] | None = None,
) -> Bins | None:
    """Each document in `order` into the bin with the least work that has room; what has no room anywhere is given to
    `leave`, or makes the whole impossible (None)."""
    bins: Bins = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    by_work = [(0.0, position) for position in range(num_bins)]
    for index in order:
        full: list[tuple[float, int]] = []
        while by_work and tokens[by_work[0][1]] + documents.lengths[index] > cap:
            full.append(heapq.heappop(by_work))
        if by_work:
            work, position = heapq.heappop(by_work)
            bins[position].append(index)
            tokens[position] += documents.lengths[index]
            heapq.heappush(by_work, (work + documents.costs[index], position))
        elif leave is not None:
            leave(index)
        else:
            return None
        for entry in full:
            heapq.heappush(by_work, entry)
    return bins


def _levelled_bins(documents: _Documents, num_levels: int, num_ranks: int, cap: int) -> Bins | None:
    """Level after level filled to the brim, so that a long document meets bins as full as its own, and what is left
    for the last level is short and spreads evenly. None: more levels are needed."""
    bins: Bins = []
    left: Sequence[int] = documents.order
    for _ in range(num_levels):
        over: list[int] = []
        level = _even_bins(documents, left, num_ranks, cap, over.append)
        assert level is not None
        bins += level
        left = over
    return None if left else bins


def _tight_bins(documents: _Documents, num_bins: int, cap: int) -> Bins | None:
    """Each document, the longest first, into the fullest bin that has room: holds more than even bins do."""
    bins: Bins = [[] for _ in range(num_bins)]
    room = [(cap, position) for position in range(num_bins)]
    for index in documents.order:
        place = bisect_left(room, (documents.lengths[index], -1))
        if place == len(room):
            return None
        left, position = room.pop(place)
        bins[position].append(index)
        insort(room, (left - documents.lengths[index], position))
    return bins


def _plan(documents: _Documents, bins: Bins, num_ranks: int, cap: int) -> StepPlan:
    """Bins of like cost run at the same time, the dearest first (what is too large for memory shows at once)."""
    by_work = sorted(bins, key=documents.cost, reverse=True)
    levels = [by_work[first : first + num_ranks] for first in range(0, len(by_work), num_ranks)]
    for level in levels:
        _swap(documents, level, cap)
    slowest = sum(max(documents.cost(held) for held in level) for level in levels)
    total = sum(documents.costs)
    return StepPlan(
        micro_batches=tuple(tuple(tuple(sorted(level[rank])) for level in levels) for rank in range(num_ranks)),
        imbalance=slowest * num_ranks / total if total > 0 else 1.0,
    )


def _swap(documents: _Documents, level: Bins, cap: int) -> None:
    """Lowers the slowest bin of a level by swaps with the others, while that helps."""
    for _ in range(_MOST_SWAPS):
        work = [documents.cost(held) for held in level]
        slowest = max(range(len(level)), key=work.__getitem__)
        if work[slowest] * len(level) <= sum(work) * _EVEN_ENOUGH:
            return
        quickest = min(range(len(level)), key=work.__getitem__)
        gap = work[slowest] - work[quickest]
        if len(level[slowest]) * len(level[quickest]) > _MOST_PAIRS:
            return
        swaps = _useful_swaps(documents, level[slowest], level[quickest], gap, cap)
        best = min(swaps, key=lambda swap: swap[0], default=None)
        if best is None:
            return
        _, out, back = best
        level[slowest].remove(out)
        level[quickest].append(out)
        if back is not None:
            level[quickest].remove(back)
            level[slowest].append(back)


def _useful_swaps(
    documents: _Documents, slow: list[int], quick: list[int], gap: float, cap: int
) -> Iterator[tuple[float, int, int | None]]:
    """(how far from even it leaves the two bins, document to give, document to take back or None)."""
    room_slow, room_quick = cap - documents.tokens(slow), cap - documents.tokens(quick)
    for out in slow:
        for back in (None, *quick):
            moved = documents.costs[out] - (documents.costs[back] if back is not None else 0.0)
            longer = documents.lengths[out] - (documents.lengths[back] if back is not None else 0)
            if 0 < moved < gap and longer <= room_quick and -longer <= room_slow:
                yield abs(gap - 2 * moved), out, back
