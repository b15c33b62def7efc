# SPDX-License-Identifier: Apache-2.0
"""Items over bins so that the heaviest bin is as light as can be, under a limit of tokens for each bin; pure."""

# N items · W bins · L leagues (bins that are made even with one another) · P pairs of bins · S slots for candidates

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

NO_CAP = int(np.iinfo(np.int64).max)
# Work this even is not worth another swap.
_EVEN_ENOUGH = 1.0002
# One item after the other is quicker than rounds of NumPy with fewer bins, or after so many rounds that placed few.
_FEW_BINS = 64
_FEW_PLACED = 32
_MOST_POOR_ROUNDS = 16
# Swaps: how many items of a bin are looked at, how many pairs of bins at a time, how many turns at most, how often
# heavy bins are offered other partners in vain, and what part of the work so many turns must save to be worth it.
_SLOTS = 16
_MOST_PAIRS = 1024
_MOST_TURNS = 48
_MOST_SHIFTS = 4
_WORTH_EVERY = 5
_WORTH = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """What is spread, the dearest first."""

    costs_N: Floats
    tokens_N: Ints

    def pick(self, chosen: Ints) -> Items:
        """Some of them; `chosen` ascends, or the order is lost."""
        return Items(costs_N=self.costs_N[chosen], tokens_N=self.tokens_N[chosen])


def spread(items: Items, bases_W: Floats, cap: int) -> Ints | None:
    """The bin of each item: the dearest first, each into the bin that has the least so far and room for it. A bin
    begins with its base, so that bins may be aimed at different loads. None: an item found no room."""
    bin_N = np.empty(len(items.costs_N), np.int64)
    loads_W, room_W = bases_W.astype(np.float64), np.full(len(bases_W), cap, np.int64)
    left = np.arange(len(bin_N))
    if len(bases_W) >= _FEW_BINS:
        left = _spread_in_rounds(items, bin_N, loads_W, room_W)
    return bin_N if _spread_one_by_one(items, left, bin_N, loads_W, room_W) else None


def _spread_in_rounds(items: Items, bin_N: Ints, loads_W: Floats, room_W: Ints) -> Ints:
    """Many items at a time: the next ones, in order, into the lightest bins, as long as no bin that was just given one
    would be the lightest again. Returns the items left when rounds no longer pay."""
    costs_N, tokens_N = items.costs_N, items.tokens_N
    waiting, first, poor_rounds = np.empty(0, np.int64), 0, 0
    while poor_rounds < _MOST_POOR_ROUNDS and len(waiting) + len(bin_N) - first > 0:
        more = min(len(bin_N) - first, max(0, len(loads_W) - len(waiting)))
        waiting, first = np.concatenate([waiting, np.arange(first, first + more)]), first + more
        has_room = np.flatnonzero(room_W >= tokens_N[waiting[0]])
        lightest = has_room[np.argsort(loads_W[has_room], kind="stable")][: len(waiting)]
        asked = waiting[: len(lightest)]
        fits = tokens_N[asked] <= room_W[lightest]
        after = loads_W[lightest] + costs_N[asked]
        again = np.minimum.accumulate(np.where(fits, after, np.inf))
        placed = fits.copy()
        placed[1:] &= loads_W[lightest][1:] <= again[:-1]
        into, put = lightest[placed], asked[placed]
        bin_N[put], loads_W[into] = into, after[placed]
        room_W[into] -= tokens_N[put]
        waiting = np.concatenate([asked[~placed], waiting[len(asked) :]])
        poor_rounds += len(put) < _FEW_PLACED
    return np.concatenate([waiting, np.arange(first, len(bin_N))])


def _spread_one_by_one(items: Items, left: Ints, bin_N: Ints, loads_W: Floats, room_W: Ints) -> bool:
    """The same with a heap. Bins too full for an item are parked until one comes that they have room for."""
    room = room_W.tolist()
    ready = [(load, position) for position, load in enumerate(loads_W.tolist())]
    heapq.heapify(ready)
    parked: list[tuple[int, float, int]] = []
    chosen = []
    for cost, size in zip(items.costs_N[left].tolist(), items.tokens_N[left].tolist(), strict=True):
        while parked and -parked[0][0] >= size:
            _, load, position = heapq.heappop(parked)
            heapq.heappush(ready, (load, position))
        while ready and room[ready[0][1]] < size:
            load, position = heapq.heappop(ready)
            heapq.heappush(parked, (-room[position], load, position))
        if not ready:
            return False
        load, position = ready[0]
        room[position] -= size
        chosen.append(position)
        heapq.heapreplace(ready, (load + cost, position))
    bin_N[left] = chosen
    return True


def spread_within(items: Items, league_N: Ints, bases_LW: Floats, cap: int) -> Ints | None:
    """The bin (league * W + number in it) of each item, whose league is given: `spread` in all leagues at once."""
    num_leagues, width = bases_LW.shape
    loads_LW, room_LW = bases_LW.astype(np.float64), np.full((num_leagues, width), cap, np.int64)
    number_N = np.empty(len(league_N), np.int64)
    by_league, counts_L, starts_L = _members(league_N, num_leagues)
    # With few leagues each has many items, and is quicker for itself.
    alone = np.full(num_leagues, num_leagues < _FEW_BINS)
    for turn in range(0 if alone.any() else int(counts_L.max(initial=0))):
        leagues = np.flatnonzero((counts_L > turn) & ~alone)
        each = by_league[starts_L[leagues] + turn]
        fits = room_LW[leagues] >= items.tokens_N[each][:, None]
        number_N[each] = number = np.where(fits, loads_LW[leagues], np.inf).argmin(axis=1)
        loads_LW[leagues, number] += items.costs_N[each]
        room_LW[leagues, number] -= items.tokens_N[each]
        alone[leagues] = ~fits.any(axis=1)
    for league in np.flatnonzero(alone):
        mine = by_league[starts_L[league] : starts_L[league] + counts_L[league]]
        found = spread(items.pick(mine), bases_LW[league], cap)
        if found is None:
            found = spread_tokens(items.pick(mine), width, cap)
        if found is None:
            return None
        number_N[mine] = found
    bin_N: Ints = league_N * width + number_N
    return bin_N


def spread_tokens(items: Items, num_bins: int, cap: int) -> Ints | None:
    """Bins even in tokens, for a cap that leaves no choice; the tightest packing that is known here when even ones go
    over it; None when that does too."""
    order = np.argsort(-items.tokens_N, kind="stable")
    sizes_N = items.tokens_N[order]
    sized = Items(costs_N=sizes_N.astype(np.float64), tokens_N=sizes_N)
    bases_W = np.zeros(num_bins)
    placed = spread(sized, bases_W, NO_CAP)
    assert placed is not None
    placed = even_out(sized, placed, bases_W[None], NO_CAP)
    if np.bincount(placed, sizes_N, num_bins).max() > cap:
        placed = _best_fit(sizes_N, num_bins, cap)
    if placed is None:
        return None
    bin_N = np.empty_like(placed)
    bin_N[order] = placed
    return bin_N


def _best_fit(sizes_N: Ints, num_bins: int, cap: int) -> Ints | None:
    """Each item, the longest first, into the fullest bin that has room: holds more than even bins do."""
    room = [(cap, position) for position in range(num_bins)]
    chosen = []
    for size in sizes_N.tolist():
        place = bisect_left(room, (size, -1))
        if place == len(room):
            return None
        left, position = room.pop(place)
        chosen.append(position)
        insort(room, (left - size, position))
    return np.array(chosen, np.int64)


def even_out(items: Items, bin_N: Ints, bases_LW: Floats, cap: int) -> Ints:
    """Lowers the heaviest bins of each league by swaps with its lightest, while that helps. Bins are numbered league
    after league."""
    if not len(bin_N):
        return bin_N
    leagues = _Leagues(items, bin_N, bases_LW, cap)
    shift, before = 0, np.inf
    for turn in range(_MOST_TURNS):
        if turn % _WORTH_EVERY == 0:
            now = leagues.excess()
            if now > before - _WORTH * leagues.goals_L.sum():
                break
            before = now
        heavy_P, light_P = leagues.pairs(shift)
        if not len(heavy_P):
            break
        # Where no pair has anything to swap, the heavy bins are offered other partners.
        shift = 0 if leagues.swap(heavy_P, light_P, turn) else shift + 1
        if shift == _MOST_SHIFTS:
            break
    return leagues.bin_N


class _Leagues:
    """Where every item is at the moment, and what each bin holds."""

    def __init__(self, items: Items, bin_N: Ints, bases_LW: Floats, cap: int) -> None:
        self.bin_N = bin_N.copy()
        self._items, (num_leagues, width) = items, bases_LW.shape
        num_bins = num_leagues * width
        self._loads_LW = bases_LW + np.bincount(bin_N, items.costs_N, num_bins).reshape(num_leagues, width)
        self._room_W = cap - np.bincount(bin_N, items.tokens_N, num_bins).astype(np.int64)
        self._longest = int(items.tokens_N.max())
        dearest_W = np.zeros(num_bins)
        # Items come dearest first, so the first of a bin is its dearest.
        held, first = np.unique(bin_N, return_index=True)
        dearest_W[held] = items.costs_N[first]
        dearest_L = dearest_W.reshape(num_leagues, width).max(axis=1) + bases_LW.min(axis=1)
        self.goals_L = np.maximum(self._loads_LW.mean(axis=1), dearest_L)

    def excess(self) -> float:
        """By how much the heaviest bins are over what they could be at best."""
        return float((self._loads_LW.max(axis=1) - self.goals_L).clip(0).sum())

    def pairs(self, shift: int) -> tuple[Ints, Ints]:
        """Bins that are too heavy, and for each a light one of its league; no bin is in two pairs."""
        num_leagues, width = self._loads_LW.shape
        num = min(width // 2, max(1, _MOST_PAIRS // num_leagues))
        order = np.argsort(self._loads_LW, axis=1, kind="stable") + np.arange(num_leagues)[:, None] * width
        heavy, light = order[:, ::-1][:, :num], np.roll(order[:, :num], -shift, axis=1)
        over = self._loads_LW.ravel()[heavy] > self.goals_L[:, None] * _EVEN_ENOUGH
        return heavy[over], light[over]

    def swap(self, heavy_P: Ints, light_P: Ints, turn: int) -> bool:
        """One item of each heavy bin for one, or none, of the light one: what leaves the two most even. Whether any
        pair had such a swap."""
        members = _members(self.bin_N, self._loads_LW.size)
        out_PS, out_costs_PS, out_tokens_PS = self._candidates(heavy_P, members, turn, -np.inf)
        back_PS, back_costs_PS, back_tokens_PS = self._candidates(light_P, members, turn, np.inf)
        nothing = np.zeros((len(light_P), 1))
        back_costs_PS = np.hstack([back_costs_PS, nothing])
        back_tokens_PS = np.hstack([back_tokens_PS, nothing.astype(np.int64)])
        loads_W = self._loads_LW.reshape(-1)  # the same memory
        half_P = (loads_W[heavy_P] - loads_W[light_P]) / 2
        # The best moves half of the difference; one that moves nothing, or all of it, is of no use.
        off_PSS = np.abs(out_costs_PS[:, :, None] - back_costs_PS[:, None, :] - half_P[:, None, None])
        if self._room_W.min() < self._longest:
            longer_PSS = out_tokens_PS[:, :, None] - back_tokens_PS[:, None, :]
            too_long_PSS = longer_PSS > self._room_W[light_P][:, None, None]
            too_long_PSS |= -longer_PSS > self._room_W[heavy_P][:, None, None]
            off_PSS[too_long_PSS] = np.inf
        flat = off_PSS.reshape(len(heavy_P), -1)
        best_P = flat.argmin(axis=1)
        useful = np.flatnonzero(flat[np.arange(len(flat)), best_P] < half_P * (1 - 1e-9))
        out, back = np.divmod(best_P[useful], back_costs_PS.shape[1])
        heavy, light, returned = heavy_P[useful], light_P[useful], back < back_PS.shape[1]
        self.bin_N[out_PS[useful, out]] = light
        self.bin_N[back_PS[useful[returned], back[returned]]] = heavy[returned]
        moved = out_costs_PS[useful, out] - back_costs_PS[useful, back]
        longer = out_tokens_PS[useful, out] - back_tokens_PS[useful, back]
        loads_W[heavy] -= moved
        loads_W[light] += moved
        self._room_W[heavy] += longer
        self._room_W[light] -= longer
        return len(useful) > 0

    def _candidates(
        self, bins_P: Ints, members: tuple[Ints, Ints, Ints], turn: int, absent: float
    ) -> tuple[Ints, Floats, Ints]:
        """(item, cost, tokens) of what a bin could give: all it has, or a sample of all sizes that changes with the
        turn. Slots without an item have the cost `absent`."""
        by_bin, counts_W, starts_W = members
        slots_S, counts = np.arange(_SLOTS), counts_W[bins_P][:, None]
        offset = (counts * (turn * 0.618 % 1.0)).astype(np.int64)
        place = np.where(counts <= _SLOTS, slots_S, (slots_S * counts + offset) // _SLOTS)
        item_PS = by_bin[np.minimum(starts_W[bins_P][:, None] + place, len(by_bin) - 1)]
        costs_PS = np.where(slots_S < counts, self._items.costs_N[item_PS], absent)
        return item_PS, costs_PS, self._items.tokens_N[item_PS]


def _members(bin_N: Ints, num_bins: int) -> tuple[Ints, Ints, Ints]:
    """The items bin after bin, in their order; how many each bin has; where each begins."""
    # NumPy sorts integers of 16 bits by radix, ten times as fast.
    keys: NDArray[Any] = bin_N.astype(np.uint16) if num_bins <= 1 << 16 else bin_N
    counts_W = np.bincount(bin_N, minlength=num_bins)
    return np.argsort(keys, kind="stable"), counts_W, np.cumsum(counts_W) - counts_W
