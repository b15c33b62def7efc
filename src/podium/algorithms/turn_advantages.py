# SPDX-License-Identifier: Apache-2.0
"""Advantages of the turns of episodes, from the rewards of turns and the group that each episode belongs to.

The return of a turn is the discounted sum of the rewards of this turn and the later ones of its episode. Returns are
compared with those of all turns of the group, in which every episode has the same weight, however many turns it has:
the mean of a group is the mean over its episodes of the mean over their turns. Where an episode has one return on all
of its turns, its advantages are those of `advantages`. Groups of one episode keep their returns, and groups whose
returns are all equal have advantage exactly 0, as there.

The turns of an agent's episode may be a tree, or several: then a turn is followed by its children, and what comes after
it is the mean over them. A branch is the path from a root to a turn that nothing follows. Its fraction is that of its
last turn: a root's is one through the number of roots, and children share their parent's equally. So the fractions of
an episode's branches add up to 1, and a turn that several branches share counts once. Torch-free: the controller
computes them.
"""

# K turns of N episodes, in the order of rows and, within a row, of time: a turn stands behind its parent · G groups

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podium.algorithms.advantages import RELATIVE_SPREAD, STD_EPSILON

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def turn_returns(
    rewards_K: ArrayLike, row_K: ArrayLike, *, discount: float, parent_K: ArrayLike | None = None
) -> Floats:
    """The sum of the rewards of each turn and the later ones of its row, those k turns later times discount^k.
    `parent_K`: the turn that each one follows, -1 for none; the return behind a turn is the mean of its children's."""
    if parent_K is not None:
        return _tree_returns(np.asarray(rewards_K, np.float64), np.asarray(parent_K, np.int64), discount)
    rewards, rows = np.asarray(rewards_K, np.float64).tolist(), np.asarray(row_K, np.int64).tolist()
    returns = [0.0] * len(rewards)
    following, row = 0.0, -1
    for turn in reversed(range(len(rewards))):
        following = rewards[turn] + (discount * following if rows[turn] == row else 0.0)
        returns[turn], row = following, rows[turn]
    return np.array(returns, np.float64)


def branch_returns(rewards_K: ArrayLike, parent_K: ArrayLike) -> Floats:
    """The sum of the rewards of all turns of a branch, at its last turn. At an earlier turn: the mean over the branches
    that go through it, each by its fraction."""
    parents = np.asarray(parent_K, np.int64).tolist()
    path_K = np.array(rewards_K, np.float64)
    for turn, parent in enumerate(parents):
        if parent >= 0:
            path_K[turn] += path_K[parent]
    at_end_K = np.where(ends_of_branches(parent_K), path_K, 0.0)
    return _tree_returns(at_end_K, np.asarray(parent_K, np.int64), 1.0)


def ends_of_branches(parent_K: ArrayLike) -> NDArray[np.bool_]:
    """Whether each turn is the last of a branch: nothing follows it."""
    parents_K = np.asarray(parent_K, np.int64)
    ends_K = np.ones(len(parents_K), np.bool_)
    ends_K[parents_K[parents_K >= 0]] = False
    return ends_K


def branch_fractions(parent_K: ArrayLike, row_K: ArrayLike) -> Floats:
    """The fraction of each branch, at its last turn; 0 at other turns. Those of an episode add up to 1."""
    parents_K, rows_K = np.asarray(parent_K, np.int64), np.asarray(row_K, np.int64)
    if not len(parents_K):
        return np.empty(0)
    num_roots_K = np.bincount(rows_K[parents_K < 0], minlength=int(rows_K.max()) + 1)[rows_K]
    num_children = np.bincount(parents_K[parents_K >= 0], minlength=len(parents_K)).tolist()
    shares = (1.0 / np.maximum(num_roots_K, 1)).tolist()
    for turn, parent in enumerate(parents_K.tolist()):
        if parent >= 0:
            shares[turn] = shares[parent] / num_children[parent]
    return np.where(ends_of_branches(parents_K), shares, 0.0)


def turn_weights(parent_K: ArrayLike, row_K: ArrayLike) -> Floats:
    """The weight of each turn in the mean of its episode: every branch spreads its fraction evenly over its turns.
    Those of an episode add up to 1."""
    parents = np.asarray(parent_K, np.int64).tolist()
    num_turns = [1] * len(parents)  # from the root to the turn
    for turn, parent in enumerate(parents):
        if parent >= 0:
            num_turns[turn] = num_turns[parent] + 1
    weights = (branch_fractions(parent_K, row_K) / np.maximum(num_turns, 1)).tolist()
    for turn in reversed(range(len(parents))):
        if parents[turn] >= 0:
            weights[parents[turn]] += weights[turn]
    return np.array(weights, np.float64)


def _tree_returns(rewards_K: Floats, parents_K: Ints, discount: float) -> Floats:
    """Children stand behind their parents, so that all of them are known when a turn's turn comes."""
    returns, parents = rewards_K.tolist(), parents_K.tolist()
    behind, num_children = [0.0] * len(returns), [0] * len(returns)
    for turn in reversed(range(len(returns))):
        if num_children[turn]:
            returns[turn] += discount * behind[turn] / num_children[turn]
        if parents[turn] >= 0:
            behind[parents[turn]] += returns[turn]
            num_children[parents[turn]] += 1
    return np.array(returns, np.float64)


def turn_relative(returns_K: ArrayLike, row_K: ArrayLike, group_N: ArrayLike, weight_K: Floats | None = None) -> Floats:
    """(G - mean) / (std + 1e-6) within the group; the variance is the mean over episodes of the mean over turns, times
    n / (n - 1) for n episodes. `weight_K`: of turns in the mean of their episode; None: equal ones."""
    turns = _turns_of(returns_K, row_K, group_N, weight_K)
    centered_K = turns.returns_K - turns.mean_K
    variance_K = turns.per_group(np.square(centered_K)) * turns.size_K / np.maximum(turns.size_K - 1, 1.0)
    return turns.settled(centered_K / (np.sqrt(variance_K) + STD_EPSILON))


def turn_centered(returns_K: ArrayLike, row_K: ArrayLike, group_N: ArrayLike, weight_K: Floats | None = None) -> Floats:
    """G - mean within the group."""
    turns = _turns_of(returns_K, row_K, group_N, weight_K)
    return turns.settled(turns.returns_K - turns.mean_K)


def turn_leave_one_out(
    returns_K: ArrayLike, row_K: ArrayLike, group_N: ArrayLike, weight_K: Floats | None = None
) -> Floats:
    """G minus the mean over the other episodes of the group."""
    turns = _turns_of(returns_K, row_K, group_N, weight_K)
    others_K = (turns.size_K * turns.mean_K - turns.episode_K) / np.maximum(turns.size_K - 1, 1.0)
    return turns.settled(turns.returns_K - others_K)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Turns:
    """What turns share with the others of their group, already looked up for each turn."""

    returns_K: Floats
    weight_K: Floats  # in the mean of its episode: they add up to 1
    index_K: Ints  # of its group, 0..G-1
    size_K: Floats  # episodes of its group that have turns
    episode_K: Floats  # mean return of its episode's turns
    mean_K: Floats
    alone_K: NDArray[np.bool_]  # of a group of one episode
    equal_K: NDArray[np.bool_]  # of a group of several, with one return throughout

    def per_group(self, values_K: Floats) -> Floats:
        """The mean over the group's episodes of the mean over their turns."""
        return _totals(values_K * self.weight_K, self.index_K) / self.size_K

    def settled(self, advantages_K: Floats) -> Floats:
        """The advantages, with the groups that are a case of their own set to what they get."""
        return np.where(self.alone_K, self.returns_K, np.where(self.equal_K, 0.0, advantages_K))


def _turns_of(returns: ArrayLike, rows: ArrayLike, groups: ArrayLike, weights: Floats | None) -> _Turns:
    returns_K, row_K = np.asarray(returns, np.float64), np.asarray(rows, np.int64)
    _, index_K = np.unique(np.asarray(groups)[row_K], return_inverse=True)
    num_groups = int(index_K.max(initial=-1)) + 1
    weight_K = weights
    if weight_K is None:
        weight_K = 1.0 / np.maximum(np.bincount(row_K)[row_K], 1.0) if len(row_K) else np.empty(0)
    size_K = np.rint(_totals(weight_K, index_K))
    low_G, high_G = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low_G, index_K, returns_K)
    np.maximum.at(high_G, index_K, returns_K)
    low_K, high_K = low_G[index_K], high_G[index_K]
    alone_K = size_K == 1
    tolerance_K = RELATIVE_SPREAD * np.maximum(np.abs(low_K), np.abs(high_K))
    return _Turns(
        returns_K=returns_K,
        weight_K=weight_K,
        index_K=index_K,
        size_K=size_K,
        episode_K=_totals(returns_K * weight_K, row_K),
        mean_K=_totals(returns_K * weight_K, index_K) / size_K,
        alone_K=alone_K,
        equal_K=(high_K - low_K <= tolerance_K) & ~alone_K,
    )


def _totals(values_K: Floats, index_K: Ints) -> Floats:
    """The sum of the values of each turn's row or group."""
    if not len(index_K):
        return np.empty(0)
    totals: Floats = np.bincount(index_K, values_K).astype(np.float64)[index_K]
    return totals
