# SPDX-License-Identifier: Apache-2.0
"""Advantages of turns, against hand-computed values and against those of whole episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.algorithms.advantages import group_centered, group_relative, leave_one_out
from podium.algorithms.turn_advantages import (
    branch_fractions,
    branch_returns,
    turn_centered,
    turn_leave_one_out,
    turn_relative,
    turn_returns,
    turn_weights,
)


def test_a_return_is_the_discounted_sum_of_this_and_later_turns_of_the_episode() -> None:
    rewards, rows = [1.0, 0.0, 4.0, 2.0, 8.0], [0, 0, 0, 1, 3]
    assert turn_returns(rewards, rows, discount=0.5).tolist() == [2.0, 2.0, 4.0, 2.0, 8.0]
    assert turn_returns(rewards, rows, discount=1.0).tolist() == [5.0, 4.0, 4.0, 2.0, 8.0]
    assert turn_returns(rewards, rows, discount=0.0).tolist() == rewards
    assert turn_returns([], [], discount=0.5).tolist() == []


# Two episodes of one group: one with the returns 6 and 2 (mean 4), one with the return 1. The mean of the group is 2.5.
RETURNS, ROWS, GROUPS = [6.0, 2.0, 1.0], [0, 0, 1], [7, 7]


def test_every_episode_has_the_same_weight_in_the_mean() -> None:
    assert turn_centered(RETURNS, ROWS, GROUPS).tolist() == [3.5, -0.5, -1.5]


def test_the_variance_is_the_mean_over_episodes_times_n_over_n_minus_1() -> None:
    # ((3.5^2 + 0.5^2) / 2 + 1.5^2) / 2 = 4.25, times 2.
    expected = np.array([3.5, -0.5, -1.5]) / (np.sqrt(8.5) + 1e-6)
    np.testing.assert_allclose(turn_relative(RETURNS, ROWS, GROUPS), expected, rtol=1e-12)


def test_leaving_an_episode_out_leaves_all_of_its_turns_out() -> None:
    assert turn_leave_one_out(RETURNS, ROWS, GROUPS).tolist() == [5.0, 1.0, -3.0]


@pytest.mark.parametrize("compare", [turn_relative, turn_centered, turn_leave_one_out])
def test_a_group_of_one_keeps_its_returns_and_equal_returns_teach_nothing(compare: Any) -> None:
    returns, rows = [3.0, 1.0, 0.3, 0.1 + 0.2, 0.3], [0, 0, 1, 1, 2]
    assert compare(returns, rows, [0, 1, 1]).tolist() == [3.0, 1.0, 0.0, 0.0, 0.0]
    assert compare([], [], []).tolist() == []


@settings(max_examples=40, deadline=None)
@given(
    episodes=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(-20, 20)), min_size=1, max_size=12
    )
)  # fmt: skip
def test_a_final_reward_without_discount_gives_the_advantages_of_whole_episodes(
    episodes: list[tuple[int, int, int]],
) -> None:
    """However many turns each episode has."""
    groups, turns, rewards = (np.array(each) for each in zip(*episodes, strict=True))
    rows = np.repeat(np.arange(len(turns)), turns)
    rewards_K = np.zeros(len(rows))
    rewards_K[np.cumsum(turns) - 1] = rewards / 4
    returns_K = turn_returns(rewards_K, rows, discount=1.0)
    for of_turns, of_episodes in (
        (turn_relative, group_relative), (turn_centered, group_centered), (turn_leave_one_out, leave_one_out),
    ):  # fmt: skip
        np.testing.assert_allclose(
            of_turns(returns_K, rows, groups), of_episodes(rewards / 4, groups)[rows], rtol=1e-5, atol=1e-6
        )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_constant_on_all_returns_changes_nothing_and_centered_advantages_cancel(seed: int) -> None:
    random = np.random.default_rng(seed)
    turns = random.integers(1, 5, 6)
    rows, groups = np.repeat(np.arange(6), turns), np.array([0, 0, 0, 1, 1, 1])
    returns_K = random.normal(size=len(rows))
    centered = turn_centered(returns_K, rows, groups)
    np.testing.assert_allclose(turn_centered(returns_K + 5, rows, groups), centered, atol=1e-9)
    means_N = np.bincount(rows, centered) / turns
    np.testing.assert_allclose([means_N[:3].sum(), means_N[3:].sum()], [0, 0], atol=1e-9)


# --- trees ---

# One episode: a root 0 with the children 1 and 2, of which 2 has the children 3 and 4; and a root 5 alone. Its branches
# are 0-1, 0-2-3, 0-2-4 and 5. Another episode has the turns 6-7.
PARENTS = [-1, 0, 0, 2, 2, -1, -1, 6]
TREE_ROWS = [0, 0, 0, 0, 0, 0, 1, 1]
REWARDS = [1.0, 4.0, 2.0, 8.0, 0.0, 16.0, 1.0, 2.0]


def test_the_fractions_of_branches_are_shared_at_every_fork_and_among_the_roots() -> None:
    assert branch_fractions(PARENTS, TREE_ROWS).tolist() == [0, 0.25, 0, 0.125, 0.125, 0.5, 0, 1]
    assert branch_fractions([], []).tolist() == []


def test_a_branch_spreads_its_fraction_over_its_turns_and_a_shared_turn_counts_once() -> None:
    third = 0.125 / 3
    expected = [0.125 + 2 * third, 0.125, 2 * third, third, third, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(turn_weights(PARENTS, TREE_ROWS), expected)
    assert turn_weights([], []).tolist() == []


def test_the_return_behind_a_fork_is_the_mean_of_what_follows() -> None:
    # Turn 2: 2 + (8 + 0) / 2 / 2 = 4. Turn 0: 1 + (4 + 4) / 2 / 2 = 3.
    found = turn_returns(REWARDS, TREE_ROWS, discount=0.5, parent_K=PARENTS)
    assert found.tolist() == [3.0, 4.0, 4.0, 8.0, 0.0, 16.0, 2.0, 2.0]


def test_the_return_of_a_branch_is_that_of_its_whole_path_and_of_a_shared_turn_the_mean_by_fractions() -> None:
    # Branches: 1 + 4 = 5, 1 + 2 + 8 = 11, 1 + 2 + 0 = 3, 16, and 1 + 2 = 3.
    # Turn 2 has those of 3 and 4: 7; turn 0 half of 5 and half of 7: 6.
    assert branch_returns(REWARDS, PARENTS).tolist() == [6.0, 5.0, 7.0, 11.0, 3.0, 16.0, 3.0, 3.0]


def test_branches_are_compared_by_their_fractions() -> None:
    """The first episode's mean is 5 / 4 + 11 / 8 + 3 / 8 + 16 / 2 = 11, the second's 3, and the group's 7."""
    returns_K, weights_K = branch_returns(REWARDS, PARENTS), branch_fractions(PARENTS, TREE_ROWS)
    centered = turn_centered(returns_K, TREE_ROWS, [4, 4], weights_K)
    assert centered.tolist() == [-1.0, -2.0, 0.0, 4.0, -4.0, 9.0, -4.0, -4.0]
    assert turn_leave_one_out(returns_K, TREE_ROWS, [4, 4], weights_K).tolist() == [
        3.0, 2.0, 4.0, 8.0, 0.0, 13.0, -8.0, -8.0
    ]  # fmt: skip
    # Variance: ((4 / 4 + 16 / 8 + 16 / 8 + 81 / 2) + 16) / 2 * 2.
    relative = turn_relative(returns_K, TREE_ROWS, [4, 4], weights_K)
    np.testing.assert_allclose(relative, centered / (np.sqrt(45.5 + 16) + 1e-6), rtol=1e-12)


trees = st.lists(st.lists(st.integers(-1, 5), min_size=1, max_size=8), min_size=1, max_size=5)


def _tree(choices: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(parents, rows) of episodes: each turn continues an earlier one of its episode, or begins anew."""
    parents, rows = [], []
    for row, episode in enumerate(choices):
        first = len(parents)
        for turn, choice in enumerate(episode):
            parents.append(first + choice if 0 <= choice < turn else -1)
            rows.append(row)
    return np.array(parents), np.array(rows)


def _paths(parents: np.ndarray) -> list[list[int]]:
    """Every branch as its turns, found the slow way."""
    found = []
    for last in sorted(set(range(len(parents))) - set(parents.tolist())):
        path = [last]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        found.append(path)
    return found


@settings(max_examples=60, deadline=None)
@given(choices=trees, seed=st.integers(0, 99))
def test_returns_are_those_of_the_branches_one_by_one(choices: list[list[int]], seed: int) -> None:
    """Each turn's return, branch's return and weight as the sum over all branches by their fractions."""
    parents, rows = _tree(choices)
    rewards = np.random.default_rng(seed).normal(size=len(parents))
    fractions = branch_fractions(parents, rows)
    np.testing.assert_allclose(np.bincount(rows, fractions), 1.0)
    shares, weights = np.zeros(len(parents)), np.zeros(len(parents))
    later, whole = np.zeros(len(parents)), np.zeros(len(parents))
    for path in _paths(parents):
        fraction = fractions[path[-1]]
        for place, turn in enumerate(path):
            shares[turn] += fraction
            weights[turn] += fraction / len(path)
            later[turn] += fraction * sum(0.9**at * rewards[each] for at, each in enumerate(path[place:]))
            whole[turn] += fraction * rewards[path].sum()
    np.testing.assert_allclose(turn_weights(parents, rows), weights)
    np.testing.assert_allclose(turn_returns(rewards, rows, discount=0.9, parent_K=parents), later / shares, atol=1e-12)
    np.testing.assert_allclose(branch_returns(rewards, parents), whole / shares, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(choices=trees, groups=st.lists(st.integers(0, 1), min_size=5, max_size=5), seed=st.integers(0, 99))
def test_one_reward_for_an_episode_gives_all_branches_and_turns_the_advantage_of_the_episode(
    choices: list[list[int]], groups: list[int], seed: int
) -> None:
    parents, rows = _tree(choices)
    rewards_N = np.random.default_rng(seed).integers(-9, 9, len(choices)) / 4
    group_N = np.array(groups[: len(choices)])
    is_end = np.isin(np.arange(len(parents)), parents, invert=True)
    rewards_K = np.where(is_end, rewards_N[rows], 0.0)
    compared = [
        (turn_returns(rewards_K, rows, discount=1.0, parent_K=parents), turn_weights(parents, rows)),
        (branch_returns(rewards_K, parents), branch_fractions(parents, rows)),
    ]
    for of_turns, of_episodes in (
        (turn_relative, group_relative), (turn_centered, group_centered), (turn_leave_one_out, leave_one_out),
    ):  # fmt: skip
        for returns_K, weights_K in compared:
            np.testing.assert_allclose(
                of_turns(returns_K, rows, group_N, weights_K), of_episodes(rewards_N, group_N)[rows],
                rtol=1e-5, atol=1e-6,
            )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_chain_as_a_tree_is_the_chain(lengths: list[int], seed: int) -> None:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    parents = np.where(np.r_[True, np.diff(rows) > 0], -1, np.arange(len(rows)) - 1)
    rewards = np.random.default_rng(seed).normal(size=len(rows))
    returns_K = turn_returns(rewards, rows, discount=0.9)
    assert turn_returns(rewards, rows, discount=0.9, parent_K=parents).tolist() == returns_K.tolist()
    groups = np.zeros(len(lengths), np.int64)
    np.testing.assert_allclose(
        turn_relative(returns_K, rows, groups, turn_weights(parents, rows)), turn_relative(returns_K, rows, groups)
    )
