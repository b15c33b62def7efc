# SPDX-License-Identifier: Apache-2.0
"""Places the rewards of episodes and of their turns on tokens. Torch-free."""

# N episodes · T tokens of all of them

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from podium.data.trajectories import TrajectoryBlock
from podium.roles.carriers import Floats, TurnRewards


def trained_mask(block: TrajectoryBlock) -> NDArray[np.bool_]:
    """Tokens that count in the loss. Nothing predicts the first one of an episode."""
    trained_T = block.loss_mask_T.copy()
    trained_T[block.offsets[:-1][block.lengths_N > 0]] = False
    return trained_T


def placed_rewards(
    block: TrajectoryBlock, trained_T: NDArray[np.bool_], rewards_N: Floats, turn_rewards: TurnRewards
) -> NDArray[np.float32]:
    """Each episode's reward on its last trained token, and turns' rewards on their own tokens."""
    rewards_T = np.zeros(len(block.tokens_T), np.float32)
    places = np.where(trained_T, np.arange(len(trained_T)), -1)
    if len(block.ids):
        last_N = np.maximum.reduceat(np.append(places, -1), block.offsets[:-1])
        last_N = np.where(block.lengths_N > 0, last_N, -1)
        has = last_N >= block.offsets[:-1]
        np.add.at(rewards_T, last_N[has], rewards_N[has])
        np.add.at(rewards_T, block.offsets[:-1][turn_rewards.row_K] + turn_rewards.token_K, turn_rewards.reward_K)
    return rewards_T
