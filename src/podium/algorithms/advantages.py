# SPDX-License-Identifier: Apache-2.0
"""Advantages of whole trajectories, from their rewards and the group that each one belongs to.

A group is the set of trajectories that answer the same prompt. Groups may have any sizes and any int64 labels, and the
members of a group need not lie side by side. A group of one has nothing to be compared with and keeps its reward. A
group whose rewards are all equal has advantage exactly 0: nothing is to be learned from it.
"""

# N trajectories · G groups

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

STD_EPSILON: Final = 1e-6
# Rewards that are sums of parts differ by a few units in the last place where they should be equal (0.1 + 0.2 and
# 0.3). Divided by a standard deviation of the same size, such noise would become a signal of its own: a spread of up
# to this share of the group's largest magnitude (some 8 units in float32's last place) counts as none.
RELATIVE_SPREAD: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Groups:
    """What the members of a group share, already looked up for each trajectory; float64, as sums of many."""

    rewards_N: Tensor
    index_N: Tensor  # 0..G-1
    num_groups: int
    size_N: Tensor
    mean_N: Tensor
    alone_N: Tensor  # bool: the only one of its group
    equal_N: Tensor  # bool: one of several with the same reward

    def total_N(self, values_N: Tensor) -> Tensor:
        """The sum of `values_N` over the group of each trajectory."""
        return _group_totals(values_N, self.index_N, self.num_groups)[self.index_N]

    def settled(self, advantages_N: Tensor) -> Tensor:
        """The advantages, with the groups that are a case of their own set to what they get."""
        return advantages_N.masked_fill(self.equal_N, 0.0).where(~self.alone_N, self.rewards_N).float()


def group_relative(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """GRPO: (R - mean) / (std + 1e-6) within the group, with the unbiased standard deviation."""
    groups = _groups_of(rewards_N, group_N)
    centered_N = groups.rewards_N - groups.mean_N
    std_N = (groups.total_N(centered_N.square()) / (groups.size_N - 1).clamp(min=1)).sqrt()
    return groups.settled(centered_N / (std_N + STD_EPSILON))


def group_centered(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """Dr.GRPO, and REINFORCE++ with baseline before it is whitened: R - mean within the group."""
    groups = _groups_of(rewards_N, group_N)
    return groups.settled(groups.rewards_N - groups.mean_N)


def leave_one_out(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """RLOO: R minus the mean of the *other* members, which is n / (n - 1) times R minus the mean of all."""
    groups = _groups_of(rewards_N, group_N)
    scale_N = groups.size_N / (groups.size_N - 1).clamp(min=1)
    return groups.settled(scale_N * (groups.rewards_N - groups.mean_N))


def length_weighted(rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
    """OPO: R minus the group's mean reward weighted by `lengths_N`, the numbers of sampled tokens."""
    groups = _groups_of(rewards_N, group_N)
    lengths_N = lengths_N.double()
    # A group without any sampled token has no gradient; its baseline must only not be 0 / 0.
    baseline_N = groups.total_N(lengths_N * groups.rewards_N) / groups.total_N(lengths_N).clamp(min=1)
    return groups.settled(groups.rewards_N - baseline_N)


def _groups_of(rewards_N: Tensor, group_N: Tensor) -> _Groups:
    rewards_N = rewards_N.detach().double()
    labels_G, index_N = torch.unique(group_N, return_inverse=True)
    num_groups = len(labels_G)
    size_N = torch.bincount(index_N, minlength=num_groups)[index_N].double()
    low_N, high_N = (_group_extremes(rewards_N, index_N, num_groups, which)[index_N] for which in ("amin", "amax"))
    tolerance_N = RELATIVE_SPREAD * torch.maximum(low_N.abs(), high_N.abs())
    alone_N = size_N == 1
    return _Groups(
        rewards_N=rewards_N,
        index_N=index_N,
        num_groups=num_groups,
        size_N=size_N,
        mean_N=_group_totals(rewards_N, index_N, num_groups)[index_N] / size_N,
        alone_N=alone_N,
        equal_N=(high_N - low_N <= tolerance_N) & ~alone_N,
    )


def _group_totals(values_N: Tensor, index_N: Tensor, num_groups: int) -> Tensor:
    return values_N.new_zeros(num_groups).index_add(0, index_N, values_N)


def _group_extremes(values_N: Tensor, index_N: Tensor, num_groups: int, which: str) -> Tensor:
    return values_N.new_zeros(num_groups).scatter_reduce(0, index_N, values_N, which, include_self=False)
