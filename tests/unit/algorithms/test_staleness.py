# SPDX-License-Identifier: Apache-2.0
"""Statistics by the age of tokens, computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from podium.algorithms.staleness import AgeStatistics, merge_ages, statistics_by_age


def test_statistics_by_age_by_hand() -> None:
    # Age 0: the learner computes what was sampled. Age 2: ratios 2 and 1/2.
    learner = np.log(np.array([0.5, 0.4, 0.2], np.float32))
    behavior = np.log(np.array([0.5, 0.2, 0.4], np.float32))
    by_age = statistics_by_age(learner, behavior, np.array([0, 2, 2]))

    assert sorted(by_age) == [0, 2]
    assert (by_age[0].kl, by_age[0].effective_share) == (pytest.approx(0.0, abs=1e-7), pytest.approx(1.0))
    k3 = (2 - 1 - math.log(2) + 0.5 - 1 - math.log(0.5)) / 2
    assert by_age[2].kl == pytest.approx(k3, rel=1e-5)
    assert by_age[2].effective_share == pytest.approx(2.5**2 / 4.25 / 2, rel=1e-5)


def test_shards_merge_to_the_same_as_one() -> None:
    random = np.random.default_rng(3)
    learner, behavior, age = random.normal(size=64), random.normal(size=64), random.integers(0, 4, 64)
    parts = [statistics_by_age(learner[rows], behavior[rows], age[rows]) for rows in np.split(np.arange(64), 4)]
    merged, whole = merge_ages(parts), statistics_by_age(learner, behavior, age)

    assert sorted(merged) == sorted(whole)
    for each in whole:
        assert merged[each].kl == pytest.approx(whole[each].kl)
        assert merged[each].effective_share == pytest.approx(whole[each].effective_share)


def test_far_ratios_stay_finite_and_nothing_is_nothing() -> None:
    by_age = statistics_by_age(np.array([0.0]), np.array([-1e4]), np.array([1]))
    assert math.isfinite(by_age[1].kl)
    assert AgeStatistics.merge([]).kl == 0.0
    assert merge_ages([]) == {}
