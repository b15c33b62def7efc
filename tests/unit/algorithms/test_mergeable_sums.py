# SPDX-License-Identifier: Apache-2.0
"""Statistics as sums: shards merge to the same bits in any order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.algorithms.sums import LARGEST, Sums, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Sums):
    amount: float
    peak: float = field(metadata=LARGEST)


def test_fields_are_added_up_and_peaks_are_compared() -> None:
    assert Example(amount=1.5, peak=3.0) + Example(amount=2.0, peak=1.0) == Example(amount=3.5, peak=3.0)


def test_no_shards_merge_to_nothing() -> None:
    assert Example.merge([]) == Example(amount=0.0, peak=0.0)


@given(values=st.lists(st.floats(-1e300, 1e300), max_size=20), order=st.randoms(use_true_random=False))
def test_the_order_of_the_shards_changes_no_bit(values: list[float], order) -> None:
    shuffled = list(values)
    order.shuffle(shuffled)
    merged = Example.merge(Example(amount=value, peak=0.0) for value in values)
    assert merged == Example.merge(Example(amount=value, peak=0.0) for value in shuffled)


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [math.nan, 1.0], [1e308] * 4])
def test_a_diverged_shard_is_reported_and_not_refused(values: list[float]) -> None:
    assert not math.isfinite(total(values))
