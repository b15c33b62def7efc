# SPDX-License-Identifier: Apache-2.0
"""Lower bounds: the imbalance that no split of these rows can beat, and why; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podium.data.balancing import Items
from podium.data.micro_steps import MiniBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchBound:
    """The least time of one mini-batch, in units of cost, and the time of perfectly even work."""

    least: float
    even: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """The least imbalance of any plan under this limit of tokens, with any number of micro-steps."""

    imbalance: float
    reason: str

    @classmethod
    def of(cls, bounds: Sequence[MiniBatchBound]) -> LowerBound:
        """Mini-batches run one after another, so their bounds add up; the reason is that of the worst."""
        least, even = sum(bound.least for bound in bounds), sum(bound.even for bound in bounds)
        worst = max(bounds, key=lambda bound: bound.least - bound.even)
        if worst.least <= worst.even:
            return cls(imbalance=1.0, reason="no known bound forbids even work")
        return cls(imbalance=least / even, reason=worst.reason)


def bound_mini_batch(batch: MiniBatch, number: int, cap: int) -> MiniBatchBound:
    """The highest of the known bounds: even work, one rank with too many rows, slow micro-steps under the cap."""
    even = float(batch.rows.costs_N.sum()) / batch.num_ranks
    if even == 0:
        return MiniBatchBound(least=0.0, even=0.0, reason="")
    known = [(even, ""), _pigeonhole(batch), _slow_micro_steps(batch.rows, batch.num_ranks, cap)]
    least, reason = max(known, key=lambda bound: bound[0])
    reason = f"{reason}: {least / even:.2f}x even work in mini-batch {number}"
    return MiniBatchBound(least=least, even=even, reason=reason)


def _pigeonhole(batch: MiniBatch) -> tuple[float, str]:
    """Of k × ranks + 1 rows, one rank has k + 1, which cost at least as much as the k + 1 cheapest of them. For k = 0
    that is the most expensive row."""
    costs, ranks = batch.units.costs_N, batch.num_ranks
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    counts = np.arange((len(costs) - 1) // ranks + 1)
    least = sums[counts * ranks + 1] - sums[counts * ranks - counts]
    most = int(least.argmax())
    what = "row" if batch.groups is None else "group"
    if most == 0:
        return float(least[0]), f"one {what} of {batch.units.tokens_N[0]} tokens is more than an even share"
    return float(least[most]), f"of {most * ranks + 1} {what}s some rank has {most + 1}"


def _slow_micro_steps(rows: Items, num_ranks: int, cap: int) -> tuple[float, str]:
    """An expensive row makes its micro-step slow, and the cap limits what the other ranks can do in that time.

    They hold at most `cap` tokens each, at best of the rows with the highest cost per token; the rest of the work is
    added. Rows over half the cap share no micro-batch, so k × ranks + 1 of them need k + 1 micro-steps."""
    large = rows.costs_N[rows.tokens_N > cap // 2]
    slowest = np.concatenate([rows.costs_N[:1], large[num_ranks::num_ranks]])
    density_N = rows.costs_N / np.maximum(rows.tokens_N, 1)
    order = np.argsort(-density_N, kind="stable")
    tokens, costs = np.cumsum(rows.tokens_N[order]), np.cumsum(rows.costs_N[order])
    room = np.arange(1, len(slowest) + 1) * float(num_ranks) * cap
    done_meanwhile = np.interp(room, np.concatenate([[0], tokens]), np.concatenate([[0.0], costs]))
    least = np.cumsum(slowest) + (costs[-1] - done_meanwhile) / num_ranks
    return float(least.max()), f"expensive rows make micro-steps slow that {cap} tokens cannot fill on all ranks"
