# SPDX-License-Identifier: Apache-2.0
"""What simulated critics and scorers compute in NumPy, beside the same formulas in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.algorithms import returns
from podium.algorithms.kl import KlEstimator, kl_estimate
from podium.controller.simulation import scoring
from podium.controller.simulation.critic import gae
from podium.data.trajectories import TokenColumn, TrajectoryBlock, TrajectoryIds
from podium.roles import distances

ids = TrajectoryIds(np.array([(3, 0, 0, 1), (3, 1, 0, 0), (4, 0, 0, 0)], np.int64))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 1000),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_advantages_and_returns_are_those_of_the_real_critic_bit_for_bit(
    lengths: list[int], seed: int, gamma: float, lam: float
) -> None:
    rng, offsets = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rewards_T, values_T = (rng.normal(size=offsets[-1]).astype(np.float32) for _ in range(2))
    trained_T = rng.random(offsets[-1]) < 0.7

    found = gae(rewards_T, values_T, trained_T, offsets, gamma=gamma, lam=lam)

    tensors = (torch.from_numpy(each) for each in (rewards_T, values_T, trained_T, offsets))
    for mine, real in zip(found, returns.gae(*tensors, gamma=gamma, lam=lam), strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_array_equal(mine, real.numpy())


def _block() -> TrajectoryBlock:
    """Three episodes of 3, 0 and 4 tokens; the second token of the last one is a tool's."""
    versions_T = np.array([0, 0, 1, 0, -1, 1, 1], np.int32)
    return TrajectoryBlock(
        ids=ids, offsets=np.array([0, 3, 3, 7], np.int64), tokens_T=np.zeros(7, np.int32), loss_mask_T=versions_T >= 0,
        behavior_logprobs_T=np.linspace(-0.5, 0.0, 7, dtype=np.float32), versions_T=versions_T,
    )  # fmt: skip


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_straight"])
def test_the_distance_of_a_token_is_that_of_the_real_estimator(estimator: KlEstimator) -> None:
    block, values_T = _block(), np.linspace(0.2, -0.9, 7, dtype=np.float32)
    found = scoring.kl_distance(block, TokenColumn.like(block, values_T), estimator)
    real = kl_estimate(torch.from_numpy(block.behavior_logprobs_T.copy()), torch.from_numpy(values_T), estimator)
    np.testing.assert_allclose(found, real.numpy(), rtol=1e-5, atol=1e-7)


def test_the_distance_of_an_episode_is_that_of_a_real_scorer() -> None:
    block = _block()
    column = TokenColumn.like(block, np.linspace(0.2, -0.9, 7, dtype=np.float32))
    found, real = scoring.distance(block, column), distances.distance(block, column)
    for name in ("k1_N", "k2_N", "k3_N"):
        np.testing.assert_allclose(getattr(found, name), getattr(real, name), rtol=1e-5)
    assert found.tokens_N.tolist() == real.tokens_N.tolist() == [2, 0, 2]


def test_numbers_follow_from_weights_and_episode_and_not_from_the_attempt() -> None:
    again = TrajectoryIds(ids.array_N4 + np.array([0, 0, 0, 5]))
    numbers = scoring.numbers("abc", ids)
    assert numbers.tolist() == scoring.numbers("abc", again).tolist()
    assert len({*numbers.tolist(), *scoring.numbers("abd", ids).tolist()}) == 6
    assert np.abs(numbers).max() <= 1.0
