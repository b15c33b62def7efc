# SPDX-License-Identifier: Apache-2.0
"""Which neighbouring slots are read in one call, and when slots are moved so that they are neighbours."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from podium.rollout.native.slots import Segment, arrange, reading_cost, segments


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


CALL = reading_cost(ints([0]), ints([1])) - 1  # what a call costs beside the positions that it reads


@st.composite
def rows_in_slots(draw: st.DrawFn, most: int = 8) -> tuple[list[int], list[int]]:
    """(slots, lengths), in the order of slots, with gaps."""
    slots = draw(st.sets(st.integers(0, most + 4), min_size=1, max_size=most))
    return sorted(slots), draw(st.lists(st.integers(1, 4000), min_size=len(slots), max_size=len(slots)))


def cost(slots: list[int], lengths: list[int], cuts: tuple[int, ...]) -> float:
    """Every part is read as far as its longest; one with a gap in it cannot be read."""
    total = 0.0
    for a, b in itertools.pairwise([0, *cuts, len(slots)]):
        if slots[b - 1] - slots[a] != b - 1 - a:
            return float("inf")
        total += CALL + max(lengths[a:b]) * (b - a)
    return total


@given(rows_in_slots())
def test_no_other_cut_into_calls_costs_less(rows: tuple[list[int], list[int]]) -> None:
    slots, lengths = rows
    inner = range(1, len(slots))
    cheapest = min(
        cost(slots, lengths, cuts) for count in range(len(slots)) for cuts in itertools.combinations(inner, count)
    )
    assert reading_cost(ints(slots), ints(lengths)) == cheapest


@given(rows_in_slots(most=40))
def test_segments_are_a_partition_into_neighbours_and_never_dearer_than_a_call_for_each(
    rows: tuple[list[int], list[int]],
) -> None:
    slots, lengths = rows
    found = segments(ints(slots), ints(lengths))
    assert [i for each in found for i in range(each.start, each.stop)] == list(range(len(slots)))
    for each in found:
        assert np.diff(slots[each.start : each.stop]).tolist() == [1] * (each.stop - each.start - 1)
    price = reading_cost(ints(slots), ints(lengths))
    assert price <= cost(slots, lengths, tuple(range(1, len(slots))))
    assert price <= cost(slots, lengths, ())


def test_like_lengths_are_read_together_and_a_long_one_alone() -> None:
    """Padding three rows of 10 to 5000 would cost 14,970 positions, a second call costs 1200."""
    assert CALL == 1200
    assert segments(ints([4, 5, 6]), ints([10, 12, 11])) == [Segment(0, 3)]
    assert segments(ints([0, 1, 2, 3]), ints([5000, 10, 12, 11])) == [Segment(0, 1), Segment(1, 4)]
    assert reading_cost(ints([0, 1, 2, 3]), ints([5000, 10, 12, 11])) == 1200 + 5000 + 1200 + 3 * 12


def test_a_gap_between_slots_takes_a_call_more() -> None:
    assert segments(ints([0, 1, 5]), ints([10, 10, 10])) == [Segment(0, 2), Segment(2, 3)]
    assert segments(ints([]), ints([])) == []


@given(rows_in_slots(most=12), st.randoms(use_true_random=False))
def test_an_arrangement_is_a_permutation_that_makes_reading_cheaper(
    rows: tuple[list[int], list[int]], order: Random
) -> None:
    """Rows that are moved at all lie in front then, one beside the other."""
    pairs = list(zip(*rows, strict=True))
    order.shuffle(pairs)
    slots, lengths = ([pair[i] for pair in pairs] for i in range(2))
    found = arrange(ints(slots), ints(lengths))
    if found is None:
        return
    target_of = found.target_of
    assert sorted(target_of) == sorted(target_of.values())
    assert all(source != target for source, target in target_of.items())
    after = [target_of.get(slot, slot) for slot in slots]
    assert sorted(after) == list(range(len(slots)))
    assert reading_cost(ints(after), ints(lengths)) < reading_cost(ints(slots), ints(lengths))
    assert found.tokens == max(lengths)


def test_a_hole_is_filled_from_behind_with_one_move() -> None:
    found = arrange(ints([0, 2, 3]), ints([50, 50, 50]))
    assert found is not None
    assert found.target_of == {3: 1, 1: 3}


def test_rows_that_are_neighbours_already_stay_where_they_are() -> None:
    assert arrange(ints([0, 1, 2]), ints([50, 40, 30])) is None
    assert arrange(ints([5, 6, 7]), ints([50, 40, 30])) is None
    assert arrange(ints([]), ints([])) is None


def test_a_move_that_costs_more_than_a_call_saves_is_not_made() -> None:
    """One call less for some steps is not worth moving a row of 100,000 positions."""
    assert arrange(ints([0, 2]), ints([100_000, 100_000])) is None
    assert arrange(ints([0, 2]), ints([100, 100])) is not None


def test_long_rows_between_short_ones_are_sorted_to_the_front_when_rows_are_moved_anyway() -> None:
    """Where they are: five runs of neighbours. Filled up in place, the long ones would stay apart."""
    slots, lengths = [1, 2, 4, 6, 7, 8, 13, 14], [17, 586, 41, 17, 586, 41, 17, 586]
    found = arrange(ints(slots), ints(lengths))
    assert found is not None
    after = {found.target_of.get(slot, slot): length for slot, length in zip(slots, lengths, strict=True)}
    assert [after[slot] for slot in range(8)] == [586, 586, 586, 41, 41, 17, 17, 17]
