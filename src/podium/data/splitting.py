# SPDX-License-Identifier: Apache-2.0
"""Rows of a step spread over ranks and micro-steps so that no rank waits long for another; pure."""

# N rows · G groups · R ranks · B optimizer mini-batches · K bins: the rows of one rank in one micro-step

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podium.data.balancing import NO_CAP, Floats, Ints, Items
from podium.data.costs import SequenceCost
from podium.data.micro_steps import Groups, MiniBatch, fill_about, fill_fewest
from podium.errors import DataError

_PER_TOKEN = SequenceCost(per_token=1.0)
# A table shows the micro-steps of this many mini-batches.
_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """What no plan under this limit of tokens can beat, in however many micro-steps."""

    imbalance: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPlan:
    """Who computes what: equal numbers of micro-steps on all ranks, because they meet in collectives; numbers of rows
    that differ, and may be 0."""

    num_ranks: int
    max_tokens: int
    lengths_N: Ints
    rank_N: Ints
    mini_batch_N: Ints
    micro_step_N: Ints  # 0, 1, ... in each mini-batch
    micro_steps_B: tuple[int, ...]
    imbalance: float  # sum over micro-steps of the slowest rank's cost, over the ideal of perfectly even work
    bound: LowerBound
    by_bin_N: Ints  # rows rank after rank, micro-step after micro-step
    ends_K: Ints  # where each bin ends in it

    @property
    def lower_bound(self) -> float:
        return self.bound.imbalance

    @property
    def over_bound(self) -> float:
        """How much slower than the lower bound; 1 is the best there is."""
        return self.imbalance / self.lower_bound

    @property
    def num_micro_steps(self) -> int:
        return sum(self.micro_steps_B)

    def rows(self, rank: int) -> tuple[tuple[Ints, ...], ...]:
        """[mini-batch][micro-step] -> positions of this rank's rows, ascending."""
        first, last = rank * self.num_micro_steps, (rank + 1) * self.num_micro_steps
        start = self.ends_K[first - 1] if first else 0
        parts = iter(np.split(self.by_bin_N[start : self.ends_K[last - 1]], self.ends_K[first : last - 1] - start))
        return tuple(tuple(next(parts) for _ in range(steps)) for steps in self.micro_steps_B)

    @property
    def micro_batches(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[rank][micro-step] -> positions of rows as plain numbers; mini-batches follow one another."""
        return tuple(
            tuple(tuple(part.tolist()) for mini_batch in self.rows(rank) for part in mini_batch)
            for rank in range(self.num_ranks)
        )

    def describe(self) -> str:
        """A small table for people."""
        num_rows, num_mini_batches = len(self.rank_N), len(self.micro_steps_B)
        bin_N = np.searchsorted(self.ends_K, np.arange(num_rows), side="right")
        steps = ", ".join(map(str, self.micro_steps_B[:_SHOWN])) + (", ..." if num_mini_batches > _SHOWN else "")
        rows_R = np.bincount(self.rank_N, minlength=self.num_ranks)
        tokens_R = np.bincount(self.rank_N, self.lengths_N, self.num_ranks)
        tokens_K = np.bincount(bin_N, self.lengths_N[self.by_bin_N], len(self.ends_K))
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
    """Spreads the documents of one optimizer step over the fewest micro-steps that hold them.

    With `hard_cap` no micro-batch has more than `max_tokens`; without, it is a target that evenness may overstep.
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
    """Spreads rows by cost, each mini-batch (0, 1, ...) for itself, over the fewest micro-steps found in which no
    micro-batch has more than `max_tokens`. Rows with equal `group_N` stay on one rank within their mini-batch, in any
    of its micro-steps."""
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
    bin_N = np.empty_like(lengths_N)  # micro-step × ranks + rank
    micro_steps: list[int] = []
    bounds: list[_Bound] = []
    for rows in _mini_batches(lengths_N, costs_N, mini_batch_N):
        items = Items(costs_N=costs_N[rows], tokens_N=lengths_N[rows])
        groups = None if group_N is None else Groups.of(items, group_N[rows])
        batch = MiniBatch(rows=items, num_ranks=num_ranks, groups=groups)
        filled, num_levels = fill_fewest(batch, max_tokens) if hard_cap else fill_about(batch, max_tokens)
        bin_N[rows] = filled
        micro_steps.append(num_levels)
        bounds.append(_bound(batch, len(bounds), max_tokens if hard_cap else NO_CAP))
    micro_step_N, rank_N = np.divmod(bin_N, num_ranks)
    num_micro_steps = sum(micro_steps)
    first_step_B = np.cumsum([0, *micro_steps])
    place_N = rank_N * num_micro_steps + first_step_B[mini_batch_N] + micro_step_N
    costs_K = np.bincount(place_N, costs_N, num_ranks * num_micro_steps)
    total = float(costs_N.sum())
    slowest = float(costs_K.reshape(num_ranks, num_micro_steps).max(axis=0).sum())
    return SplitPlan(
        num_ranks=num_ranks, max_tokens=max_tokens, lengths_N=lengths_N, rank_N=rank_N, mini_batch_N=mini_batch_N,
        micro_step_N=micro_step_N, micro_steps_B=tuple(micro_steps),
        imbalance=slowest * num_ranks / total if total > 0 else 1.0,
        bound=_lower_bound(bounds), by_bin_N=np.argsort(place_N, kind="stable"),
        ends_K=np.cumsum(np.bincount(place_N, minlength=num_ranks * num_micro_steps)),
    )  # fmt: skip


def _mini_batches(lengths_N: Ints, costs_N: Floats, mini_batch_N: Ints) -> Iterator[Ints]:
    """The rows of each mini-batch, the dearest first; of equal cost the longest, then the first."""
    order = np.argsort(-lengths_N, kind="stable")
    order = order[np.argsort(-costs_N[order], kind="stable")]
    order = order[np.argsort(mini_batch_N[order], kind="stable")]
    ends_B = np.cumsum(np.bincount(mini_batch_N, minlength=1))
    yield from np.split(order, ends_B[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """The least that the slowest ranks of one mini-batch can take."""

    least: float
    even: float
    reason: str


def _bound(batch: MiniBatch, number: int, cap: int) -> _Bound:
    """The highest of the bounds that are known."""
    even = float(batch.rows.costs_N.sum()) / batch.num_ranks
    if even == 0:
        return _Bound(least=0.0, even=0.0, reason="")
    known = [(even, ""), _crowding(batch), _slow_rows(batch.rows, batch.num_ranks, cap)]
    least, reason = max(known, key=lambda bound: bound[0])
    return _Bound(least=least, even=even, reason=f"{reason}: {least / even:.2f}x even work in mini-batch {number}")


def _crowding(batch: MiniBatch) -> tuple[float, str]:
    """Of k × ranks + 1 rows some rank has k + 1, and takes no less than the cheapest of them: for k = 0, the dearest
    row. What a rank takes in all is never more than the sum of the slowest."""
    costs, ranks = batch.units.costs_N, batch.num_ranks
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    counts = np.arange((len(costs) - 1) // ranks + 1)
    least = sums[counts * ranks + 1] - sums[counts * ranks - counts]
    most = int(least.argmax())
    what = "row" if batch.groups is None else "group"
    if most == 0:
        return float(least[0]), f"one {what} of {batch.units.tokens_N[0]} tokens is more than an even share"
    return float(least[most]), f"of {most * ranks + 1} {what}s some rank has {most + 1}"


def _slow_rows(rows: Items, num_ranks: int, cap: int) -> tuple[float, str]:
    """Dear rows make a micro-step slow; the other ranks can do no more in it than the cap lets them hold, even of the
    rows that are dearest for their length, and what is left comes on top. Rows over half the cap have a micro-batch
    each, so k × ranks + 1 of them take k + 1 micro-steps."""
    large = rows.costs_N[rows.tokens_N > cap // 2]
    heads = np.concatenate([rows.costs_N[:1], large[num_ranks::num_ranks]])
    density_N = rows.costs_N / np.maximum(rows.tokens_N, 1)
    order = np.argsort(-density_N, kind="stable")
    tokens, costs = np.cumsum(rows.tokens_N[order]), np.cumsum(rows.costs_N[order])
    room = np.arange(1, len(heads) + 1) * float(num_ranks) * cap
    held = np.interp(room, np.concatenate([[0], tokens]), np.concatenate([[0.0], costs]))
    least = np.cumsum(heads) + (costs[-1] - held) / num_ranks
    return float(least.max()), f"dear rows make micro-steps slow that {cap} tokens cannot fill on all ranks"


def _lower_bound(bounds: Sequence[_Bound]) -> LowerBound:
    """Mini-batches follow one another, so their bounds add up; the reason is that of the worst."""
    least, even = sum(bound.least for bound in bounds), sum(bound.even for bound in bounds)
    worst = max(bounds, key=lambda bound: bound.least - bound.even)
    if worst.least <= worst.even:
        return LowerBound(imbalance=1.0, reason="nothing known stands in the way of even work")
    return LowerBound(imbalance=least / even, reason=worst.reason)


def _span(values: NDArray[Any]) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
