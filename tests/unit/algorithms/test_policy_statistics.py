# SPDX-License-Identifier: Apache-2.0
"""What a run knows of its ratios, as sums that micro-batches and ranks add up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.algorithms.policy import PolicyTokens, policy_statistics
from podium.algorithms.statistics import PolicyStatistics


def tokens_of(ratios: list[float], advantages: list[float], sequence: list[int] | None = None) -> PolicyTokens:
    sequence = sequence if sequence is not None else [0] * len(ratios)
    return PolicyTokens(
        logprobs_S=torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True),
        old_logprobs_S=torch.zeros(len(ratios)),
        advantages_S=torch.tensor(advantages),
        sequence_S=torch.tensor(sequence, dtype=torch.int64),
        num_sequences=max(sequence, default=-1) + 1,
    )


def test_each_kind_of_clipping_is_counted_on_its_own() -> None:
    # Risen too far: to be raised more (clipped), to be lowered (kept), to be lowered from 5 (dual clip).
    # Fallen too far: to be lowered more (clipped), to be raised (kept). The last is inside.
    tokens = tokens_of([4.0, 2.0, 5.0, 0.5, 0.5, 1.0], [1.0, -1.0, -1.0, -1.0, 1.0, 1.0])
    statistics = policy_statistics(tokens, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert (statistics.clipped_high, statistics.clipped_low, statistics.clipped_dual) == (1.0, 1.0, 1.0)
    assert (statistics.above, statistics.below) == (3.0, 2.0)
    assert statistics.clip_fraction == pytest.approx(2 / 6)
    assert statistics.dual_clip_fraction == pytest.approx(1 / 6)
    assert (statistics.above + statistics.below) / statistics.count == pytest.approx(5 / 6)


def test_without_a_dual_clip_none_is_counted() -> None:
    assert policy_statistics(tokens_of([5.0], [-1.0]), clip_low=0.2, clip_high=0.2).clipped_dual == 0.0


def test_ratios_and_divergence_by_hand() -> None:
    statistics = policy_statistics(tokens_of([0.5, 2.0], [1.0, 1.0]), clip_low=0.2, clip_high=0.2)
    assert statistics.mean_ratio == pytest.approx(1.25)
    assert statistics.max_ratio == pytest.approx(2.0)
    # (2.5)² / (2 * 4.25)
    assert statistics.effective_share == pytest.approx(0.7352941)
    # The logs are -ln 2 and ln 2: k1 cancels, k3 is the mean of ρ - 1 - ln ρ, which is 0.25.
    assert statistics.kl_k1 == pytest.approx(0.0, abs=1e-7)
    assert statistics.kl_k3 == pytest.approx(0.25)


def test_a_policy_that_did_not_move_has_ratio_one_and_the_whole_sample() -> None:
    statistics = policy_statistics(tokens_of([1.0] * 4, [1.0] * 4), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert (statistics.mean_ratio, statistics.effective_share) == (1.0, 1.0)
    assert (statistics.kl_k1, statistics.kl_k3, statistics.clip_fraction) == (0.0, 0.0, 0.0)


def test_at_the_level_of_sequences_the_ratios_are_geometric_means() -> None:
    tokens = tokens_of([4.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0, 0, 1])
    statistics = policy_statistics(tokens, clip_low=0.5, clip_high=0.5, level="sequence")
    assert statistics.clipped_high == 2.0
    assert statistics.max_ratio == pytest.approx(2.0)


def test_nothing_has_statistics_too() -> None:
    empty = policy_statistics(tokens_of([], []), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert empty == PolicyStatistics.merge([])
    assert (empty.mean_ratio, empty.effective_share, empty.clip_fraction, empty.kl_k3) == (0.0, 0.0, 0.0, 0.0)


@given(
    rows=st.lists(st.tuples(st.floats(0.125, 8, width=32), st.floats(-2, 2, width=32)), min_size=1, max_size=30),
    cut=st.integers(0, 30),
)
def test_two_micro_batches_add_up_to_the_whole(rows: list[tuple[float, float]], cut: int) -> None:
    def run(part: list[tuple[float, float]]) -> PolicyStatistics:
        tokens = tokens_of([ratio for ratio, _ in part], [advantage for _, advantage in part])
        return policy_statistics(tokens, clip_low=0.2, clip_high=0.28, dual_clip=3.0)

    whole, merged = run(rows), run(rows[:cut]) + run(rows[cut:])
    assert merged.max_ratio == whole.max_ratio
    assert merged.clip_fraction == whole.clip_fraction
    assert merged.dual_clip_fraction == whole.dual_clip_fraction
    assert merged.mean_ratio == pytest.approx(whole.mean_ratio, rel=1e-9)
    assert merged.effective_share == pytest.approx(whole.effective_share, rel=1e-9)
    assert merged.kl_k3 == pytest.approx(whole.kl_k3, rel=1e-9, abs=1e-12)
