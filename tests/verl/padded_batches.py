# SPDX-License-Identifier: Apache-2.0
"""Random steps of training, laid end to end as Podium has them and padded to a rectangle as verl has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# T tokens · N trajectories · L longest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Trajectories in uneven groups, with tokens in their middle that are not trained."""

    lengths_N: Tensor
    group_N: Tensor
    rewards_N: Tensor
    mask_T: Tensor
    offsets: Tensor
    generator: torch.Generator

    @property
    def num_sequences(self) -> int:
        return len(self.lengths_N)

    @property
    def sequence_T(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths_N)

    @property
    def trained_N(self) -> Tensor:
        """How many trained tokens each trajectory has: at least its last."""
        return torch.bincount(self.sequence_T[self.mask_T], minlength=self.num_sequences)

    @property
    def labels(self) -> np.ndarray:
        """verl's groups are strings."""
        return np.array([f"prompt-{label}" for label in self.group_N.tolist()], dtype=object)

    def noise_T(self, scale: float = 1.0) -> Tensor:
        return torch.randn(int(self.offsets[-1]), generator=self.generator) * scale

    def token_rewards_T(self) -> Tensor:
        """Each trajectory's reward at its last token, which is trained."""
        rewards_T = torch.zeros(int(self.offsets[-1]))
        rewards_T[self.offsets[1:] - 1] = self.rewards_N
        return rewards_T

    def padded(self, values_T: Tensor, fill: float = 0.0) -> Tensor:
        """[N, L]; gradients pass through."""
        columns_T = torch.arange(len(values_T)) - self.offsets[self.sequence_T]
        rectangle = torch.full((self.num_sequences, int(self.lengths_N.max())), fill, dtype=values_T.dtype)
        return rectangle.index_put((self.sequence_T, columns_T), values_T)

    def flat(self, rectangle: Tensor) -> Tensor:
        return rectangle[torch.arange(rectangle.shape[1]) < self.lengths_N[:, None]]

    @property
    def mask_NL(self) -> Tensor:
        return self.padded(self.mask_T.float())


def random_step(seed: int) -> Step:
    """Groups of 1 to 6, of which one has no spread and one has rewards of 0 and 1, in a shuffled order."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    sizes = [1, 4, 4, *integers(1, 7, 4).tolist()]
    group_N = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rewards_N = torch.randn(len(group_N), generator=generator)
    rewards_N[group_N == 1] = 0.3
    rewards_N[group_N == 2] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    order = torch.randperm(len(group_N), generator=generator)
    lengths_N = integers(1, 30, len(group_N))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)])
    mask_T = torch.rand(int(offsets[-1]), generator=generator) < 0.7
    mask_T[offsets[1:] - 1] = True
    return Step(
        lengths_N=lengths_N,
        group_N=group_N[order],
        rewards_N=rewards_N[order],
        mask_T=mask_T,
        offsets=offsets,
        generator=generator,
    )
