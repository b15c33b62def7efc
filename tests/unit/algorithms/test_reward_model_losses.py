# SPDX-License-Identifier: Apache-2.0
"""Losses of models that score, and how well their scores are calibrated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.algorithms.reward_models import (
    CalibrationBins,
    RegressionStatistics,
    bradley_terry,
    brier_score,
    calibration_bins,
    expected_calibration_error,
    pair_confidences,
    regression,
    regression_statistics,
)


def test_bradley_terry_is_the_logistic_loss_of_the_difference() -> None:
    loss_R = bradley_terry(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]))
    # log(1 + exp(-1)), log(1 + exp(1)), log 2
    assert loss_R.tolist() == pytest.approx([0.3132617, 1.3132617, 0.6931472], abs=1e-6)


def test_a_margin_asks_for_a_larger_lead() -> None:
    loss_R = bradley_terry(torch.tensor([1.5]), torch.tensor([0.0]), torch.tensor([0.5]))
    assert loss_R.item() == pytest.approx(0.3132617, abs=1e-6)


def test_centring_charges_the_level_that_a_pair_does_not_see() -> None:
    chosen_R, rejected_R = torch.tensor([3.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    loss_R = bradley_terry(chosen_R, rejected_R, center=0.01)
    # 0.3132617 + 0.01 * 25; its gradient is 2 * 0.01 * 5 on both sides, beside ∓sigmoid(-1) = ∓0.2689414.
    assert loss_R.item() == pytest.approx(0.5632617, abs=1e-6)
    loss_R.sum().backward()
    assert chosen_R.grad is not None
    assert rejected_R.grad is not None
    assert chosen_R.grad.item() == pytest.approx(0.1 - 0.2689414, abs=1e-6)
    assert rejected_R.grad.item() == pytest.approx(0.1 + 0.2689414, abs=1e-6)


def test_the_gradient_agrees_with_finite_differences() -> None:
    leaves = [torch.tensor(column, dtype=torch.float64, requires_grad=True) for column in ([0.3, -2.0], [1.0, 0.5])]
    margin_R = torch.tensor([0.25, 1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *sides: bradley_terry(*sides, margin_R, center=0.1), leaves)
    assert torch.autograd.gradcheck(lambda scores_R: regression(scores_R, margin_R), leaves[:1])


def test_scores_far_apart_give_finite_losses() -> None:
    chosen_R, rejected_R = torch.tensor([-1e4, 1e4], requires_grad=True), torch.tensor([1e4, -1e4])
    loss_R = bradley_terry(chosen_R, rejected_R)
    assert loss_R.tolist() == [2e4, 0.0]
    loss_R.sum().backward()
    assert chosen_R.grad is not None
    assert chosen_R.grad.tolist() == [-1.0, 0.0]


def test_regression_is_the_whole_squared_error() -> None:
    scores_R, targets_R = torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([3.0, 0.5], requires_grad=True)
    loss_R = regression(scores_R, targets_R)
    assert loss_R.tolist() == [4.0, 0.25]
    loss_R.sum().backward()
    assert scores_R.grad is not None
    assert scores_R.grad.tolist() == [-4.0, -1.0]
    assert targets_R.grad is None


def test_losses_of_bfloat16_are_float32() -> None:
    scores_R = torch.ones(2, dtype=torch.bfloat16)
    assert bradley_terry(scores_R, scores_R, scores_R, center=0.1).dtype == torch.float32
    assert regression(scores_R, scores_R).dtype == torch.float32


def test_a_column_beside_a_row_is_refused_rather_than_broadcast() -> None:
    row, column = torch.zeros(3), torch.zeros(3, 1)
    with pytest.raises(AssertionError, match="shape"):
        bradley_terry(row, column)
    with pytest.raises(AssertionError, match="shape"):
        bradley_terry(row, row, column)
    with pytest.raises(AssertionError, match="shape"):
        regression(row, column)
    with pytest.raises(AssertionError, match="shape"):
        calibration_bins(row, column)


def test_a_pairs_confidence_is_in_the_side_that_scores_higher() -> None:
    confidence_R, correct_R = pair_confidences(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]))
    # sigmoid(1) both times: right once, wrong once; nothing preferred is half right, at even odds.
    assert confidence_R.tolist() == pytest.approx([0.7310586, 0.7310586, 0.5], abs=1e-6)
    assert correct_R.tolist() == [1.0, 0.0, 0.5]


def test_a_model_that_prefers_nothing_is_calibrated_and_no_better_than_a_coin() -> None:
    bins = calibration_bins(*pair_confidences(torch.zeros(4), torch.zeros(4)))
    assert expected_calibration_error(bins) == 0.0
    assert brier_score(bins) == 0.25


def test_calibration_by_hand() -> None:
    bins = calibration_bins(torch.tensor([0.1, 0.3, 0.6, 0.8, 1.0]), torch.tensor([0, 1, 1, 1, 0]), num_bins=2)
    assert bins.counts == (2.0, 3.0)
    assert bins.sum_probabilities == pytest.approx((0.4, 2.4))
    assert bins.sum_outcomes == (1.0, 2.0)
    # Bin means 0.2 against 0.5, 0.8 against 2/3: (2 * 0.3 + 3 * 2/15) / 5 = 0.2.
    assert expected_calibration_error(bins) == pytest.approx(0.2, abs=1e-7)
    # 0.01 + 0.49 + 0.16 + 0.04 + 1, over 5
    assert brier_score(bins) == pytest.approx(0.34, abs=1e-7)


def test_a_probability_on_a_boundary_belongs_to_the_upper_bin_and_one_to_the_last() -> None:
    bins = calibration_bins(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), torch.ones(5), num_bins=4)
    assert bins.counts == (1.0, 1.0, 1.0, 2.0)


def test_what_is_right_as_often_as_it_says_is_calibrated() -> None:
    bins = calibration_bins(torch.full((4,), 0.75), torch.tensor([True, True, True, False]))
    assert expected_calibration_error(bins) == pytest.approx(0.0, abs=1e-12)
    # Three times 1/16 and once 9/16
    assert brier_score(bins) == pytest.approx(0.1875)


def test_no_predictions_have_no_error() -> None:
    empty = calibration_bins(torch.zeros(0), torch.zeros(0), num_bins=3)
    assert empty.counts == (0.0, 0.0, 0.0)
    assert expected_calibration_error(empty) == brier_score(empty) == 0.0
    assert expected_calibration_error(CalibrationBins.merge([])) == 0.0


def test_bins_of_another_number_are_not_added() -> None:
    with pytest.raises(ValueError, match="zip"):
        calibration_bins(torch.zeros(1), torch.zeros(1), 3) + calibration_bins(torch.zeros(1), torch.zeros(1), 4)


@given(rows=st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), max_size=30), cut=st.integers(0, 30))
def test_two_micro_batches_of_predictions_add_up_to_the_whole(rows: list[tuple[float, bool]], cut: int) -> None:
    probabilities_R = torch.tensor([row[0] for row in rows])
    outcomes_R = torch.tensor([row[1] for row in rows])
    whole = calibration_bins(probabilities_R, outcomes_R)
    first, second = (calibration_bins(probabilities_R[part], outcomes_R[part]) for part in (slice(cut), slice(cut, 99)))
    merged = first + second
    assert merged == second + first
    assert merged.counts == whole.counts
    assert expected_calibration_error(merged) == pytest.approx(expected_calibration_error(whole), abs=1e-12)
    assert brier_score(merged) == pytest.approx(brier_score(whole), abs=1e-12)


def test_correlation_and_r_squared_by_hand() -> None:
    # Scores 1, 2, 3 (scatter 2), targets 0, 2, 1 (scatter 2), products of deviations 1: correlation 1/2.
    statistics = regression_statistics(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 1.0]))
    assert statistics.correlation == pytest.approx(0.5)
    # Errors 1, 0, 2
    assert statistics.mean_squared_error == pytest.approx(5 / 3)
    assert statistics.r_squared == pytest.approx(1 - 5 / 2)


def test_scores_on_a_line_correlate_fully_whatever_their_scale() -> None:
    targets_R = torch.tensor([0.1, 0.7, -3.0])
    assert regression_statistics(5 - 2 * targets_R, targets_R).correlation == pytest.approx(-1.0)
    same = regression_statistics(targets_R, targets_R)
    assert same.correlation == pytest.approx(1.0)
    assert same.r_squared == 1.0


@pytest.mark.parametrize("targets", [[], [0.1], [0.1, 0.1, 0.1]])
def test_targets_that_do_not_vary_are_not_explained_and_not_nan(targets: list[float]) -> None:
    targets_R = torch.tensor(targets)
    statistics = regression_statistics(torch.arange(len(targets)).float(), targets_R)
    assert statistics.correlation == statistics.r_squared == 0.0
    assert regression_statistics(targets_R, torch.arange(len(targets)).float()).correlation == 0.0


@given(
    rows=st.lists(st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32)), min_size=3, max_size=30),
    cut=st.integers(0, 30),
)
def test_merged_regressions_agree_with_torch_on_the_whole(rows: list[tuple[float, float]], cut: int) -> None:
    columns = torch.tensor(rows, dtype=torch.float64).T
    parts = [regression_statistics(*columns[:, part]) for part in (slice(cut), slice(cut, 99))]
    merged = RegressionStatistics.merge(parts)
    assert merged == RegressionStatistics.merge(reversed(parts))
    if columns.var(dim=1).min() > 1e-3:
        assert merged.correlation == pytest.approx(torch.corrcoef(columns)[0, 1].item(), abs=1e-9)
        assert math.isclose(merged.mean_squared_error, (columns[0] - columns[1]).square().mean().item(), abs_tol=1e-12)
