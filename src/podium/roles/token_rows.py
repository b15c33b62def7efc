# SPDX-License-Identifier: Apache-2.0
"""Packs episodes into rows and places their rewards on tokens, for the policy's update and the critic's."""

# N episodes · T tokens of all of them

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from podium.algorithms.kl import kl_estimate
from podium.data.documents import Document, PackedBatch, pack
from podium.data.trajectories import Ints, TrajectoryBlock
from podium.recipe import AlgorithmSection
from podium.roles.carriers import TurnRewards
from podium.roles.placed_rewards import placed_rewards


def packed_rows(
    block: TrajectoryBlock, trained_T: NDArray[np.bool_], rows: Ints, *, replays: bool = False
) -> tuple[PackedBatch, Ints, Ints, int]:
    """Returns (micro-batch, block position of each trained token, its row among those that are computed, number of
    those). Tokens after a sequence's last trained token are left out, and so are sequences without one. `replays`:
    routers choose the experts that the block has recorded."""
    experts_TLK = block.experts_TLK if replays else None
    documents: list[Document] = []
    begins: list[int] = []
    owners: list[int] = []
    sequences = ((row, *sequence) for row in rows.tolist() for sequence in block.sequences(row))
    for row, begin, end in sequences:
        trained = trained_T[begin:end]
        trained_places = np.flatnonzero(trained)
        if len(trained_places):
            last = int(trained_places[-1]) + 1
            documents.append(
                Document(
                    tokens=block.tokens_T[begin : begin + last],
                    trained=trained[:last],
                    experts=None if experts_TLK is None else experts_TLK[begin : begin + last],
                )
            )
            begins.append(begin)
            owners.append(row)
    # Neighbours of equal length share one attention call.
    order = sorted(range(len(documents)), key=lambda at: documents[at].num_inputs)
    places = [begins[at] + np.flatnonzero(documents[at].trained) for at in order]
    places_S = np.concatenate(places) if places else np.empty(0, np.int64)
    # All sequences of an episode count as one, in the order in which the first of each is packed.
    numbers = {row: number for number, row in enumerate(dict.fromkeys(owners[at] for at in order))}
    counts = [len(each) for each in places]
    sequence_S = np.repeat(np.array([numbers[owners[at]] for at in order], np.int64), counts)
    return pack([documents[at] for at in order]), places_S, sequence_S, len(numbers)


def spread_over_turns(turns: TurnRewards, block: TrajectoryBlock) -> NDArray[np.float32]:
    """The amount of its turn at each token: a turn's tokens end with its last one. Rows without turns have 0."""
    values_T = np.zeros(len(block.tokens_T), np.float32)
    sorted_turns = turns.by_row()
    bounds = np.searchsorted(sorted_turns.row_K, np.arange(len(block.ids) + 1))
    for row in np.unique(sorted_turns.row_K).tolist():
        of_row = slice(bounds[row], bounds[row + 1])
        turn_T = np.searchsorted(sorted_turns.token_K[of_row], np.arange(block.lengths_N[row]))
        last = bounds[row + 1] - bounds[row] - 1  # what comes after the last turn is not trained
        amounts_K = sorted_turns.reward_K[of_row]
        values_T[block.offsets[row] : block.offsets[row + 1]] = amounts_K[np.minimum(turn_T, last)]
    return values_T


def token_rewards(
    block: TrajectoryBlock,
    trained_T: NDArray[np.bool_],
    rewards_N: NDArray[np.float64],
    turn_rewards: TurnRewards,
    reference_T: NDArray[np.float32] | None,
    algorithm: AlgorithmSection,
    kl_coefficient: float,
) -> NDArray[np.float32]:
    """Each episode's reward on its last trained token, and turns' rewards on their own tokens. The KL is subtracted if
    it is in the reward."""
    rewards_T = placed_rewards(block, trained_T, rewards_N, turn_rewards)
    kl = algorithm.kl
    if kl is not None and kl.where == "reward" and reference_T is not None:
        distance_T = kl_estimate(
            torch.from_numpy(block.behavior_logprobs_T.copy()),
            torch.from_numpy(reference_T.copy()),
            kl.estimator or "k1",
        ).numpy()
        rewards_T -= np.where(trained_T, kl_coefficient * distance_T, 0).astype(np.float32)
    return rewards_T
