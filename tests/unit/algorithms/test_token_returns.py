# SPDX-License-Identifier: Apache-2.0
"""Returns and advantages of tokens, beside a loop over every token in float64; whitening from shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.algorithms.returns import gae, moments_of, rewards_to_go
from podium.algorithms.statistics import Moments, Whitening


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Jagged:
    """Trajectories of unequal lengths, laid end to end."""

    rewards_T: Tensor
    values_T: Tensor
    mask_T: Tensor
    offsets: Tensor


# Long enough for several doublings; some of no tokens; any pattern of untrained ones.
LENGTHS = st.lists(st.integers(0, 40), min_size=0, max_size=6)


@st.composite
def jagged(draw: st.DrawFn) -> Jagged:
    lengths = draw(LENGTHS)
    num_tokens = sum(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    trained_share = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    return Jagged(
        rewards_T=torch.randn(num_tokens, generator=generator),
        values_T=torch.randn(num_tokens, generator=generator),
        mask_T=torch.rand(num_tokens, generator=generator) < trained_share,
        offsets=torch.tensor([0, *lengths]).cumsum(0),
    )


def naive_returns(rows: Jagged, gamma: float) -> Tensor:
    """Walks back from each end, one token at a time."""
    result_T = torch.zeros(len(rows.rewards_T), dtype=torch.float64)
    for start, end in pairwise(rows.offsets.tolist()):
        running = 0.0
        for t in reversed(range(start, end)):
            if rows.mask_T[t]:
                running = rows.rewards_T[t].item() + gamma * running
                result_T[t] = running
    return result_T


def naive_gae(rows: Jagged, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Walks back from each end, one token at a time."""
    advantages_T = torch.zeros(len(rows.rewards_T), dtype=torch.float64)
    returns_T = torch.zeros_like(advantages_T)
    for start, end in pairwise(rows.offsets.tolist()):
        next_value = next_advantage = 0.0
        for t in reversed(range(start, end)):
            if rows.mask_T[t]:
                value = rows.values_T[t].item()
                delta = rows.rewards_T[t].item() + gamma * next_value - value
                next_value, next_advantage = value, delta + gamma * lam * next_advantage
                advantages_T[t], returns_T[t] = next_advantage, next_advantage + value
    return advantages_T, returns_T


def test_the_return_is_discounted_over_trained_tokens_only() -> None:
    # Two trajectories. In the first the third token is a tool's: 2 passes through it undiscounted.
    returns_T = rewards_to_go(
        torch.tensor([1.0, 0.0, 9.0, 2.0, 4.0, 8.0]),
        torch.tensor([True, True, False, True, True, True]),
        torch.tensor([0, 4, 6]),
        gamma=0.5,
    )
    assert returns_T.tolist() == [1.5, 1.0, 0.0, 2.0, 8.0, 8.0]


def test_gae_by_hand() -> None:
    # Backwards: δ = 1 - 2 = -1; then δ = 0 + 0.5 * 2 - 1 = 0 and A = 0 + 0.5 * 0.5 * -1 = -0.25.
    advantages_T, returns_T = gae(
        torch.tensor([0.0, 5.0, 1.0]),
        torch.tensor([1.0, 7.0, 2.0]),
        torch.tensor([True, False, True]),
        torch.tensor([0, 3]),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages_T.tolist() == [-0.25, 0.0, -1.0]
    assert returns_T.tolist() == [0.75, 0.0, 1.0]


def test_with_lambda_one_the_target_of_the_value_is_the_return() -> None:
    rewards_T, mask_T, offsets = torch.tensor([0.0, 1.0, 2.0]), torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, 3])
    _, targets_T = gae(rewards_T, torch.tensor([0.3, -0.2, 5.0]), mask_T, offsets, gamma=0.9, lam=1.0)
    torch.testing.assert_close(targets_T, rewards_to_go(rewards_T, mask_T, offsets, gamma=0.9))


@given(rows=jagged(), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_returns_equal_a_walk_over_every_token(rows: Jagged, gamma: float) -> None:
    returns_T = rewards_to_go(rows.rewards_T, rows.mask_T, rows.offsets, gamma=gamma)
    assert returns_T.dtype == torch.float32
    torch.testing.assert_close(returns_T.double(), naive_returns(rows, gamma), rtol=1e-5, atol=1e-5)


@given(rows=jagged(), gamma=st.sampled_from([0.5, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_a_walk_over_every_token(rows: Jagged, gamma: float, lam: float) -> None:
    advantages_T, returns_T = gae(rows.rewards_T, rows.values_T, rows.mask_T, rows.offsets, gamma=gamma, lam=lam)
    naive_advantages_T, naive_returns_T = naive_gae(rows, gamma, lam)
    torch.testing.assert_close(advantages_T.double(), naive_advantages_T, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(returns_T.double(), naive_returns_T, rtol=1e-5, atol=2e-5)


@given(rows=jagged())
def test_what_stands_at_untrained_tokens_does_not_matter(rows: Jagged) -> None:
    def at_trained(values_T: Tensor, other: float) -> Tensor:
        return torch.where(rows.mask_T, values_T, torch.tensor(other))

    a, b = (
        gae(at_trained(rows.rewards_T, x), at_trained(rows.values_T, x), rows.mask_T, rows.offsets, gamma=0.9, lam=0.9)
        for x in (0.0, 1e9)
    )
    assert a[0].tolist() == b[0].tolist()
    assert a[1].tolist() == b[1].tolist()


def test_a_long_trajectory_does_not_reach_into_the_next() -> None:
    lengths = [1000, 1, 999]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rewards_T = torch.zeros(2000)
    rewards_T[offsets[1:] - 1] = torch.tensor([1.0, 2.0, 3.0])
    returns_T = rewards_to_go(rewards_T, torch.ones(2000, dtype=torch.bool), offsets, gamma=1.0)
    assert returns_T.tolist() == [1.0] * 1000 + [2.0] + [3.0] * 999


def test_moments_by_hand() -> None:
    # Of 1, 2, 6 (9 is masked out): mean 3, variance (4 + 1 + 9) / 2 = 7.
    moments = moments_of(torch.tensor([1.0, 9.0, 2.0, 6.0]), torch.tensor([True, False, True, True]))
    assert moments == Moments(3.0, 9.0, 41.0)
    assert moments.mean == 3.0
    assert moments.variance == 7.0
    assert moments.whitening(eps=2.0) == Whitening(shift=3.0, scale=1 / 3)


def test_whitened_values_have_mean_zero_and_variance_one_and_are_zero_outside_of_the_mask() -> None:
    values_T, mask_T = torch.tensor([3.0, 100.0, 5.0, 7.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    whitened_T = moments_of(values_T, mask_T).whitening().apply(values_T, mask_T)
    torch.testing.assert_close(whitened_T, torch.tensor([-1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("values", [[], [0.1], [0.1, 0.1, 0.1]])
def test_values_without_spread_become_zero_not_nan(values: list[float]) -> None:
    values_T, mask_T = torch.tensor(values), torch.ones(len(values), dtype=torch.bool)
    moments = moments_of(values_T, mask_T)
    assert moments.variance == pytest.approx(0.0, abs=1e-16)
    torch.testing.assert_close(moments.whitening().apply(values_T, mask_T), torch.zeros(len(values)))


def test_a_large_mean_does_not_swallow_the_spread() -> None:
    moments = moments_of(torch.tensor([4096.0, 4096.5, 4097.0]), torch.ones(3))
    assert math.isclose(moments.variance, 0.25, rel_tol=1e-6)


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    seed=st.integers(0, 2**31),
    order=st.randoms(use_true_random=False),
)
def test_the_moments_of_shards_merge_to_those_of_the_whole(values, cuts, seed, order) -> None:
    values_T = torch.tensor(values)
    mask_T = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.7
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    shards = [moments_of(values_T[a:b], mask_T[a:b]) for a, b in pairwise(bounds)]
    merged, whole = Moments.merge(shards), moments_of(values_T, mask_T)
    assert merged.count == whole.count
    assert merged.mean == pytest.approx(whole.mean, rel=1e-12, abs=1e-12)
    assert merged.variance == pytest.approx(whole.variance, rel=1e-9, abs=1e-9)

    shuffled = list(shards)
    order.shuffle(shuffled)
    assert Moments.merge(shuffled) == merged
