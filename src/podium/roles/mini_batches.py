# SPDX-License-Identifier: Apache-2.0
"""How the episodes of a batch are dealt to mini-batches and ranks. Torch-free."""

# N episodes

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podium.cluster import RowRefs, ShardResult
from podium.data.splitting import SplitPlan, split_rows
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock
from podium.roles.carriers import DistanceNote, UpdatePlan
from podium.roles.stages import Advantages, TrainBatch


def deal_mini_batches(group_N: Ints, count: int, order: np.random.Generator) -> Ints:
    """The mini-batch of each episode. Groups stay whole if there are enough of them."""
    prompt_indices, group = np.unique(group_N, return_inverse=True)
    units = len(prompt_indices) if len(prompt_indices) >= count else len(group_N)
    shuffled = order.permutation(units)
    dealt = np.empty(units, np.int64)
    dealt[shuffled] = np.arange(units) * count // units
    return dealt[group] if units == len(prompt_indices) and len(prompt_indices) >= count else dealt


def without_idle(train_batch: TrainBatch, plan: UpdatePlan, mini_batch_N: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Returns (episodes to compute, tokens and episodes of each mini-batch that only count). An episode with advantage
    0 (all rewards of its group are equal) has no gradient unless a KL or entropy term gives it one. It still counts in
    the loss denominator, but is not computed. A mini-batch that would be empty is computed whole."""
    count, algorithm = int(mini_batch_N.max(initial=0)) + 1, plan.algorithm
    everything = np.arange(len(mini_batch_N)), [(0, 0)] * count
    advantages = train_batch.advantages
    if not isinstance(advantages, Advantages) or advantages.values_N is None or advantages.whiten:
        return everything
    if algorithm.needs_idle_episodes:
        return everything
    idle_N = advantages.values_N == 0
    left = np.bincount(mini_batch_N[~idle_N], minlength=count)
    idle_N &= left[mini_batch_N] > 0
    trained_N = train_batch.rollouts.note.trained_N
    tokens = np.bincount(mini_batch_N, trained_N * idle_N, count).astype(int).tolist()
    episodes = np.bincount(mini_batch_N, idle_N & (trained_N > 0), count).astype(int).tolist()
    return np.flatnonzero(~idle_N), list(zip(tokens, episodes, strict=True))


def mini_batch_order(count: int, epochs: int, order: np.random.Generator) -> list[int]:
    """The order of the mini-batches, shuffled again in every epoch after the first."""
    first = list(range(count))
    return first + [int(each) for _ in range(epochs - 1) for each in order.permutation(count)]


def rank_batches(split: SplitPlan, rank: int, sequence: Sequence[int]) -> tuple[Ints, tuple[tuple[Ints, ...], ...]]:
    """Returns (positions of this rank's rows, [optimizer step][micro-step] -> positions among those)."""
    mine = np.flatnonzero(split.rank_N == rank)
    by_mini_batch = split.rows(rank)
    return mine, tuple(
        tuple(np.searchsorted(mine, part) for part in by_mini_batch[mini_batch]) for mini_batch in sequence
    )


def even_parts(lengths_N: Ints, count: int) -> list[Ints]:
    """Rows for each of `count` ranks with about the same number of tokens; ascending."""
    if count == 1:
        return [np.arange(len(lengths_N))]
    split = split_rows(lengths_N, lengths_N.astype(float), num_ranks=count, max_tokens=int(lengths_N.sum()) + 1)
    return [np.flatnonzero(split.rank_N == rank) for rank in range(count)]


def joined_distance(results: Sequence[ShardResult[TokenColumn]], rows: RowRefs[TrajectoryBlock]) -> DistanceNote:
    """The notes of all ranks in the order of the rows."""
    non_empty = [result for result in results if len(result.ids)]
    ids = np.concatenate([rows.ids.positions_of(result.ids) for result in non_empty])
    back = np.argsort(ids)
    notes: list[DistanceNote] = [result.note for result in non_empty]
    return DistanceNote(
        k1_N=np.concatenate([note.k1_N for note in notes])[back],
        k2_N=np.concatenate([note.k2_N for note in notes])[back],
        k3_N=np.concatenate([note.k3_N for note in notes])[back],
        tokens_N=np.concatenate([note.tokens_N for note in notes])[back],
    )
