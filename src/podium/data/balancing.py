# SPDX-License-Identifier: Apache-2.0
"""Bin packing: items over bins so that the heaviest bin is as light as possible, under a cap of tokens per bin; pure.

`longest_first` is the classic greedy rule (longest-processing-time first). `even_out` improves its result by swaps of
items between heavy and light bins. `pack_by_tokens` is for a cap so tight that tokens, not costs, decide.
"""

# N items · W bins · S sets of bins (bins of one set are evened out with one another) · P pairs of bins · C candidates

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

NO_CAP = int(np.iinfo(np.int64).max)
# Swaps stop at this fraction of a bin's goal. The aim is a plan within 0.1% of the lower bound; this is a fifth of it.
_TOLERANCE = 2e-4
# Progress is measured over this many turns: a single turn without any is common, five are not.
_TURNS_PER_CHECK = 5
# Items of a bin that one turn tries to swap. Cost grows with the square; half as many leave 0.03% more imbalance.
_CANDIDATES = 16
# Each turn moves the sample of candidates by this fraction of a step, so that turns try different items.
_GOLDEN_RATIO = 0.618


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """Items to put into bins, in descending order of cost."""

    costs_N: Floats
    tokens_N: Ints

    def pick(self, chosen: Ints) -> Items:
        """Some of the items; `chosen` must ascend to keep the order."""
        return Items(costs_N=self.costs_N[chosen], tokens_N=self.tokens_N[chosen])


def longest_first(items: Items, bases_W: Floats, cap: int) -> Ints | None:
    """The bin of each item by LPT: largest cost first, each into the lightest bin with room.

    None: an item fits nowhere. A bin starts with the load of its base, so that bins can aim at different loads."""
    room = [cap] * len(bases_W)
    open_bins = [(load, number) for number, load in enumerate(bases_W.tolist())]
    heapq.heapify(open_bins)
    # Bins too full for the item at hand, most room first. They open again for a shorter item.
    full_bins: list[tuple[int, float, int]] = []
    bin_N = []
    for cost, size in zip(items.costs_N.tolist(), items.tokens_N.tolist(), strict=True):
        while full_bins and -full_bins[0][0] >= size:
            _, load, number = heapq.heappop(full_bins)
            heapq.heappush(open_bins, (load, number))
        while open_bins and room[open_bins[0][1]] < size:
            load, number = heapq.heappop(open_bins)
            heapq.heappush(full_bins, (-room[number], load, number))
        if not open_bins:
            return None
        load, number = open_bins[0]
        room[number] -= size
        bin_N.append(number)
        heapq.heapreplace(open_bins, (load + cost, number))
    return np.array(bin_N, np.int64)


def pack_by_tokens(items: Items, num_bins: int, cap: int) -> Ints | None:
    """Bins with even tokens; if those exceed the cap, the tighter best-fit decreasing. None: that exceeds it too."""
    order = np.argsort(-items.tokens_N, kind="stable")
    sizes_N = items.tokens_N[order]
    sized = Items(costs_N=sizes_N.astype(np.float64), tokens_N=sizes_N)
    bases_W = np.zeros(num_bins)
    placed = longest_first(sized, bases_W, NO_CAP)
    assert placed is not None
    placed = even_out(sized, placed, bases_W[None], NO_CAP)
    if np.bincount(placed, sizes_N, num_bins).max() > cap:
        placed = _best_fit_decreasing(sizes_N, num_bins, cap)
    if placed is None:
        return None
    bin_N = np.empty_like(placed)
    bin_N[order] = placed
    return bin_N


def _best_fit_decreasing(sizes_N: Ints, num_bins: int, cap: int) -> Ints | None:
    """Each item, longest first, into the fullest bin that has room."""
    room = [(cap, number) for number in range(num_bins)]  # ascending
    bin_N = []
    for size in sizes_N.tolist():
        place = bisect_left(room, (size, -1))
        if place == len(room):
            return None
        left, number = room.pop(place)
        bin_N.append(number)
        insort(room, (left - size, number))
    return np.array(bin_N, np.int64)


def even_out(items: Items, bin_N: Ints, bases_SW: Floats, cap: int) -> Ints:
    """Swaps items between the heaviest and the lightest bins of each set, while that helps; returns the new bins.

    Bins are numbered set after set. Each turn pairs the heaviest bin with the lightest, the next with the next, and
    makes the best swap of each pair. It ends when `_TURNS_PER_CHECK` turns gain less than `_TOLERANCE`.
    """
    if not len(bin_N):
        return bin_N
    bins = _Bins(items, bin_N, bases_SW, cap)
    shift, excess = 0, np.inf
    for turn in itertools.count():
        if turn % _TURNS_PER_CHECK == 0:
            before, excess = excess, bins.excess()
            if excess >= before - _TOLERANCE * bins.goals_S.sum():
                break
        heavy_P, light_P = bins.pairs(shift)
        if not len(heavy_P):
            break
        # If no pair has a swap that helps, the next turn gives the heavy bins other partners.
        shift = 0 if bins.swap(heavy_P, light_P, turn) else shift + 1
    return bins.bin_N


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidates:
    """Items that a bin could give away. A slot without an item has an infinite cost, so that it is never chosen."""

    item_PC: Ints
    costs_PC: Floats
    tokens_PC: Ints


class _Bins:
    """The bin of each item, and the load and the room of each bin; swaps change them."""

    def __init__(self, items: Items, bin_N: Ints, bases_SW: Floats, cap: int) -> None:
        self.bin_N = bin_N.copy()
        self._items, num_bins = items, bases_SW.size
        self._loads_SW = bases_SW + np.bincount(bin_N, items.costs_N, num_bins).reshape(bases_SW.shape)
        self._room_W = cap - np.bincount(bin_N, items.tokens_N, num_bins).astype(np.int64)
        self._longest = int(items.tokens_N.max())
        # Items descend in cost, so the first of a bin is its largest. No bin of a set gets below its largest item.
        largest_W = np.zeros(num_bins)
        used, first = np.unique(bin_N, return_index=True)
        largest_W[used] = items.costs_N[first]
        largest_S = largest_W.reshape(bases_SW.shape).max(axis=1) + bases_SW.min(axis=1)
        self.goals_S = np.maximum(self._loads_SW.mean(axis=1), largest_S)

    def excess(self) -> float:
        """By how much the heaviest bin of each set exceeds its goal, summed."""
        return float((self._loads_SW.max(axis=1) - self.goals_S).clip(0).sum())

    def pairs(self, shift: int) -> tuple[Ints, Ints]:
        """Bins over the goal of their set, each with a light bin of the same set; no bin is in two pairs."""
        num_sets, width = self._loads_SW.shape
        order = np.argsort(self._loads_SW, axis=1, kind="stable") + np.arange(num_sets)[:, None] * width
        heavy, light = order[:, ::-1][:, : width // 2], np.roll(order[:, : width // 2], -shift, axis=1)
        over = self._loads_SW.ravel()[heavy] > self.goals_S[:, None] * (1 + _TOLERANCE)
        return heavy[over], light[over]

    def swap(self, heavy_P: Ints, light_P: Ints, turn: int) -> bool:
        """Moves one item of each heavy bin to its light bin, and one or none back: whatever leaves the two most even.

        Returns whether any pair had a swap that helps.
        """
        members = _members(self.bin_N, self._loads_SW.size)
        out = self._candidates(heavy_P, members, turn, -np.inf)
        back = self._candidates(light_P, members, turn, np.inf)
        nothing = np.zeros((len(light_P), 1), np.int64)
        back_costs_PC, back_tokens_PC = np.hstack([back.costs_PC, nothing]), np.hstack([back.tokens_PC, nothing])
        moved_PCC = out.costs_PC[:, :, None] - back_costs_PC[:, None, :]
        longer_PCC = out.tokens_PC[:, :, None] - back_tokens_PC[:, None, :]
        loads_W = self._loads_SW.reshape(-1)  # the same memory
        # The best swap moves half of the difference; one that moves nothing or all of it does not help.
        half_P = (loads_W[heavy_P] - loads_W[light_P]) / 2
        error_PCC = np.abs(moved_PCC - half_P[:, None, None])
        if self._room_W.min() < self._longest:
            error_PCC[longer_PCC > self._room_W[light_P][:, None, None]] = np.inf
            error_PCC[-longer_PCC > self._room_W[heavy_P][:, None, None]] = np.inf
        best_P = error_PCC.reshape(len(heavy_P), -1).argmin(axis=1)
        pair_P = np.arange(len(heavy_P))
        out_P, back_P = np.divmod(best_P, back_costs_PC.shape[1])
        helps = error_PCC[pair_P, out_P, back_P] < half_P * (1 - 1e-9)  # not by rounding alone
        pair, out_at, back_at = pair_P[helps], out_P[helps], back_P[helps]
        heavy, light, returned = heavy_P[helps], light_P[helps], back_at < back.item_PC.shape[1]
        self.bin_N[out.item_PC[pair, out_at]] = light
        self.bin_N[back.item_PC[pair[returned], back_at[returned]]] = heavy[returned]
        for values_W, change in ((loads_W, moved_PCC), (self._room_W, -longer_PCC)):
            values_W[heavy] -= change[pair, out_at, back_at]
            values_W[light] += change[pair, out_at, back_at]
        return bool(helps.any())

    def _candidates(self, bins_P: Ints, members: tuple[Ints, Ints, Ints], turn: int, absent: float) -> _Candidates:
        """All items of each bin, or an even sample over all sizes that changes with the turn."""
        by_bin, counts_W, starts_W = members
        slots_C, counts = np.arange(_CANDIDATES), counts_W[bins_P][:, None]
        offset = (counts * (turn * _GOLDEN_RATIO % 1.0)).astype(np.int64)
        place = np.where(counts <= _CANDIDATES, slots_C, (slots_C * counts + offset) // _CANDIDATES)
        item_PC = by_bin[np.minimum(starts_W[bins_P][:, None] + place, len(by_bin) - 1)]
        costs_PC = np.where(slots_C < counts, self._items.costs_N[item_PC], absent)
        return _Candidates(item_PC=item_PC, costs_PC=costs_PC, tokens_PC=self._items.tokens_N[item_PC])


def _members(bin_N: Ints, num_bins: int) -> tuple[Ints, Ints, Ints]:
    """The items bin after bin in their order, the number of items of each bin, and where each bin begins."""
    # NumPy sorts integers of 16 bits by radix, ten times as fast.
    keys: NDArray[Any] = bin_N.astype(np.uint16) if num_bins <= 1 << 16 else bin_N
    counts_W = np.bincount(bin_N, minlength=num_bins)
    return np.argsort(keys, kind="stable"), counts_W, np.cumsum(counts_W) - counts_W
