# SPDX-License-Identifier: Apache-2.0
"""Costs of sequences by their length, against counting pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.data.costs import AttentionCost, SequenceCost, visible_pairs


def counted(length, window):
    """Query i sees the keys up to itself, at most `window` of them."""
    return sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)


@given(st.lists(st.integers(0, 40), max_size=8), st.none() | st.integers(1, 50))
def test_visible_pairs_are_those_that_a_count_finds(lengths, window):
    assert visible_pairs(lengths, window).tolist() == [counted(length, window) for length in lengths]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.floats(0, 10), st.floats(0, 10), st.integers(1, 40))
def test_a_sequence_costs_its_tokens_and_the_pairs_of_each_kind_of_layer(lengths, per_token, per_pair, window):
    full, band = AttentionCost(window=None, per_pair=per_pair), AttentionCost(window=window, per_pair=2.0)
    costs = SequenceCost(per_token=per_token, attention=(full, band)).of(lengths)
    wanted = [per_token * L + per_pair * counted(L, None) + 2.0 * counted(L, window) for L in lengths]
    assert costs == pytest.approx(wanted)


def test_a_plain_cost_is_a_polynomial():
    assert SequenceCost.plain(linear=3.0, quadratic=0.5).of([0, 1, 4]).tolist() == [0.0, 3.5, 20.0]
    assert SequenceCost.plain(linear=2.0).of([5]).tolist() == [10.0]


def test_costs_are_float64_and_long_sequences_do_not_overflow():
    costs = SequenceCost.plain(linear=1e6, quadratic=1e3).of(np.array([2**20], np.int32))
    assert costs.dtype == np.float64
    assert costs[0] == pytest.approx(1e6 * 2**20 + 1e3 * 2**40)
