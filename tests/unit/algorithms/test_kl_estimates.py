# SPDX-License-Identifier: Apache-2.0
"""KL estimators, their gradients, and the coefficient that follows a target."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.algorithms.kl import KlEstimator, adaptive_coefficient, kl_estimate

every_estimator = pytest.mark.parametrize("estimator", get_args(KlEstimator))


def value_and_gradient(difference: float, estimator: KlEstimator) -> tuple[float, float]:
    logprobs_S = torch.tensor([difference - 3.0], requires_grad=True)
    estimate_S = kl_estimate(logprobs_S, torch.tensor([-3.0]), estimator)
    estimate_S.sum().backward()
    assert logprobs_S.grad is not None
    return estimate_S.item(), logprobs_S.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k3_straight", math.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_estimators_by_hand(estimator: KlEstimator, value: float, gradient: float) -> None:
    assert value_and_gradient(0.5, estimator) == pytest.approx((value, gradient))


def test_the_straight_through_estimator_is_what_one_gets_without_asking() -> None:
    logprobs_S = torch.tensor([-1.0], requires_grad=True)
    estimate_S = kl_estimate(logprobs_S, torch.tensor([-3.0]))
    estimate_S.sum().backward()
    assert estimate_S.item() == pytest.approx(math.exp(-2) + 1)
    assert logprobs_S.grad is not None
    assert logprobs_S.grad.item() == 2.0


@every_estimator
def test_a_policy_at_its_reference_has_no_divergence(estimator: KlEstimator) -> None:
    assert value_and_gradient(0.0, estimator)[0] == 0.0


@every_estimator
@pytest.mark.parametrize("difference", [-1e4, 1e4])
def test_tokens_that_one_of_the_two_never_says_give_numbers(estimator: KlEstimator, difference: float) -> None:
    assert all(map(math.isfinite, value_and_gradient(difference, estimator)))


def test_a_small_difference_is_not_lost_to_rounding() -> None:
    # d²/2 - d³/6; exp(-d) - 1 in float32 would be off by several per cent.
    estimate_S = kl_estimate(torch.tensor([1e-3]), torch.tensor([0.0]), "k3")
    assert estimate_S.item() == pytest.approx(5e-7 - 1e-9 / 6, rel=1e-3)


@given(difference=st.floats(-30, 30, width=32))
def test_k2_and_k3_are_never_negative(difference: float) -> None:
    logprobs_S, reference_S = torch.tensor([difference]), torch.zeros(1)
    assert kl_estimate(logprobs_S, reference_S, "k2").item() >= 0.0
    assert kl_estimate(logprobs_S, reference_S, "k3").item() >= -1e-9


def test_k1_and_k3_have_the_divergence_as_their_mean_and_only_k2_has_its_gradient() -> None:
    """Exact expectations over a small vocabulary: no sampling."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.0, 0.5, -0.5, 0.2], dtype=torch.float64).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    exact = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    (exact_gradient_V,) = torch.autograd.grad(exact, logits_V, retain_graph=True)

    def mean_and_gradient(estimator: KlEstimator) -> tuple[float, torch.Tensor]:
        mean = (logprobs_V.exp().detach() * kl_estimate(logprobs_V, reference_V, estimator)).sum()
        (gradient_V,) = torch.autograd.grad(mean, logits_V, retain_graph=True)
        return mean.item(), gradient_V

    for estimator in ("k1", "k3", "k3_straight"):
        assert mean_and_gradient(estimator)[0] == pytest.approx(exact.item(), rel=1e-5)
    for estimator in ("k2", "k3_straight"):
        torch.testing.assert_close(mean_and_gradient(estimator)[1], exact_gradient_V, rtol=1e-5, atol=1e-6)
    assert mean_and_gradient("k1")[1].abs().max() < 1e-6
    assert not torch.allclose(mean_and_gradient("k3")[1], exact_gradient_V, rtol=1e-2)


def test_the_coefficient_grows_above_the_target_and_shrinks_below_by_a_bounded_share() -> None:
    # Twice the target counts as 20 % too much: 1 + 0.2 * 100 / 1000.
    assert adaptive_coefficient(0.5, 0.2, target=0.1, horizon=1000, count=100) == pytest.approx(0.51)
    assert adaptive_coefficient(0.5, 0.0, target=0.1, horizon=1000, count=100) == pytest.approx(0.49)
    assert adaptive_coefficient(0.5, 0.11, target=0.1, horizon=1000, count=100) == pytest.approx(0.505)
    assert adaptive_coefficient(0.5, 0.1, target=0.1, horizon=1000, count=100) == 0.5
