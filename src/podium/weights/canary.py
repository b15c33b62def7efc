# SPDX-License-Identifier: Apache-2.0
"""The canary: compares log-probs reported by an engine with the learner's for the same tokens; pure."""

# N trajectories · T tokens of all of them

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock
from podium.errors import DataError


def choose_canaries(block: TrajectoryBlock, version: int, count: int) -> Ints:
    """Rows of at most `count` trajectories whose sampled tokens are all of `version`. They are evenly spaced in
    ascending order of id, so that the same block always gives the same canaries."""
    offsets = block.offsets
    sampled_T, current_T = block.versions_T >= 0, block.versions_T == version
    num_sampled_N = _sums(sampled_T, offsets)
    fit_N = (num_sampled_N > 0) & (_sums(current_T, offsets) == num_sampled_N)
    rows: Ints = block.ids.order[fit_N[block.ids.order]]
    spaced = np.linspace(0, len(rows) - 1, max(0, min(count, len(rows)))).round().astype(np.int64)
    chosen: Ints = rows[spaced]
    return chosen


def _sums(mask_T: np.ndarray, offsets: Ints) -> Ints:
    total = np.concatenate([[0], np.cumsum(mask_T)])
    sums: Ints = (total[offsets[1:]] - total[offsets[:-1]]).astype(np.int64)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class GapLimits:
    """Limits above which a gap indicates an error."""

    mean: float
    largest: float  # of one token; infinite: not checked

    @classmethod
    def of(cls, dtype: Literal["float32", "bfloat16"]) -> GapLimits:
        """float32: engine and learner agree to 1e-4 on CPU by design; a mean of that size, or one token at ten times
        of it, is another computation and not another order of summing. bfloat16 keeps 8 bits, so a logit of 20 is
        known to 0.06 and single tokens are off by tenths; but the errors are of either sign over many tokens, and
        weights of one update earlier show as a mean well above 0.05."""
        if dtype == "float32":
            return cls(mean=1e-4, largest=1e-3)
        return cls(mean=0.05, largest=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """Δ = learner − behaviour log-prob over sampled tokens, as sums: those of several ranks add up to one."""

    count: int
    sum_abs: float
    sum_ratio: float  # of exp(Δ): its mean is 1 where the engine samples from what the learner computes
    largest: float

    @classmethod
    def between(cls, block: TrajectoryBlock, learner: TokenColumn) -> LogprobGap:
        """The gap over all sampled tokens except a trajectory's first, which nothing predicts."""
        if not learner.ids.same_as(block.ids):
            raise DataError(
                "the learner's log-probs are of other trajectories than the block, or in another order. Score the "
                "block that is compared."
            )
        compared_T = block.versions_T >= 0
        compared_T[block.offsets[:-1][block.lengths_N > 0]] = False
        behavior = block.behavior_logprobs_T[compared_T].astype(np.float64)
        delta = learner.values_T[compared_T].astype(np.float64) - behavior
        return cls(
            count=len(delta),
            sum_abs=float(np.abs(delta).sum()),
            sum_ratio=float(np.exp(np.clip(delta, -20, 20)).sum()),
            largest=float(np.abs(delta).max(initial=0.0)),
        )

    @classmethod
    def merge(cls, parts: Iterable[LogprobGap]) -> LogprobGap:
        """The gap over all parts together."""
        parts = list(parts)
        return cls(
            count=sum(part.count for part in parts),
            sum_abs=sum(part.sum_abs for part in parts),
            sum_ratio=sum(part.sum_ratio for part in parts),
            largest=float(np.max([part.largest for part in parts], initial=0.0)),  # NaN stays NaN
        )

    @property
    def mean(self) -> float:
        """Mean |Δ|; 0 if nothing was compared."""
        return self.sum_abs / self.count if self.count else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean probability ratio; 1 without tokens."""
        return self.sum_ratio / self.count if self.count else 1.0

    def alarm(self, limits: GapLimits) -> str | None:
        """A message if the gap exceeds its limits (or is NaN), else None."""
        if self.mean <= limits.mean and self.largest <= limits.largest:
            return None
        return (
            f"rollout and learner log-probs differ by {self.mean:.2g} in the mean (limit {limits.mean:.2g}) and "
            f"{self.largest:.2g} at most (limit {limits.largest:.2g}) over {self.count} tokens of the current weights; "
            f"the mean ratio is {self.mean_ratio:.4g}. The engine does not sample from the policy that is trained. "
            "Likely causes, the commonest first: the engine has other weights than it says, another temperature or a "
            "cut of the distribution (top-k, top-p) that the learner does not know, a cache kept over a weight update, "
            "other kernels or another dtype in one of them. Compare in float32 with `podium verify`; if the gap is "
            "rounding, raise the limit or switch on an off-policy correction."
        )
