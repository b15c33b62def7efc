# SPDX-License-Identifier: Apache-2.0
"""Advantages of trajectories within their groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from podium.algorithms import advantages
from podium.algorithms.advantages import (
    group_centered,
    group_relative,
    leave_one_out,
    length_weighted,
)

Estimator = Callable[[NDArray[np.floating], NDArray[np.int64]], NDArray[np.float32]]


def lengths_of(rewards_N: NDArray[np.floating]) -> NDArray[np.int64]:
    return (np.minimum(np.abs(rewards_N), 1e4).astype(np.float64) * 10).astype(np.int64) + 1


def by_length(rewards_N: NDArray[np.floating], group_N: NDArray[np.int64]) -> NDArray[np.float32]:
    """OPO with lengths that differ, but are the same for the same reward: rows may be reordered."""
    return length_weighted(rewards_N, group_N, lengths_of(rewards_N))


ESTIMATORS: list[Estimator] = [group_relative, group_centered, leave_one_out, by_length]
every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS)

REWARDS = st.floats(-10, 10, width=32)
# (reward, group) of each trajectory
STEPS = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), min_size=1, max_size=24)


def columns(step: list[tuple[float, int]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rewards, labels = zip(*step, strict=True)
    return np.array(rewards, np.float32), np.array(labels, np.int64)


def test_group_relative_divides_by_the_unbiased_deviation() -> None:
    # Group 7: mean 2, deviations -1 and 1, variance 2 / 1. Group 3: mean 4, deviations -2, 0, 2, variance 8 / 2 = 4.
    advantages_N = group_relative(np.array([1.0, 2.0, 3.0, 4.0, 6.0]), np.array([7, 3, 7, 3, 3]))
    np.testing.assert_allclose(advantages_N, np.array([-0.7071063, -0.9999995, 0.7071063, 0.0, 0.9999995]), rtol=1e-6)


def test_group_centered_only_subtracts_the_mean() -> None:
    advantages_N = group_centered(np.array([1.0, 2.0, 3.0, 6.0]), np.array([0, 0, 0, 0]))
    assert advantages_N.tolist() == [-2.0, -1.0, 0.0, 3.0]


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # The others of 1 have mean (2 + 6) / 2 = 4, those of 2 have 3.5, those of 6 have 1.5.
    advantages_N = leave_one_out(np.array([1.0, 2.0, 6.0]), np.array([5, 5, 5]))
    np.testing.assert_allclose(advantages_N, np.array([-3.0, -1.5, 4.5]), rtol=1e-6)


def test_length_weighted_lets_long_answers_count_more_in_the_baseline() -> None:
    # The baseline is (1 * 3 + 0 * 1) / 4 = 0.75.
    advantages_N = length_weighted(np.array([1.0, 0.0]), np.array([0, 0]), np.array([3, 1]))
    assert advantages_N.tolist() == [0.25, -0.75]


def test_a_group_without_trained_tokens_gives_numbers_all_the_same() -> None:
    advantages_N = length_weighted(np.array([1.0, 0.0]), np.array([0, 0]), np.array([0, 0]))
    assert np.isfinite(advantages_N).all()


@every_estimator
def test_a_group_of_one_keeps_its_reward(estimate: Estimator) -> None:
    advantages_N = estimate(np.array([0.3, 1.0, 0.0]), np.array([9, 4, 4]))
    assert advantages_N[0].item() == pytest.approx(0.3)


@every_estimator
@pytest.mark.parametrize("reward", [0.1, 0.0, -1e6, 1e-30])
def test_equal_rewards_give_exactly_zero(estimate: Estimator, reward: float) -> None:
    advantages_N = estimate(np.full(3, reward), np.zeros(3, np.int64))
    assert advantages_N.tolist() == [0.0, 0.0, 0.0]


@every_estimator
def test_rewards_that_differ_by_rounding_alone_count_as_equal(estimate: Estimator) -> None:
    third = np.float32(0.1)
    thrice = third * np.float32(3)
    rewards_N = np.array([thrice, third + third + third, np.float32(0.3), np.nextafter(thrice, third)])
    assert len(set(rewards_N.tolist())) > 1
    assert estimate(rewards_N, np.zeros(4, np.int64)).tolist() == [0.0] * 4


def test_a_small_spread_that_is_not_rounding_is_kept() -> None:
    assert group_relative(np.array([1.0, 1.0001]), np.array([0, 0]))[1].item() > 0.6


@every_estimator
def test_no_trajectories_have_no_advantages(estimate: Estimator) -> None:
    advantages_N = estimate(np.zeros(0), np.zeros(0, np.int64))
    assert advantages_N.shape == (0,)
    assert advantages_N.dtype == np.float32


@every_estimator
def test_one_bad_reward_harms_its_own_group_only(estimate: Estimator) -> None:
    rewards_N, group_N = np.array([float("inf"), 1.0, 1.0, 3.0]), np.array([0, 0, 1, 1])
    assert np.isfinite(estimate(rewards_N, group_N)[2:]).all()


@every_estimator
def test_the_result_is_float32_whatever_comes_in(estimate: Estimator) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        assert estimate(np.array([0.0, 1.0, 2.0], dtype), np.zeros(3, np.int64)).dtype == np.float32


@every_estimator
@given(step=STEPS, order=st.randoms(use_true_random=False))
def test_the_order_of_the_trajectories_does_not_matter(
    estimate: Estimator, step: list[tuple[float, int]], order
) -> None:
    rewards_N, group_N = columns(step)
    permutation = list(range(len(step)))
    order.shuffle(permutation)
    shuffled_N = estimate(rewards_N[permutation], group_N[permutation])
    np.testing.assert_allclose(shuffled_N, estimate(rewards_N, group_N)[permutation], rtol=1e-6, atol=1e-6)


@every_estimator
@given(step=STEPS, order=st.permutations(range(7)))
def test_the_labels_of_the_groups_do_not_matter(
    estimate: Estimator, step: list[tuple[float, int]], order: list[int]
) -> None:
    rewards_N, group_N = columns(step)
    relabelled_N = np.array(order)[group_N + 3] * 1_000_003
    np.testing.assert_allclose(estimate(rewards_N, relabelled_N), estimate(rewards_N, group_N), rtol=1e-6, atol=1e-6)


@every_estimator
@given(step=STEPS)
def test_other_groups_do_not_matter(estimate: Estimator, step: list[tuple[float, int]]) -> None:
    rewards_N, group_N = columns(step)
    whole_N = estimate(rewards_N, group_N)
    for label in np.unique(group_N):
        mine = group_N == label
        np.testing.assert_allclose(estimate(rewards_N[mine], group_N[mine]), whole_N[mine], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimate", [group_relative, group_centered, leave_one_out])
@given(step=STEPS)
def test_the_advantages_of_a_group_sum_to_zero(estimate: Estimator, step: list[tuple[float, int]]) -> None:
    rewards_N, group_N = columns(step)
    advantages_N = estimate(rewards_N, group_N)
    for label in np.unique(group_N):
        mine = group_N == label
        if mine.sum() > 1:
            assert advantages_N[mine].sum().item() == pytest.approx(0.0, abs=1e-4)


@every_estimator
@given(step=STEPS, shift=st.floats(-5, 5, width=32))
def test_a_reward_that_all_get_changes_nothing(
    estimate: Estimator, step: list[tuple[float, int]], shift: float
) -> None:
    rewards_N, group_N = columns([(round(reward, 1), label) for reward, label in step])
    sizes_N = (group_N[:, None] == group_N[None, :]).sum(axis=1)
    lengths_N = lengths_of(rewards_N)

    def run(rewards_N: NDArray[np.floating]) -> NDArray[np.float32]:
        return length_weighted(rewards_N, group_N, lengths_N) if estimate is by_length else estimate(rewards_N, group_N)

    np.testing.assert_allclose(run(rewards_N + shift)[sizes_N > 1], run(rewards_N)[sizes_N > 1], rtol=1e-3, atol=1e-4)


# --- the same in torch, bit by bit ---


def in_torch(name: str, rewards_N: torch.Tensor, group_N: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
    """The estimators over tensors, as a learner would compute them: the controller has no torch."""
    labels_G, index_N = torch.unique(group_N, return_inverse=True)
    rewards_N, zeros_G = rewards_N.double(), torch.zeros(len(labels_G), dtype=torch.float64)

    def total_N(values_N: torch.Tensor) -> torch.Tensor:
        return zeros_G.index_add(0, index_N, values_N)[index_N]

    def extreme_N(which: str) -> torch.Tensor:
        return zeros_G.scatter_reduce(0, index_N, rewards_N, which, include_self=False)[index_N]

    size_N = torch.bincount(index_N)[index_N].double()
    centered_N, others_N = rewards_N - total_N(rewards_N) / size_N, (size_N - 1).clamp(min=1)
    match name:
        case "group_relative":
            found_N = centered_N / ((total_N(centered_N.square()) / others_N).sqrt() + 1e-6)
        case "group_centered":
            found_N = centered_N
        case "leave_one_out":
            found_N = size_N / others_N * centered_N
        case _:
            weights_N = lengths_N.double()
            found_N = rewards_N - total_N(weights_N * rewards_N) / total_N(weights_N).clamp(min=1)
    low_N, high_N = extreme_N("amin"), extreme_N("amax")
    is_equal_N = high_N - low_N <= 1e-6 * torch.maximum(low_N.abs(), high_N.abs())
    return found_N.masked_fill(is_equal_N & (size_N > 1), 0.0).where(size_N > 1, rewards_N).float()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", ["group_relative", "group_centered", "leave_one_out", "length_weighted"])
def test_every_bit_is_that_of_the_same_formula_in_torch(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 3000))
    group_N = rng.integers(0, max(1, count // int(rng.integers(1, 40))), count)
    rewards_N = rng.choice([rng.normal(size=count), rng.integers(0, 2, count) * 1.0, rng.random(count) ** 9 * 1e4])
    lengths_N = rng.integers(0, 4000, count)

    arguments = (rewards_N, group_N) if name != "length_weighted" else (rewards_N, group_N, lengths_N)
    found_N = getattr(advantages, name)(*arguments)

    expected_N = in_torch(name, *(torch.from_numpy(each) for each in (rewards_N, group_N, lengths_N))).numpy()
    assert found_N.tobytes() == expected_N.tobytes()
