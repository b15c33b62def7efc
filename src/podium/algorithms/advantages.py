# SPDX-License-Identifier: Apache-2.0
"""Advantages of whole trajectories, from their rewards and the group that each one belongs to.

A group is the set of trajectories that answer the same prompt. Groups may have any sizes and any int64 labels, and the
members of a group need not lie side by side. A group of one has nothing to be compared with and keeps its reward. A
group whose rewards are all equal has advantage exactly 0: nothing is to be learned from it. Torch-free: the controller
computes them.
"""

# N trajectories · G groups

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_EPSILON: Final = 1e-6
# Rewards that are sums of parts differ by a few units in the last place where they should be equal (0.1 + 0.2 and
# 0.3). Divided by a standard deviation of the same size, such noise would become a signal of its own: a spread of up
# to this share of the group's largest magnitude (some 8 units in float32's last place) counts as none.
RELATIVE_SPREAD: Final = 1e-6


Floats = NDArray[np.float64]
Advantages = NDArray[np.float32]

# A reward that is not finite makes its own group NaN, without a warning.
_not_finite_is_nan = np.errstate(invalid="ignore")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Groups:
    """What the members of a group share, already looked up for each trajectory; float64, as sums of many."""

    rewards_N: Floats
    index_N: NDArray[np.int64]  # 0..G-1
    num_groups: int
    size_N: Floats
    mean_N: Floats
    alone_N: NDArray[np.bool_]  # the only one of its group
    equal_N: NDArray[np.bool_]  # one of several with the same reward

    def total_N(self, values_N: Floats) -> Floats:
        """The sum of `values_N` over the group of each trajectory."""
        return _group_totals(values_N, self.index_N, self.num_groups)[self.index_N]

    def settled(self, advantages_N: Floats) -> Advantages:
        """The advantages, with the groups that are a case of their own set to what they get."""
        compared_N = np.where(self.equal_N, 0.0, advantages_N)
        return np.where(self.alone_N, self.rewards_N, compared_N).astype(np.float32)


@_not_finite_is_nan
def group_relative(rewards_N: ArrayLike, group_N: ArrayLike) -> Advantages:
    """GRPO: (R - mean) / (std + 1e-6) within the group, with the unbiased standard deviation."""
    groups = _groups_of(rewards_N, group_N)
    centered_N = groups.rewards_N - groups.mean_N
    std_N = np.sqrt(groups.total_N(np.square(centered_N)) / _others(groups))
    return groups.settled(centered_N / (std_N + STD_EPSILON))


@_not_finite_is_nan
def group_centered(rewards_N: ArrayLike, group_N: ArrayLike) -> Advantages:
    """Dr.GRPO, and REINFORCE++ with baseline before it is whitened: R - mean within the group."""
    groups = _groups_of(rewards_N, group_N)
    return groups.settled(groups.rewards_N - groups.mean_N)


@_not_finite_is_nan
def leave_one_out(rewards_N: ArrayLike, group_N: ArrayLike) -> Advantages:
    """RLOO: R minus the mean of the *other* members, which is n / (n - 1) times R minus the mean of all."""
    groups = _groups_of(rewards_N, group_N)
    return groups.settled(groups.size_N / _others(groups) * (groups.rewards_N - groups.mean_N))


@_not_finite_is_nan
def length_weighted(rewards_N: ArrayLike, group_N: ArrayLike, lengths_N: ArrayLike) -> Advantages:
    """OPO: R minus the group's mean reward weighted by `lengths_N`, the numbers of sampled tokens."""
    groups = _groups_of(rewards_N, group_N)
    weights_N = np.asarray(lengths_N, np.float64)
    # A group without any sampled token has no gradient; its baseline must only not be 0 / 0.
    baseline_N = groups.total_N(weights_N * groups.rewards_N) / np.maximum(groups.total_N(weights_N), 1.0)
    return groups.settled(groups.rewards_N - baseline_N)


def _groups_of(rewards: ArrayLike, labels: ArrayLike) -> _Groups:
    rewards_N = np.asarray(rewards, np.float64)
    labels_G, index_N = np.unique(np.asarray(labels), return_inverse=True)
    num_groups = len(labels_G)
    size_N = np.bincount(index_N, minlength=num_groups)[index_N].astype(np.float64)
    low_G, high_G = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low_G, index_N, rewards_N)
    np.maximum.at(high_G, index_N, rewards_N)
    low_N, high_N = low_G[index_N], high_G[index_N]
    alone_N = size_N == 1
    tolerance_N = RELATIVE_SPREAD * np.maximum(np.abs(low_N), np.abs(high_N))
    return _Groups(
        rewards_N=rewards_N,
        index_N=index_N,
        num_groups=num_groups,
        size_N=size_N,
        mean_N=_group_totals(rewards_N, index_N, num_groups)[index_N] / size_N,
        alone_N=alone_N,
        equal_N=(high_N - low_N <= tolerance_N) & ~alone_N,
    )


def _others(groups: _Groups) -> Floats:
    """How many others the group of each trajectory has; 1 where it has none."""
    return np.maximum(groups.size_N - 1, 1.0)


def _group_totals(values_N: Floats, index_N: NDArray[np.int64], num_groups: int) -> Floats:
    totals_G: Floats = np.bincount(index_N, values_N, num_groups).astype(np.float64)  # integers if there are none
    return totals_G
