# SPDX-License-Identifier: Apache-2.0
"""How far the policy is from a reference, estimated from the log-probs of the tokens that it sampled. Torch-free to
import: the controller adapts the coefficient."""

# S trained tokens

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, assert_never

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3", "k3_straight"]

# k3 holds exp(-d): with d within these bounds it is at most 4.9e8. Beyond them k3 is flat, k1 and k2 are as always.
DIFFERENCE_LIMIT: Final = 20.0
# The largest share by which the coefficient's controller takes the observed KL to be off its target.
LARGEST_ERROR: Final = 0.2


def kl_estimate(logprobs_S: Tensor, reference_S: Tensor, estimator: KlEstimator = "k3_straight") -> Tensor:
    """KL of the policy from the reference, estimated at each token, with d = log p - log p_ref.

    k1 = d is unbiased and noisy, and the expectation of its gradient is 0: of use as a part of the reward, not as a
    loss. k2 = d²/2 has a biased value and the right gradient. k3 = exp(-d) - 1 + d is unbiased, never negative and
    quiet, with a biased gradient. "k3_straight" has the value of k3 and the gradient of k2.
    """
    difference_S = logprobs_S.float() - reference_S.detach().float()
    match estimator:
        case "k1":
            return difference_S
        case "k2":
            return _k2(difference_S)
        case "k3":
            return _k3(difference_S)
        case "k3_straight":
            k2_S = _k2(difference_S)
            return _k3(difference_S.detach()) + (k2_S - k2_S.detach())
        case other:
            assert_never(other)


def adaptive_coefficient(beta: float, observed: float, *, target: float, horizon: float, count: int) -> float:
    """The coefficient after `count` more trajectories with KL `observed`: it grows while that is above `target`."""
    error = min(max(observed / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return beta * (1 + error * count / horizon)


def _k2(difference_S: Tensor) -> Tensor:
    return difference_S.square() / 2


def _k3(difference_S: Tensor) -> Tensor:
    difference_S = difference_S.clamp(-DIFFERENCE_LIMIT, DIFFERENCE_LIMIT)
    # expm1: near 0, where a healthy run is, exp(-d) - 1 would leave no more than rounding.
    return (-difference_S).expm1() + difference_S
