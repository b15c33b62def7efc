# SPDX-License-Identifier: Apache-2.0
"""Splits a step's rows over data-parallel ranks and micro-steps by cost, so that no rank waits long for another; pure.

The ranks meet in collectives after every micro-step, so a step takes the sum of the slowest rank's micro-batches.
For each optimizer mini-batch:
1. Take the fewest micro-steps that the limit of tokens allows: tokens / (ranks × limit), rounded up (micro_steps.py).
2. Pack rows into micro-steps × ranks bins by cost: longest-processing-time first, under the limit. Micro-steps that
   one expensive row makes slow anyway are filled up to its cost.
3. Swap rows between the heaviest and the lightest bins until no swap gains 0.02% (balancing.py).
4. Sort the bins by cost and cut them into micro-steps, so that like runs beside like; swap within each micro-step.
If step 2 does not fit, pack by tokens instead; if that does not fit either, take one micro-step more.
The plan says how far it is from even work, and from a lower bound that no plan can beat (split_bounds.py).
"""

# N rows · R data-parallel ranks · B optimizer mini-batches · K micro-batches: the rows of one rank in one micro-step

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podium.data.balancing import NO_CAP, Floats, Ints, Items
from podium.data.costs import SequenceCost
from podium.data.micro_steps import Groups, MiniBatch, fill_near_target, fill_under_cap
from podium.data.split_bounds import LowerBound, MiniBatchBound, bound_mini_batch
from podium.errors import DataError

_PER_TOKEN = SequenceCost(per_token=1.0)
# A line of the printed plan has room for this many mini-batches.
_PRINTED_MINI_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPlan:
    """The rank, mini-batch and micro-step of each row. All ranks have the same number of micro-steps, because they meet
    in collectives; their micro-batches differ in rows, and may be empty."""

    num_ranks: int
    max_tokens: int
    lengths_N: Ints
    rank_N: Ints
    mini_batch_N: Ints
    micro_step_N: Ints  # 0, 1, ... in each mini-batch
    micro_steps_B: tuple[int, ...]
    imbalance: float  # sum over micro-steps of the slowest rank's cost, over the ideal of perfectly even work
    bound: LowerBound
    by_micro_batch_N: Ints  # rows rank after rank, micro-step after micro-step
    ends_K: Ints  # where each micro-batch ends in it

    @property
    def lower_bound(self) -> float:
        """The least imbalance that any plan can have."""
        return self.bound.imbalance

    @property
    def over_bound(self) -> float:
        """Slowdown relative to the lower bound; 1 is the optimum."""
        return self.imbalance / self.lower_bound

    @property
    def num_micro_steps(self) -> int:
        """The micro-steps of all mini-batches."""
        return sum(self.micro_steps_B)

    def rows(self, rank: int) -> tuple[tuple[Ints, ...], ...]:
        """[mini-batch][micro-step] -> positions of this rank's rows, ascending."""
        first, last = rank * self.num_micro_steps, (rank + 1) * self.num_micro_steps
        start = self.ends_K[first - 1] if first else 0
        parts = iter(
            np.split(self.by_micro_batch_N[start : self.ends_K[last - 1]], self.ends_K[first : last - 1] - start)
        )
        return tuple(tuple(next(parts) for _ in range(steps)) for steps in self.micro_steps_B)

    @property
    def micro_batches(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[rank][micro-step] -> positions of rows as plain numbers; mini-batches follow one another."""
        return tuple(
            tuple(tuple(part.tolist()) for mini_batch in self.rows(rank) for part in mini_batch)
            for rank in range(self.num_ranks)
        )

    def describe(self) -> str:
        """A small table to print."""
        num_rows, num_mini_batches = len(self.rank_N), len(self.micro_steps_B)
        steps = ", ".join(map(str, self.micro_steps_B[:_PRINTED_MINI_BATCHES]))
        steps += ", ..." if num_mini_batches > _PRINTED_MINI_BATCHES else ""
        micro_batch_N = np.searchsorted(self.ends_K, np.arange(num_rows), side="right")
        rows_R = np.bincount(self.rank_N, minlength=self.num_ranks)
        tokens_R = np.bincount(self.rank_N, self.lengths_N, self.num_ranks)
        tokens_K = np.bincount(micro_batch_N, self.lengths_N[self.by_micro_batch_N], len(self.ends_K))
        lines = {
            "ranks": f"{self.num_ranks:,}",
            "rows": f"{num_rows:,}; {_span(rows_R)} a rank",
            "tokens": f"{self.lengths_N.sum():,}; {_span(tokens_R)} a rank, {_span(tokens_K)} a micro-batch "
            f"(limit {self.max_tokens:,})",
            "micro-steps": steps + (f" in {num_mini_batches:,} mini-batches" if num_mini_batches > 1 else ""),
            "imbalance": f"{self.imbalance:.4f} times even work, {self.over_bound:.4f} times the bound",
            "bound": f"{self.lower_bound:.4f}, since {self.bound.reason}",
        }
        return "\n".join(f"{name:<12}{value}" for name, value in lines.items())

    __str__ = describe


def split_step(
    lengths: ArrayLike, *, num_ranks: int, max_tokens: int, cost: SequenceCost = _PER_TOKEN, hard_cap: bool = True
) -> SplitPlan:
    """Splits the documents of one optimizer step over the fewest micro-steps that hold them.

    With `hard_cap` no micro-batch has more than `max_tokens`. Without it, `max_tokens` is a target that a micro-batch
    may exceed for the sake of even work.
    """
    lengths_N = np.asarray(lengths, np.int64)
    return _split(lengths_N, cost.of(lengths_N), np.zeros_like(lengths_N), None, num_ranks, max_tokens, hard_cap)


def split_rows(
    lengths_N: ArrayLike,
    costs_N: ArrayLike,
    *,
    num_ranks: int,
    max_tokens: int,
    mini_batch_N: ArrayLike | None = None,
    group_N: ArrayLike | None = None,
) -> SplitPlan:
    """Splits rows by cost, each mini-batch (0, 1, ...) by itself, into micro-batches of at most `max_tokens`.

    Rows with equal `group_N` stay on one rank within their mini-batch, in any of its micro-steps.
    """
    lengths = np.asarray(lengths_N, np.int64)
    mini_batch = np.zeros_like(lengths) if mini_batch_N is None else np.asarray(mini_batch_N, np.int64)
    group = None if group_N is None else np.asarray(group_N)
    return _split(lengths, np.asarray(costs_N, np.float64), mini_batch, group, num_ranks, max_tokens, hard_cap=True)


def _split(
    lengths_N: Ints,
    costs_N: Floats,
    mini_batch_N: Ints,
    group_N: NDArray[Any] | None,
    num_ranks: int,
    max_tokens: int,
    hard_cap: bool,
) -> SplitPlan:
    assert num_ranks >= 1
    assert max_tokens >= 1
    assert lengths_N.shape == costs_N.shape == mini_batch_N.shape
    assert lengths_N.min(initial=0) >= 0
    assert mini_batch_N.min(initial=0) >= 0
    assert np.isfinite(costs_N).all()
    assert costs_N.min(initial=0) >= 0
    if hard_cap and lengths_N.max(initial=0) > max_tokens:
        raise DataError(
            f"a row of {lengths_N.max()} tokens does not fit a micro-batch of {max_tokens}; it is never cut over two. "
            "Lower data.max_length, or raise micro_batch_tokens."
        )
    rank_N, micro_step_N = np.empty_like(lengths_N), np.empty_like(lengths_N)
    micro_steps: list[int] = []
    bounds: list[MiniBatchBound] = []
    for rows in _mini_batches(lengths_N, costs_N, mini_batch_N):
        items = Items(costs_N=costs_N[rows], tokens_N=lengths_N[rows])
        groups = None if group_N is None else Groups.of(items, group_N[rows])
        batch = MiniBatch(rows=items, num_ranks=num_ranks, groups=groups)
        bin_N, num_steps = fill_under_cap(batch, max_tokens) if hard_cap else fill_near_target(batch, max_tokens)
        micro_step_N[rows], rank_N[rows] = np.divmod(bin_N, num_ranks)
        micro_steps.append(num_steps)
        bounds.append(bound_mini_batch(batch, len(bounds), max_tokens if hard_cap else NO_CAP))
    num_steps = sum(micro_steps)
    first_step_B = np.cumsum([0, *micro_steps])
    micro_batch_N = rank_N * num_steps + first_step_B[mini_batch_N] + micro_step_N
    costs_K = np.bincount(micro_batch_N, costs_N, num_ranks * num_steps)
    slowest, total = float(costs_K.reshape(num_ranks, num_steps).max(axis=0).sum()), float(costs_N.sum())
    return SplitPlan(
        num_ranks=num_ranks, max_tokens=max_tokens, lengths_N=lengths_N, rank_N=rank_N, mini_batch_N=mini_batch_N,
        micro_step_N=micro_step_N, micro_steps_B=tuple(micro_steps),
        imbalance=slowest * num_ranks / total if total > 0 else 1.0,
        bound=LowerBound.of(bounds), by_micro_batch_N=np.argsort(micro_batch_N, kind="stable"),
        ends_K=np.cumsum(np.bincount(micro_batch_N, minlength=num_ranks * num_steps)),
    )  # fmt: skip


def _mini_batches(lengths_N: Ints, costs_N: Floats, mini_batch_N: Ints) -> Iterator[Ints]:
    """The rows of each mini-batch in descending order of cost; ties: the longest, then the earliest."""
    order = np.argsort(-lengths_N, kind="stable")
    order = order[np.argsort(-costs_N[order], kind="stable")]
    order = order[np.argsort(mini_batch_N[order], kind="stable")]
    ends_B = np.cumsum(np.bincount(mini_batch_N, minlength=1))
    yield from np.split(order, ends_B[:-1])


def _span(values: NDArray[Any]) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
