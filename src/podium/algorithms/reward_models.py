# SPDX-License-Identifier: Apache-2.0
"""Losses of a model that scores completions, per row, and how well its scores keep what they promise."""

# R rows: pairs of completions, or single ones with a target · B bins

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from podium.algorithms.logarithms import widened
from podium.algorithms.preferences import preferred
from podium.algorithms.sums import Sums, total


def bradley_terry(
    chosen_R: Tensor, rejected_R: Tensor, margin_R: Tensor | None = None, *, center: float = 0.0
) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + center (chosen + rejected)².

    A pair says nothing about the level of the scores; `center` draws it to 0.
    """
    _assert_alike(chosen_R, rejected_R, *([] if margin_R is None else [margin_R]))
    chosen_R, rejected_R = widened(chosen_R), widened(rejected_R)
    lead_R = chosen_R - rejected_R
    if margin_R is not None:
        lead_R = lead_R - widened(margin_R.detach())
    loss_R = -logsigmoid(lead_R)
    return loss_R + center * (chosen_R + rejected_R).square() if center else loss_R


def regression(scores_R: Tensor, targets_R: Tensor) -> Tensor:
    """The squared error, not halved."""
    _assert_alike(scores_R, targets_R)
    return (widened(scores_R) - widened(targets_R.detach())).square()


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBins:
    """Predictions sorted into bins of equal width by their probability, as sums per bin; shards merge by adding."""

    counts: tuple[float, ...]
    sum_probabilities: tuple[float, ...]
    sum_outcomes: tuple[float, ...]
    sum_squared_errors: tuple[float, ...]

    def __add__(self, other: CalibrationBins) -> CalibrationBins:
        return CalibrationBins.merge((self, other))

    @classmethod
    def merge(cls, parts: Iterable[CalibrationBins]) -> CalibrationBins:
        """All shards as one; of no shards, no bins. The order of `parts` changes no bit."""
        shards = tuple(parts)

        def added(columns: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
            # strict: shards with another number of bins are another statistic.
            return tuple(map(total, zip(*columns, strict=True)))

        return cls(
            counts=added(shard.counts for shard in shards),
            sum_probabilities=added(shard.sum_probabilities for shard in shards),
            sum_outcomes=added(shard.sum_outcomes for shard in shards),
            sum_squared_errors=added(shard.sum_squared_errors for shard in shards),
        )


def pair_confidences(chosen_R: Tensor, rejected_R: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pair, the probability (at least 0.5) of the side that the scores prefer, and whether that is the chosen.

    Which side is called chosen is known beforehand, so its own probability has nothing to be calibrated against. Equal
    scores prefer neither side, and are half right.
    """
    lead_R = widened(chosen_R.detach()) - widened(rejected_R.detach())
    return torch.sigmoid(lead_R.abs()), preferred(chosen_R, rejected_R)


def calibration_bins(probabilities_R: Tensor, outcomes_R: Tensor, num_bins: int = 10) -> CalibrationBins:
    """The sums of a micro-batch; `outcomes_R` is 1 or true where what was predicted came about, 0.5 of a tie. Bin b of
    B has [b/B, (b+1)/B), the last one also 1."""
    _assert_alike(probabilities_R, outcomes_R)
    with torch.no_grad():
        probabilities_R, outcomes_R = probabilities_R.double(), outcomes_R.double()
        bin_R = (probabilities_R * num_bins).long().clamp(0, num_bins - 1)
        # Of an outcome that is half one and half the other, the mean of both errors.
        errors_R = outcomes_R * (1 - probabilities_R).square() + (1 - outcomes_R) * probabilities_R.square()
        columns_4R = torch.stack([torch.ones_like(outcomes_R), probabilities_R, outcomes_R, errors_R])
        # One transfer from the device for all of them.
        sums_4B = columns_4R.new_zeros(4, num_bins).index_add(1, bin_R, columns_4R).tolist()
    counts, probabilities, outcomes, errors = map(tuple, sums_4B)
    return CalibrationBins(
        counts=counts, sum_probabilities=probabilities, sum_outcomes=outcomes, sum_squared_errors=errors
    )


def expected_calibration_error(bins: CalibrationBins) -> float:
    """The mean distance, over predictions, of their bin's mean probability from its share of outcomes; 0 of none."""
    count = total(bins.counts)
    gaps = [abs(left - right) for left, right in zip(bins.sum_probabilities, bins.sum_outcomes, strict=True)]
    # A bin's share of predictions times its gap of means is its gap of sums over the number of all.
    return total(gaps) / count if count else 0.0


def brier_score(bins: CalibrationBins) -> float:
    """The mean squared distance of the probability from the outcome: 0.25 of one that always says 0.5; 0 of none."""
    count = total(bins.counts)
    return total(bins.sum_squared_errors) / count if count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionStatistics(Sums):
    """Sums over rows with a target; micro-batches and ranks merge by adding them up."""

    count: float
    sum_scores: float
    sum_targets: float
    sum_scores_squared: float
    sum_targets_squared: float
    sum_products: float
    sum_errors_squared: float

    @property
    def mean_squared_error(self) -> float:
        """The loss."""
        return self.sum_errors_squared / self.count if self.count else 0.0

    @property
    def correlation(self) -> float:
        """Pearson's, in [-1, 1]; 0 where scores or targets do not vary."""
        spread = math.sqrt(self._scatter(self.sum_scores_squared, self.sum_scores) * self._target_scatter)
        if not spread > 0:
            return 0.0
        products = self.sum_products - self.sum_scores * self.sum_targets / self.count
        return min(max(products / spread, -1.0), 1.0)

    @property
    def r_squared(self) -> float:
        """1 - squared errors over those of the targets' mean: 1 is perfect, negative is worse than that mean; 0 where
        targets do not vary."""
        scatter = self._target_scatter
        return 1 - self.sum_errors_squared / scatter if scatter > 0 else 0.0

    @property
    def _target_scatter(self) -> float:
        return self._scatter(self.sum_targets_squared, self.sum_targets)

    def _scatter(self, squares: float, whole: float) -> float:
        scatter = squares - whole * whole / self.count if self.count else 0.0
        # Of equal values, rounding leaves a little on either side of 0.
        return scatter if scatter > 1e-12 * squares else 0.0


def regression_statistics(scores_R: Tensor, targets_R: Tensor) -> RegressionStatistics:
    """What the scores of a micro-batch look like beside their targets."""
    _assert_alike(scores_R, targets_R)
    with torch.no_grad():
        scores_R, targets_R = scores_R.double(), targets_R.double()
        parts = [
            scores_R,
            targets_R,
            scores_R.square(),
            targets_R.square(),
            scores_R * targets_R,
            (scores_R - targets_R).square(),
        ]
        # One transfer from the device for all of them.
        sums = torch.stack([part.sum() for part in parts]).tolist()
    return RegressionStatistics(
        count=float(scores_R.numel()),
        sum_scores=sums[0],
        sum_targets=sums[1],
        sum_scores_squared=sums[2],
        sum_targets_squared=sums[3],
        sum_products=sums[4],
        sum_errors_squared=sums[5],
    )


def _assert_alike(*parts: Tensor) -> None:
    # [R, 1] beside [R] would broadcast to [R, R] without a word.
    shapes = {tuple(part.shape) for part in parts}
    assert len(shapes) == 1, f"tensors of one row each differ in shape: {shapes}"
