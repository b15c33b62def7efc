# SPDX-License-Identifier: Apache-2.0
"""Statistics of an update and of its tokens, as sums that shards report and the controller merges. Torch-free: the
functions that compute them from tensors are beside the losses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from podium.algorithms.sums import LARGEST, Sums

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Whitening:
    """What makes the values of a step have mean 0 and variance 1: (value - shift) * scale."""

    shift: float
    scale: float

    def apply(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """The whitened values; 0 where the mask is not set."""
        return ((values_T.float() - self.shift) * self.scale).masked_fill(~mask_T.bool(), 0.0)


@dataclass(frozen=True, slots=True)
class Moments(Sums):
    """Count, sum and sum of squares of a shard's values, in float64; those of the step are the shards' sum."""

    count: float
    sum: float
    sum_squares: float

    @property
    def mean(self) -> float:
        """The mean; 0 of no values."""
        return self.sum / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """The unbiased variance; 0 of fewer than two values."""
        if self.count < 2:
            return 0.0
        # Rounding may put equal values a little below 0.
        return max(self.sum_squares - self.sum * self.mean, 0.0) / (self.count - 1)

    def whitening(self, eps: float = 1e-8) -> Whitening:
        """Equal values, and a single one, become 0."""
        return Whitening(shift=self.mean, scale=1 / math.sqrt(self.variance + eps))


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSampleSize(Sums):
    """Sums over weights; micro-batches and ranks merge by adding them up. `kept` counts the weights above 0."""

    count: float
    kept: float
    sum: float
    sum_squares: float

    @property
    def size(self) -> float:
        """As many equally weighted tokens would vary as little: (Σw)² / Σw²."""
        return self.sum**2 / self.sum_squares if self.sum_squares else 0.0

    @property
    def share(self) -> float:
        """The same over the number of tokens, dropped ones included."""
        return self.size / self.count if self.count else 0.0

    @property
    def mean(self) -> float:
        """The mean weight, dropped tokens included."""
        return self.sum / self.count if self.count else 0.0

    @property
    def dropped_fraction(self) -> float:
        """The share of tokens with weight 0."""
        return 1 - self.kept / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatistics(Sums):
    """Sums over trained tokens; micro-batches and ranks merge by adding them up.

    `clipped_high` and `clipped_low` count the tokens that lost their gradient to the pessimistic bound (ratio beyond
    the bound on the side that the advantage pushes to), `clipped_dual` those that lost it to the dual clip. `above`
    and `below` count ratios beyond the bounds whatever the advantage: what CISPO clips.
    """

    count: float
    clipped_high: float
    clipped_low: float
    clipped_dual: float
    above: float
    below: float
    sum_ratio: float
    sum_ratio_squared: float
    max_ratio: float = field(metadata=LARGEST)
    sum_kl_k1: float
    sum_kl_k3: float

    @property
    def clip_fraction(self) -> float:
        """The share of tokens without a gradient because of the pessimistic bound."""
        return self._share(self.clipped_high + self.clipped_low)

    @property
    def dual_clip_fraction(self) -> float:
        """The share of tokens without a gradient because of the dual clip."""
        return self._share(self.clipped_dual)

    @property
    def mean_ratio(self) -> float:
        """The mean ratio: near 1 while the policy is near the old one."""
        return self._share(self.sum_ratio)

    @property
    def effective_share(self) -> float:
        """The effective sample size over the number of tokens, (Σρ)² / (n Σρ²): 1 when all ratios are equal."""
        return self.sum_ratio**2 / (self.count * self.sum_ratio_squared) if self.sum_ratio_squared else 0.0

    @property
    def kl_k1(self) -> float:
        """KL of the old policy from this one over the old one's samples: unbiased, may come out negative."""
        return self._share(self.sum_kl_k1)

    @property
    def kl_k3(self) -> float:
        """The same by an estimator that is never negative and varies less."""
        return self._share(self.sum_kl_k3)

    def _share(self, part: float) -> float:
        return part / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStatistics(Sums):
    """Sums over trained tokens; micro-batches and ranks merge by adding them up. An error is the return - the value."""

    count: float
    sum_values: float
    sum_returns: float
    sum_returns_squared: float
    sum_errors: float
    sum_errors_squared: float
    clipped: float

    @property
    def explained_variance(self) -> float:
        """1 - Var(error) / Var(return): 1 is a perfect value function, 0 a constant. 0 where returns do not vary."""
        errors = Moments(self.count, self.sum_errors, self.sum_errors_squared)
        returns = Moments(self.count, self.sum_returns, self.sum_returns_squared)
        return 1 - errors.variance / returns.variance if returns.variance > 0 else 0.0

    @property
    def clip_fraction(self) -> float:
        """The share of tokens whose loss is that of the clipped value: they have no gradient."""
        return self.clipped / self.count if self.count else 0.0

    @property
    def mean_value(self) -> float:
        """The mean of the values."""
        return self.sum_values / self.count if self.count else 0.0

    @property
    def mean_return(self) -> float:
        """The mean of the returns."""
        return self.sum_returns / self.count if self.count else 0.0
