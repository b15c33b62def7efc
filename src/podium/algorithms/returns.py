# SPDX-License-Identifier: Apache-2.0
"""Returns and advantages of single tokens, and the moments that whiten them over a whole step.

The tokens of all trajectories lie end to end; trajectory n has those from `offsets[n]` up to `offsets[n + 1]`.
`mask_T` is true at trained tokens. The others (tool output, environment text) are no steps of the policy: value,
return and advantage pass through them unchanged and undiscounted, as if they were not there, and the results hold 0
at them. A reward that stands at such a token is therefore lost: rewards belong at trained tokens, a trajectory's own
reward at its last trained one.
"""

# T tokens of N trajectories · S those of them that are trained

from __future__ import annotations

import torch
from torch import Tensor

from podium.algorithms.statistics import Moments


def moments_of(values_T: Tensor, mask_T: Tensor) -> Moments:
    """The moments of the values where the mask is set."""
    values_S = values_T.detach().double()[mask_T.bool()]
    # One transfer from the device, not two.
    total, total_squares = torch.stack([values_S.sum(), values_S.square().sum()]).tolist()
    return Moments(float(values_S.numel()), total, total_squares)


def rewards_to_go(rewards_T: Tensor, mask_T: Tensor, offsets: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each trained token to the end of its trajectory (REINFORCE++, ReMax)."""
    trained_T = mask_T.bool()
    sequence_S = _sequence_of_tokens(offsets)[trained_T]
    returns_S = _discounted_sums(rewards_T.detach().float()[trained_T], sequence_S, gamma)
    return _spread(returns_S, trained_T)


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, offsets: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates, not whitened, and the returns A + V that the value function is to learn.

    A trajectory ends where it ends: the value after its last trained token is 0.
    """
    trained_T = mask_T.bool()
    sequence_S = _sequence_of_tokens(offsets)[trained_T]
    rewards_S = rewards_T.detach().float()[trained_T]
    values_S = values_T.detach().float()[trained_T]
    deltas_S = rewards_S + gamma * _following(values_S, sequence_S, 1) - values_S
    advantages_S = _discounted_sums(deltas_S, sequence_S, gamma * lam)
    return _spread(advantages_S, trained_T), _spread(advantages_S + values_S, trained_T)


def _sequence_of_tokens(offsets: Tensor) -> Tensor:
    """The trajectory of each token, 0..N-1."""
    lengths_N = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths_N), device=offsets.device), lengths_N)


def _discounted_sums(values_S: Tensor, sequence_S: Tensor, discount: float) -> Tensor:
    """For each token, the sum of discount^k times the value k tokens on, to the end of its trajectory.

    The window of tokens that a sum covers doubles at each pass, so that a step of long trajectories takes some fifteen
    passes over all tokens, where walking back from the ends would take one pass per position.
    """
    longest = int(torch.bincount(sequence_S).max()) if len(sequence_S) else 0
    width = 1
    while width < longest:
        values_S = values_S + discount**width * _following(values_S, sequence_S, width)
        width *= 2
    return values_S


def _following(values_S: Tensor, sequence_S: Tensor, distance: int) -> Tensor:
    """The value `distance` trained tokens on in the same trajectory, or 0 past its end."""
    following_S = torch.zeros_like(values_S)
    same = sequence_S[distance:] == sequence_S[:-distance]
    following_S[:-distance] = values_S[distance:].masked_fill(~same, 0.0)
    return following_S


def _spread(values_S: Tensor, trained_T: Tensor) -> Tensor:
    """The values at the trained tokens, 0 at the others."""
    values_T = values_S.new_zeros(trained_T.shape)
    values_T[trained_T] = values_S
    return values_T
