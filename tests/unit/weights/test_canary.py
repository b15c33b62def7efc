# SPDX-License-Identifier: Apache-2.0
"""Canaries are of one version and always the same; the gap between log-probs is measured and alarmed on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from podium.data.trajectories import TokenColumn, TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.errors import DataError
from podium.weights.canary import GapLimits, LogprobGap, choose_canaries


def block_of(versions: Sequence[Sequence[int]], draws: Sequence[int] | None = None) -> TrajectoryBlock:
    flat = np.array([each for row in versions for each in row], np.int32)
    return TrajectoryBlock(
        ids=TrajectoryIds.of(TrajectoryId(draw, 0) for draw in (draws or range(len(versions)))),
        offsets=np.cumsum([0, *map(len, versions)]).astype(np.int64),
        tokens_T=np.zeros(len(flat), np.int32),
        loss_mask_T=flat >= 0,
        behavior_logprobs_T=np.where(flat >= 0, -1.0, 0.0).astype(np.float32),
        versions_T=flat,
    )


def learner(block: TrajectoryBlock, delta: float | Sequence[float]) -> TokenColumn:
    return TokenColumn.like(block, (block.behavior_logprobs_T + np.float32(delta)).astype(np.float32))


def test_only_trajectories_that_the_current_version_sampled_throughout_are_chosen() -> None:
    block = block_of([[-1, 3, 3], [-1, 2, 3], [-1, -1], [3, -1, 3], [-1, 4], []])
    assert choose_canaries(block, 3, 10).tolist() == [0, 3]
    assert choose_canaries(block, 2, 10).tolist() == []


def test_few_of_many_are_spread_over_the_ids_whatever_order_they_lie_in() -> None:
    draws = [5, 0, 4, 1, 3, 2, 6]
    block = block_of([[-1, 3]] * 7, draws)
    chosen = choose_canaries(block, 3, 3)
    assert [draws[row] for row in chosen.tolist()] == [0, 3, 6]
    assert choose_canaries(block, 3, 1).tolist() == [1]
    assert choose_canaries(block, 3, 0).tolist() == []


def test_the_gap_is_over_sampled_tokens_that_something_stands_before() -> None:
    block = block_of([[-1, 3, 3], [3, 3, -1]])
    gap = LogprobGap.between(block, learner(block, [9.0, 0.1, -0.3, 9.0, 0.2, 9.0]))
    assert gap.count == 3
    assert gap.mean == pytest.approx(0.2, abs=1e-6)
    assert gap.largest == pytest.approx(0.3, abs=1e-6)
    assert gap.mean_ratio == pytest.approx((math.exp(0.1) + math.exp(-0.3) + math.exp(0.2)) / 3, abs=1e-6)


def test_gaps_of_ranks_add_up() -> None:
    first, second = block_of([[-1, 3, 3]]), block_of([[-1, 3]], [1])
    both = TrajectoryBlock.concatenate([first, second])
    parts = [LogprobGap.between(first, learner(first, 0.5)), LogprobGap.between(second, learner(second, -0.25))]
    whole = LogprobGap.between(both, learner(both, [0, 0.5, 0.5, 0, -0.25]))
    assert LogprobGap.merge(parts) == whole
    assert LogprobGap.merge([]) == LogprobGap(count=0, sum_abs=0.0, sum_ratio=0.0, largest=0.0)


def gap_of(mean: float, count: int = 100) -> LogprobGap:
    return LogprobGap(count=count, sum_abs=mean * count, sum_ratio=float(count), largest=2 * mean)


def test_a_gap_above_either_limit_exceeds_them() -> None:
    block = block_of([[-1, 3, 3]])
    float32, bfloat16 = GapLimits.of("float32"), GapLimits.of("bfloat16")
    assert not LogprobGap.between(block, learner(block, 5e-5)).exceeds(float32)
    assert not LogprobGap.between(block, learner(block, 0.02)).exceeds(bfloat16)
    assert LogprobGap.between(block, learner(block, 0.02)).exceeds(float32)
    assert LogprobGap.between(block, learner(block, [0, 1.1e-3, 0])).exceeds(GapLimits(mean=1, largest=1e-3))
    assert LogprobGap.between(block, learner(block, 0.2)).exceeds(bfloat16)


def test_a_gap_that_is_not_a_number_exceeds_every_limit_and_none_at_all_does_not() -> None:
    block = block_of([[-1, 3, 3]])
    broken = LogprobGap.between(block, learner(block, [0, math.nan, 0]))
    assert broken.exceeds(GapLimits.of("bfloat16"))
    assert LogprobGap.merge([broken, LogprobGap.between(block, learner(block, 0.0))]).exceeds(GapLimits.of("bfloat16"))
    empty = block_of([])
    assert not LogprobGap.between(empty, learner(empty, 0.0)).exceeds(GapLimits.of("float32"))


def test_log_probs_of_other_trajectories_are_refused() -> None:
    block = block_of([[-1, 3], [-1, 3]])
    other = block_of([[-1, 3], [-1, 3]], [1, 0])
    with pytest.raises(DataError):
        LogprobGap.between(block, learner(other, 0.0))


def test_the_widest_group_is_found_over_all_ranks() -> None:
    """Group 1 is on two ranks: 0.5 in the mean. Group 2 has 0.4, and one token that is further off than any other."""
    first = LogprobGap.of(np.array([0.5, -0.75, 0.0]), np.array([1, 1, 2]))
    second = LogprobGap.of(np.array([0.25, -0.8]), np.array([1, 2]))
    assert first.by_group == {1: (1.25, 2), 2: (0.0, 1)}
    assert LogprobGap.merge([first, second]).widest_group == (1, 0.5)
    assert LogprobGap.merge([]).widest_group is None
