# SPDX-License-Identifier: Apache-2.0
"""Splits rows so that those with one prompt are computed in one micro-batch, where they share it; pure.

Rows that share are split as one unit, with the tokens and the cost that are left when the prompt is computed once. This
makes units coarser, so the slowest ranks may have more to do. Whether it pays is decided by the time of both plans."""

# N rows · M units · K micro-batches

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podium.data.balancing import Floats, Ints
from podium.data.prefixes import LEAST_SAVED, PrefixCost, RowPrefixes
from podium.data.splitting import SplitPlan, split_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Units:
    """Rows that stay in one micro-batch."""

    unit_N: Ints
    tokens_M: Ints  # that are computed
    costs_M: Floats
    mini_batch_M: Ints


def share_in_micro_batches(
    plan: SplitPlan, costs_N: ArrayLike, prefixes: RowPrefixes, cost: PrefixCost, *, times: float = 1.0
) -> SplitPlan:
    """A plan in which rows share prompts, or the given one if that takes no longer. `times`: the passes that `costs_N`
    count, as multiples of a forward pass. A micro-batch has at most the tokens of the given plan's limit, as they are
    computed."""
    costs = np.asarray(costs_N, np.float64)
    units = _units(plan, costs, prefixes, cost, times)
    if units is None:
        return plan
    shared = split_rows(
        units.tokens_M, units.costs_M, num_ranks=plan.num_ranks, max_tokens=plan.max_tokens,
        mini_batch_N=units.mini_batch_M,
    )  # fmt: skip
    if _time(shared, units.costs_M) > (1 - LEAST_SAVED) * _time(plan, costs):
        return plan
    rank_N, micro_step_N = shared.rank_N[units.unit_N], shared.micro_step_N[units.unit_N]
    micro_batch_N = _micro_batches(shared, rank_N, plan.mini_batch_N, micro_step_N)
    return replace(
        shared,
        lengths_N=plan.lengths_N,
        rank_N=rank_N,
        mini_batch_N=plan.mini_batch_N,
        micro_step_N=micro_step_N,
        by_micro_batch_N=np.argsort(micro_batch_N, kind="stable"),
        ends_K=np.cumsum(np.bincount(micro_batch_N, minlength=plan.num_ranks * shared.num_micro_steps)),
    )


def _units(plan: SplitPlan, costs_N: Floats, prefixes: RowPrefixes, cost: PrefixCost, times: float) -> _Units | None:
    """None: no rows share anything that pays."""
    unit_N = np.arange(len(costs_N))
    tokens_M, costs_M = plan.lengths_N.copy(), costs_N.copy()
    keys = np.stack([plan.mini_batch_N, prefixes.key_N, prefixes.tokens_N], axis=1)
    order = np.lexsort(keys.T[::-1])
    starts = np.flatnonzero(np.concatenate([[True], (keys[order][1:] != keys[order][:-1]).any(axis=1)]))
    for rows in np.split(order, starts[1:]):
        length = int(prefixes.tokens_N[rows[0]]) if len(rows) else 0
        for part in _fitting(plan.lengths_N, rows, length, plan.max_tokens, copies=cost.copies_keys):
            following = int((plan.lengths_N[part] - length).sum())
            saved = cost.saved(length, len(part), following)
            if len(part) < 2 or saved <= 0:
                continue
            first = int(part.min())
            unit_N[part] = first
            repeated = 0 if cost.copies_keys else length * (len(part) - 1)
            tokens_M[first] = plan.lengths_N[part].sum() - repeated
            costs_M[first] = max(0.0, costs_N[part].sum() - times * saved)
    names, unit_N = np.unique(unit_N, return_inverse=True)
    if len(names) == len(costs_N):
        return None
    return _Units(
        unit_N=unit_N, tokens_M=tokens_M[names], costs_M=costs_M[names], mini_batch_M=plan.mini_batch_N[names]
    )


def _fitting(lengths_N: Ints, rows: Ints, shared: int, max_tokens: int, *, copies: bool) -> list[Ints]:
    """Cuts rows with one prompt into parts that fit a micro-batch. `copies`: each row counts its prompt, because its
    attention copies the prompt's keys."""
    parts: list[list[int]] = []
    room = 0
    for row in np.sort(rows).tolist():
        length = int(lengths_N[row])
        needed = length if copies else length - shared
        if not parts or needed > room:
            parts.append([])
            room, needed = max_tokens, length
        parts[-1].append(row)
        room -= needed
    return [np.array(part, np.int64) for part in parts]


def _time(plan: SplitPlan, costs_N: Floats) -> float:
    """The sum of the slowest rank's cost over micro-steps."""
    micro_batch_N = _micro_batches(plan, plan.rank_N, plan.mini_batch_N, plan.micro_step_N)
    costs_K = np.bincount(micro_batch_N, costs_N, plan.num_ranks * plan.num_micro_steps)
    return float(costs_K.reshape(plan.num_ranks, plan.num_micro_steps).max(axis=0).sum())


def _micro_batches(plan: SplitPlan, rank_N: Ints, mini_batch_N: Ints, micro_step_N: Ints) -> NDArray[np.int64]:
    """The number of each row's micro-batch: rank after rank, micro-step after micro-step."""
    first_step_B = np.cumsum([0, *plan.micro_steps_B])
    numbers: NDArray[np.int64] = rank_N * plan.num_micro_steps + first_step_B[mini_batch_N] + micro_step_N
    return numbers
