# SPDX-License-Identifier: Apache-2.0
"""The micro-steps of one optimizer mini-batch: as few as the token cap allows, each with even work on all ranks."""

# N rows in descending order of cost · G groups · R data-parallel ranks · M micro-steps · W = M × R bins
# A bin is one micro-batch: the rows of one rank in one micro-step. Bins are numbered micro-step × R + rank.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from podium.data.balancing import NO_CAP, Floats, Ints, Items, even_out, longest_first, pack_by_tokens

# How far a micro-batch may exceed a soft limit. 5% more memory lets rows be evened out where the limit is nearly met.
_SOFT_SLACK = 1.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MiniBatch:
    """The rows of one optimizer update, in descending order of cost."""

    rows: Items
    num_ranks: int
    groups: Groups | None = None

    @property
    def units(self) -> Items:
        """Units that stay on one rank: groups if there are any, else rows."""
        return self.rows if self.groups is None else self.groups.items


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Rows that stay on one rank together, as items in descending order of cost."""

    items: Items
    group_N: Ints  # position in `items` of each row's group

    @classmethod
    def of(cls, rows: Items, name_N: Ints) -> Groups:
        """Rows with equal names are one group."""
        _, group_N = np.unique(name_N, return_inverse=True)
        costs_G: Floats = np.bincount(group_N, rows.costs_N).astype(np.float64)
        tokens_G = np.bincount(group_N, rows.tokens_N).astype(np.int64)
        order_G = np.argsort(-costs_G, kind="stable")
        items = Items(costs_N=costs_G[order_G], tokens_N=tokens_G[order_G])
        return cls(items=items, group_N=_inverse(order_G)[group_N])


def fill_under_cap(batch: MiniBatch, cap: int) -> tuple[Ints, int]:
    """The bin of each row and the number of micro-steps: the fewest found with at most `cap` tokens in each bin."""
    tokens_N, num_ranks = batch.rows.tokens_N, batch.num_ranks
    # No two rows over half the cap share a bin.
    num_large = int(np.count_nonzero(tokens_N > cap // 2))
    longest_unit = int(batch.units.tokens_N.max(initial=0))
    at_least = (int(tokens_N.sum()) / (num_ranks * cap), num_large / num_ranks, longest_unit / cap)
    num_steps = max(1, *map(math.ceil, at_least))
    while (bin_N := _fill(batch, num_steps, cap)) is None:
        num_steps += 1
    return bin_N, num_steps


def fill_near_target(batch: MiniBatch, target: int) -> tuple[Ints, int]:
    """Like `fill_under_cap` with a soft limit: `target` tokens a bin set the number of micro-steps, and a bin may
    exceed it."""
    assert batch.groups is None
    rows, total = batch.rows, int(batch.rows.tokens_N.sum())
    num_steps = max(1, math.ceil(total / (batch.num_ranks * target)))
    num_bins = num_steps * batch.num_ranks
    bin_N = _fill(batch, num_steps, int(max(target, total / num_bins) * _SOFT_SLACK))
    if bin_N is None:
        # Even tokens make the fullest bin as small as possible; work becomes as even as that bin allows.
        bin_N = pack_by_tokens(rows, num_bins, NO_CAP)
        assert bin_N is not None
        fullest = int(np.bincount(bin_N, rows.tokens_N).max())
        bin_N = _align(rows, bin_N, num_steps, batch.num_ranks, fullest)
    return bin_N, num_steps


def _fill(batch: MiniBatch, num_steps: int, cap: int) -> Ints | None:
    """The bin of each row; None if no packing into this many micro-steps was found."""
    if batch.groups is not None:
        return _fill_grouped(batch.rows, batch.groups, num_steps, batch.num_ranks, cap)
    rows, num_ranks = batch.rows, batch.num_ranks
    bases_W = np.repeat(_bases(rows, num_steps, num_ranks), num_ranks)
    bin_N = longest_first(rows, bases_W, cap)
    if bin_N is None:
        bin_N = pack_by_tokens(rows, num_steps * num_ranks, cap)
        return None if bin_N is None else _align(rows, bin_N, num_steps, num_ranks, cap)
    if num_ranks > 1:
        bin_N = even_out(rows, bin_N, bases_W[None], cap)
    return bin_N if num_steps == 1 else _align(rows, bin_N, num_steps, num_ranks, cap)


def _bases(rows: Items, num_steps: int, num_ranks: int) -> Floats:
    """The load with which the bins of each micro-step start, so that LPT fills slow micro-steps more than others.

    A micro-step takes at least as long as its most expensive row. If that exceeds an even share, the other ranks can do
    as much in it at no cost, and the other micro-steps have less to do."""
    largest_M = np.zeros(num_steps)
    largest = rows.costs_N[::num_ranks][:num_steps]  # the largest row of each micro-step if like runs beside like
    largest_M[: len(largest)] = largest
    # If the first k micro-steps take as long as their largest row, each of the others takes this share of the rest.
    rest_M = rows.costs_N.sum() / num_ranks - np.concatenate([[0.0], np.cumsum(largest_M)[:-1]])
    share_M = rest_M / np.arange(num_steps, 0, -1)
    enough = np.flatnonzero(share_M >= largest_M)
    goals_M = np.maximum(largest_M, share_M[enough[0]] if len(enough) else 0.0)
    bases_M: Floats = goals_M[0] - goals_M
    return bases_M


def _align(rows: Items, bin_N: Ints, num_steps: int, num_ranks: int, cap: int) -> Ints:
    """Puts bins of similar cost into the same micro-step, the largest first, and evens out each micro-step.

    The largest comes first, because a micro-batch that exceeds the memory then fails at once."""
    order_W = np.argsort(-np.bincount(bin_N, rows.costs_N, num_steps * num_ranks), kind="stable")
    return even_out(rows, _inverse(order_W)[bin_N], np.zeros((num_steps, num_ranks)), cap)


def _fill_grouped(rows: Items, groups: Groups, num_steps: int, num_ranks: int, cap: int) -> Ints | None:
    """First the rank of each group, by cost or, if its rows do not fit so, by tokens; then the micro-step of rows."""
    bases_R, room = np.zeros(num_ranks), min(NO_CAP, num_steps * cap)
    by_cost = longest_first(groups.items, bases_R, room)
    if by_cost is not None:
        rank_G = even_out(groups.items, by_cost, bases_R[None], room)
        bin_N = _fill_ranks(rows, rank_G[groups.group_N], num_steps, num_ranks, cap)
        if bin_N is not None:
            return bin_N
    by_tokens = pack_by_tokens(groups.items, num_ranks, room)
    return None if by_tokens is None else _fill_ranks(rows, by_tokens[groups.group_N], num_steps, num_ranks, cap)


def _fill_ranks(rows: Items, rank_N: Ints, num_steps: int, num_ranks: int, cap: int) -> Ints | None:
    """The bin of rows whose rank is given: each rank's rows over its micro-steps, largest micro-batch first."""
    if num_steps == 1:
        return rank_N  # the cap of a rank is the cap of its only bin
    bases_RM = np.tile(_bases(rows, num_steps, num_ranks), (num_ranks, 1))
    step_N = np.empty_like(rank_N)
    for rank in range(num_ranks):
        mine = np.flatnonzero(rank_N == rank)
        items = rows.pick(mine)
        step = longest_first(items, bases_RM[rank], cap)
        if step is None:
            step = pack_by_tokens(items, num_steps, cap)
        if step is None:
            return None
        step_N[mine] = step
    place_N = even_out(rows, rank_N * num_steps + step_N, bases_RM, cap)
    costs_RM = np.bincount(place_N, rows.costs_N, bases_RM.size).reshape(bases_RM.shape)
    sorted_RM = np.argsort(np.argsort(-costs_RM, axis=1, kind="stable"), axis=1, kind="stable")
    return sorted_RM.ravel()[place_N] * num_ranks + rank_N


def _inverse(order: Ints) -> Ints:
    """The position of each element in this order."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place
