# SPDX-License-Identifier: Apache-2.0
"""The micro-steps of one optimizer mini-batch: as few as are found, each with as even work on all ranks as can be."""

# N rows, the dearest first · G groups · R ranks · M micro-steps · W = M × R bins
# A bin is the rows of one rank in one micro-step; a level is the bins of one micro-step, one for each rank. Bins are
# numbered level after level: level × R + rank.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from podium.data.balancing import NO_CAP, Floats, Ints, Items, even_out, spread, spread_tokens, spread_within

# How far a micro-batch may go over a soft limit for the sake of even work.
_SOFT_SLACK = 1.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MiniBatch:
    """The rows of one optimizer update, the dearest first."""

    rows: Items
    num_ranks: int
    groups: Groups | None = None

    @property
    def units(self) -> Items:
        """What goes to one rank undivided, the dearest first."""
        return self.rows if self.groups is None else self.groups.items


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Rows that stay on one rank together, as items of their own, the dearest first."""

    items: Items
    group_N: Ints  # position in `items` of each row's group

    @classmethod
    def of(cls, rows: Items, name_N: Ints) -> Groups:
        """Rows with equal names are one group."""
        _, group_N = np.unique(name_N, return_inverse=True)
        costs_G: Floats = np.bincount(group_N, rows.costs_N).astype(np.float64)
        order_G = np.argsort(-costs_G, kind="stable")
        place_G = np.empty_like(order_G)
        place_G[order_G] = np.arange(len(order_G))
        tokens_G = np.bincount(group_N, rows.tokens_N).astype(np.int64)
        items = Items(costs_N=costs_G[order_G], tokens_N=tokens_G[order_G])
        return cls(items=items, group_N=place_G[group_N])


def fill_fewest(batch: MiniBatch, cap: int) -> tuple[Ints, int]:
    """The bin of each row and the number of levels, the fewest found in which no bin has more than `cap` tokens."""
    tokens_N, num_ranks = batch.rows.tokens_N, batch.num_ranks
    # Rows over half the cap have a bin each.
    num_large = int(np.count_nonzero(tokens_N > cap // 2))
    longest_unit = int(batch.units.tokens_N.max(initial=0))
    at_least = (int(tokens_N.sum()) / (num_ranks * cap), num_large / num_ranks, longest_unit / cap)
    num_levels = max(1, *map(math.ceil, at_least))
    while (bin_N := _fill(batch, num_levels, cap)) is None:
        num_levels += 1
    return bin_N, num_levels


def fill_about(batch: MiniBatch, target: int) -> tuple[Ints, int]:
    """The same in as many levels as `target` tokens a bin would need if rows could be cut; bins may go over it."""
    assert batch.groups is None
    rows, total = batch.rows, int(batch.rows.tokens_N.sum())
    num_levels = max(1, -(-total // (batch.num_ranks * target)))
    num_bins = num_levels * batch.num_ranks
    bin_N = _fill(batch, num_levels, int(max(target, total / num_bins) * _SOFT_SLACK))
    if bin_N is None:
        # The fullest bin as little full as even tokens make it, and work as even as that allows.
        bin_N = spread_tokens(rows, num_bins, NO_CAP)
        assert bin_N is not None
        fullest = int(np.bincount(bin_N, rows.tokens_N).max())
        bin_N = _levelled(rows, bin_N, num_levels, batch.num_ranks, fullest)
    return bin_N, num_levels


def _fill(batch: MiniBatch, num_levels: int, cap: int) -> Ints | None:
    """The bin of each row; None when this many levels do not hold them, as far as is found."""
    if batch.groups is not None:
        return _fill_grouped(batch.rows, batch.groups, num_levels, batch.num_ranks, cap)
    rows, num_ranks = batch.rows, batch.num_ranks
    bases_W = np.repeat(_level_bases(rows, num_levels, num_ranks), num_ranks)
    bin_N = spread(rows, bases_W, cap)
    if bin_N is not None:
        if num_ranks > 1:
            bin_N = even_out(rows, bin_N, bases_W[None], cap)
        return bin_N if num_levels == 1 else _levelled(rows, bin_N, num_levels, num_ranks, cap)
    # Even work does not fit: as many tokens everywhere, and bins of like cost side by side.
    bin_N = spread_tokens(rows, num_levels * num_ranks, cap)
    return None if bin_N is None else _levelled(rows, bin_N, num_levels, num_ranks, cap)


def _level_bases(rows: Items, num_levels: int, num_ranks: int) -> Floats:
    """By how much less than the first level each level is meant to hold. Levels are even but for those that a dear row
    makes slow anyway: there the other ranks may as well do more, and have less to do in the rest."""
    heads_M = np.zeros(num_levels)
    heads = rows.costs_N[::num_ranks][:num_levels]
    heads_M[: len(heads)] = heads
    # The rest of the work after k levels of their heads' cost, spread evenly over the other levels.
    rest_M = rows.costs_N.sum() / num_ranks - np.concatenate([[0.0], np.cumsum(heads_M)[:-1]])
    share_M = rest_M / np.arange(num_levels, 0, -1)
    enough = np.flatnonzero(share_M >= heads_M)
    aims_M = np.maximum(heads_M, share_M[enough[0]] if len(enough) else 0.0)
    bases_M: Floats = aims_M[0] - aims_M
    return bases_M


def _levelled(rows: Items, bin_N: Ints, num_levels: int, num_ranks: int, cap: int) -> Ints:
    """Bins of like cost run at the same time, the dearest first (what is too large for memory shows at once)."""
    by_cost = np.argsort(-np.bincount(bin_N, rows.costs_N, num_levels * num_ranks), kind="stable")
    place_W = np.empty_like(by_cost)
    place_W[by_cost] = np.arange(len(by_cost))
    return even_out(rows, place_W[bin_N], np.zeros((num_levels, num_ranks)), cap)


def _fill_grouped(rows: Items, groups: Groups, num_levels: int, num_ranks: int, cap: int) -> Ints | None:
    """Ranks are chosen for groups, by work, or by tokens where the rows do not fit so; then levels for rows."""
    bases_R, room = np.zeros(num_ranks), min(NO_CAP, num_levels * cap)
    by_cost = spread(groups.items, bases_R, room)
    if by_cost is not None:
        rank_G = even_out(groups.items, by_cost, bases_R[None], room)
        bin_N = _fill_ranks(rows, rank_G[groups.group_N], num_levels, num_ranks, cap)
        if bin_N is not None:
            return bin_N
    by_tokens = spread_tokens(groups.items, num_ranks, room)
    return None if by_tokens is None else _fill_ranks(rows, by_tokens[groups.group_N], num_levels, num_ranks, cap)


def _fill_ranks(rows: Items, rank_N: Ints, num_levels: int, num_ranks: int, cap: int) -> Ints | None:
    """Rows whose rank is settled over its levels, so that each level is even over the ranks."""
    if num_levels == 1:
        return rank_N  # a rank's room is that of its only bin
    bases_RM = np.tile(_level_bases(rows, num_levels, num_ranks), (num_ranks, 1))
    place_N = spread_within(rows, rank_N, bases_RM, cap)
    if place_N is None:
        return None
    place_N = even_out(rows, place_N, bases_RM, cap)
    costs_RM = np.bincount(place_N, rows.costs_N, bases_RM.size).reshape(bases_RM.shape)
    level_RM = np.argsort(np.argsort(-costs_RM, axis=1, kind="stable"), axis=1, kind="stable")
    return level_RM.ravel()[place_N] * num_ranks + rank_N
