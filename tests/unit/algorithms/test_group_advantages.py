# SPDX-License-Identifier: Apache-2.0
"""Advantages of trajectories within their groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.algorithms.advantages import (
    group_centered,
    group_relative,
    leave_one_out,
    length_weighted,
)

Estimator = Callable[[Tensor, Tensor], Tensor]


def by_length(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """OPO with lengths that differ, but are the same for the same reward: rows may be reordered."""
    return length_weighted(rewards_N, group_N, (rewards_N.abs() * 10).long() + 1)


ESTIMATORS: list[Estimator] = [group_relative, group_centered, leave_one_out, by_length]
every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS)

REWARDS = st.floats(-10, 10, width=32)
# (reward, group) of each trajectory
STEPS = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), min_size=1, max_size=24)


def columns(step: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    rewards, labels = zip(*step, strict=True)
    return torch.tensor(rewards, dtype=torch.float32), torch.tensor(labels)


def test_group_relative_divides_by_the_unbiased_deviation() -> None:
    # Group 7: mean 2, deviations -1 and 1, variance 2 / 1. Group 3: mean 4, deviations -2, 0, 2, variance 8 / 2 = 4.
    advantages_N = group_relative(torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0]), torch.tensor([7, 3, 7, 3, 3]))
    torch.testing.assert_close(advantages_N, torch.tensor([-0.7071063, -0.9999995, 0.7071063, 0.0, 0.9999995]))


def test_group_centered_only_subtracts_the_mean() -> None:
    advantages_N = group_centered(torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([0, 0, 0, 0]))
    assert advantages_N.tolist() == [-2.0, -1.0, 0.0, 3.0]


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # The others of 1 have mean (2 + 6) / 2 = 4, those of 2 have 3.5, those of 6 have 1.5.
    advantages_N = leave_one_out(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([5, 5, 5]))
    torch.testing.assert_close(advantages_N, torch.tensor([-3.0, -1.5, 4.5]))


def test_length_weighted_lets_long_answers_count_more_in_the_baseline() -> None:
    # The baseline is (1 * 3 + 0 * 1) / 4 = 0.75.
    advantages_N = length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([3, 1]))
    assert advantages_N.tolist() == [0.25, -0.75]


def test_a_group_without_trained_tokens_gives_numbers_all_the_same() -> None:
    advantages_N = length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert advantages_N.isfinite().all()


@every_estimator
def test_a_group_of_one_keeps_its_reward(estimate: Estimator) -> None:
    advantages_N = estimate(torch.tensor([0.3, 1.0, 0.0]), torch.tensor([9, 4, 4]))
    assert advantages_N[0].item() == pytest.approx(0.3)


@every_estimator
@pytest.mark.parametrize("reward", [0.1, 0.0, -1e6, 1e-30])
def test_equal_rewards_give_exactly_zero(estimate: Estimator, reward: float) -> None:
    advantages_N = estimate(torch.full((3,), reward), torch.zeros(3, dtype=torch.int64))
    assert advantages_N.tolist() == [0.0, 0.0, 0.0]


@every_estimator
def test_rewards_that_differ_by_rounding_alone_count_as_equal(estimate: Estimator) -> None:
    third = torch.tensor(0.1, dtype=torch.float32)
    rewards_N = torch.stack([third * 3, third + third + third, torch.tensor(0.3), torch.nextafter(third * 3, third)])
    assert len(set(rewards_N.tolist())) > 1
    assert estimate(rewards_N, torch.zeros(4, dtype=torch.int64)).tolist() == [0.0] * 4


def test_a_small_spread_that_is_not_rounding_is_kept() -> None:
    assert group_relative(torch.tensor([1.0, 1.0001]), torch.tensor([0, 0]))[1].item() > 0.6


@every_estimator
def test_no_trajectories_have_no_advantages(estimate: Estimator) -> None:
    advantages_N = estimate(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert advantages_N.shape == (0,)
    assert advantages_N.dtype == torch.float32


@every_estimator
def test_one_bad_reward_harms_its_own_group_only(estimate: Estimator) -> None:
    rewards_N, group_N = torch.tensor([float("inf"), 1.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1])
    assert estimate(rewards_N, group_N)[2:].isfinite().all()


@every_estimator
def test_the_result_is_float32_without_gradient_whatever_comes_in(estimate: Estimator) -> None:
    rewards_N = torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    advantages_N = estimate(rewards_N, torch.tensor([0, 0, 0]))
    assert advantages_N.dtype == torch.float32
    assert not advantages_N.requires_grad


@every_estimator
@given(step=STEPS, order=st.randoms(use_true_random=False))
def test_the_order_of_the_trajectories_does_not_matter(
    estimate: Estimator, step: list[tuple[float, int]], order
) -> None:
    rewards_N, group_N = columns(step)
    permutation = list(range(len(step)))
    order.shuffle(permutation)
    shuffled_N = estimate(rewards_N[permutation], group_N[permutation])
    torch.testing.assert_close(shuffled_N, estimate(rewards_N, group_N)[permutation], rtol=1e-6, atol=1e-6)


@every_estimator
@given(step=STEPS, order=st.permutations(range(7)))
def test_the_labels_of_the_groups_do_not_matter(
    estimate: Estimator, step: list[tuple[float, int]], order: list[int]
) -> None:
    rewards_N, group_N = columns(step)
    relabelled_N = torch.tensor(order)[group_N + 3] * 1_000_003
    torch.testing.assert_close(estimate(rewards_N, relabelled_N), estimate(rewards_N, group_N), rtol=1e-6, atol=1e-6)


@every_estimator
@given(step=STEPS)
def test_other_groups_do_not_matter(estimate: Estimator, step: list[tuple[float, int]]) -> None:
    rewards_N, group_N = columns(step)
    whole_N = estimate(rewards_N, group_N)
    for label in group_N.unique():
        mine = group_N == label
        torch.testing.assert_close(estimate(rewards_N[mine], group_N[mine]), whole_N[mine], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimate", [group_relative, group_centered, leave_one_out])
@given(step=STEPS)
def test_the_advantages_of_a_group_sum_to_zero(estimate: Estimator, step: list[tuple[float, int]]) -> None:
    rewards_N, group_N = columns(step)
    advantages_N = estimate(rewards_N, group_N)
    for label in group_N.unique():
        mine = group_N == label
        if mine.sum() > 1:
            assert advantages_N[mine].sum().item() == pytest.approx(0.0, abs=1e-4)


@every_estimator
@given(step=STEPS, shift=st.floats(-5, 5, width=32))
def test_a_reward_that_all_get_changes_nothing(
    estimate: Estimator, step: list[tuple[float, int]], shift: float
) -> None:
    rewards_N, group_N = columns([(round(reward, 1), label) for reward, label in step])
    sizes_N = (group_N[:, None] == group_N[None, :]).sum(dim=1)
    lengths_N = (rewards_N.abs() * 10).long() + 1

    def run(rewards_N: Tensor) -> Tensor:
        return length_weighted(rewards_N, group_N, lengths_N) if estimate is by_length else estimate(rewards_N, group_N)

    torch.testing.assert_close(run(rewards_N + shift)[sizes_N > 1], run(rewards_N)[sizes_N > 1], rtol=1e-3, atol=1e-4)
