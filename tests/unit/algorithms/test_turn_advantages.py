# SPDX-License-Identifier: Apache-2.0
"""Advantages of turns, against hand-computed values and against those of whole episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.algorithms.advantages import group_centered, group_relative, leave_one_out
from podium.algorithms.turn_advantages import turn_centered, turn_leave_one_out, turn_relative, turn_returns


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
