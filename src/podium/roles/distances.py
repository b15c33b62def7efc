# SPDX-License-Identifier: Apache-2.0
"""Distance between the policy that sampled episodes and a model that scored them."""

# N episodes · T tokens of all of them

from __future__ import annotations

import numpy as np
import torch

from podium.algorithms.kl import KlEstimator, kl_estimate
from podium.data.trajectories import TokenColumn, TrajectoryBlock
from podium.engine.scoring import sampled_mask
from podium.roles.carriers import DistanceNote, Floats


def distance(block: TrajectoryBlock, scored: TokenColumn) -> DistanceNote:
    """KL of the sampling policy from the scoring model, estimated over each episode's sampled tokens."""
    sampled_T = sampled_mask(block)
    sampled_T[block.first_T] = False
    behavior = torch.from_numpy(block.behavior_logprobs_T.copy())
    reference = torch.from_numpy(scored.values_T.astype(np.float32))

    def sums(estimator: KlEstimator) -> Floats:
        values_T = np.where(sampled_T, kl_estimate(behavior, reference, estimator).numpy(), 0.0)
        return _sums(values_T, block)

    return DistanceNote(
        k1_N=sums("k1"), k2_N=sums("k2"), k3_N=sums("k3"), tokens_N=_sums(sampled_T, block).astype(np.int64)
    )


def _sums(values_T: np.ndarray, block: TrajectoryBlock) -> Floats:
    total = np.concatenate([[0.0], np.cumsum(values_T, dtype=np.float64)])
    sums_N: Floats = total[block.offsets[1:]] - total[block.offsets[:-1]]
    return sums_N
