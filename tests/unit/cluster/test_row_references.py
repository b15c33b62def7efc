# SPDX-License-Identifier: Apache-2.0
"""Rows by reference against a plain dict of rows, and the steps that hold and free them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.cluster.objects import InlineStored, ObjectScope, RowRefs, Stored
from podium.data.trajectories import TokenColumn, TrajectoryId, TrajectoryIds
from podium.errors import ResultError, StoreError


class Watched(TokenColumn):
    """A column that notes which rows were taken from it."""

    def take(self, rows):
        vars(self).setdefault("taken", []).append(rows.tolist())
        return super().take(rows)


class CountedStored(Stored):
    """Says how often it was opened and which rows were taken from it."""

    def __init__(self, column):
        self.column, self.opened = column, 0

    @property
    def taken(self):
        return vars(self.column).get("taken", [])

    def read(self):
        self.opened += 1
        return self.column

    def free(self, reason):
        """Nothing is held."""


def of(*draws):
    return TrajectoryIds.of(TrajectoryId(draw, 0) for draw in draws)


def column(*draws, kind=TokenColumn):
    """Trajectory d has d mod 4 tokens of value d."""
    lengths = [draw % 4 for draw in draws]
    return kind(
        ids=of(*draws),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        values_T=np.repeat(np.array(draws, np.int64), lengths),
    )


def stored(*draws):
    made = column(*draws)
    return RowRefs.whole(InlineStored(made), made.ids, made.lengths_N)


def counted(*draws):
    made = CountedStored(column(*draws, kind=Watched))
    return made, RowRefs.whole(made, made.column.ids, made.column.lengths_N)


def draws_of(refs):
    return [each.prompt_index for each in refs.ids]


def check(refs, draws):
    """Ids, lengths and (if there are any) the rows themselves are those of these draws, in this order."""
    assert draws_of(refs) == draws
    assert refs.lengths_N.tolist() == [draw % 4 for draw in draws]
    assert len(refs) == len(draws)
    if draws:
        found, wanted = refs.read(), column(*draws)
        assert found.ids.same_as(wanted.ids)
        assert found.offsets.tolist() == wanted.offsets.tolist()
        assert found.values_T.tolist() == wanted.values_T.tolist()


@st.composite
def stores(draw):
    """Draws dealt over several stored objects, in any order."""
    draws = draw(st.lists(st.integers(0, 40), unique=True, max_size=15))
    cuts = sorted(draw(st.lists(st.integers(0, len(draws)), max_size=4)))
    return [draws[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(draws)], strict=True)]


def test_a_whole_object_is_referred_to_in_ascending_order_of_id():
    check(stored(5, 9, 12), [5, 9, 12])
    refs = stored(12, 5, 9)
    assert refs.row_N.tolist() == [1, 2, 0]
    check(refs, [5, 9, 12])


@settings(deadline=None)
@given(stores())
def test_joined_references_are_all_rows_in_ascending_order(pieces):
    check(RowRefs.join([stored(*piece) for piece in pieces]), sorted(draw for piece in pieces for draw in piece))


@settings(deadline=None)
@given(stores(), st.data())
def test_taken_rows_are_those_at_the_positions_and_need_only_their_own_objects(pieces, data):
    joined = RowRefs.join([stored(*piece) for piece in pieces])
    positions = data.draw(st.lists(st.sampled_from(range(len(joined))), unique=True)) if len(joined) else []
    taken = joined.take(np.array(positions, np.int64))
    draws = [draws_of(joined)[at] for at in positions]
    check(taken, draws)
    assert len(taken.pieces) == sum(bool(set(piece) & set(draws)) for piece in pieces)


@settings(deadline=None)
@given(stores(), st.data())
def test_selected_rows_are_those_of_the_ids_in_their_order(pieces, data):
    joined = RowRefs.join([stored(*piece) for piece in pieces])
    wanted = data.draw(st.lists(st.sampled_from(draws_of(joined)), unique=True)) if len(joined) else []
    check(joined.select(of(*wanted)), wanted)
    check(joined.select(of(*wanted)).select(of(*wanted[::-1])), wanted[::-1])


@settings(deadline=None)
@given(stores(), st.data())
def test_what_was_cut_apart_can_be_joined_again(pieces, data):
    joined = RowRefs.join([stored(*piece) for piece in pieces])
    side = data.draw(st.lists(st.booleans(), min_size=len(joined), max_size=len(joined)))
    parts = [joined.take(np.flatnonzero(np.array(side, bool) == which)) for which in (True, False)]
    check(RowRefs.join(parts), draws_of(joined))


def test_nothing_joined_is_nothing():
    check(RowRefs.join([]), [])


def test_a_trajectory_that_is_stored_twice_is_refused():
    with pytest.raises(ResultError, match=r": 2\.0#0, 3\.0#0"):
        RowRefs.join([stored(1, 2, 3), stored(3, 2)])


def test_a_trajectory_that_is_not_stored_cannot_be_selected():
    with pytest.raises(ResultError, match=r": 7\.0#0, 4\.0#0"):
        stored(1, 2, 3).select(of(7, 2, 4))


def test_no_rows_at_all_cannot_be_read():
    with pytest.raises(ResultError, match=r"len\(\)"):
        stored(1, 2).take(np.array([], np.int64)).read()


def test_of_each_object_only_the_needed_rows_are_copied():
    (first, one), (second, two), (third, three) = counted(1, 2, 3, 5), counted(6, 7), counted(9, 10)
    refs = RowRefs.join([one, two, three]).select(of(2, 5, 6, 7))
    check(refs, [2, 5, 6, 7])
    assert first.taken == [[1, 3]]
    assert second.taken == []  # a whole object is joined as it is
    assert (first.opened, second.opened, third.opened) == (1, 1, 0)
    assert third not in refs.pieces


def test_a_whole_object_is_read_without_a_copy():
    made = column(1, 2, 3)
    refs = RowRefs.whole(InlineStored(made), made.ids, made.lengths_N)
    assert refs.read() is made


def test_an_object_that_has_no_row_among_those_requested_is_not_opened():
    # A data rank without rows still stores its empty answer.
    (empty, none), (_, some) = counted(), counted(1, 2)
    check(RowRefs.join([none, some]), [1, 2])
    assert empty.opened == 0


def test_an_object_that_two_parts_share_is_opened_once():
    shared, refs = counted(1, 2, 3, 5)
    joined = RowRefs.join([refs.select(of(1, 5)), refs.select(of(2))])
    check(joined, [1, 2, 5])
    assert shared.opened == 1


def test_rows_of_several_objects_come_in_the_order_of_the_ids_requested():
    refs = RowRefs.join([stored(1, 6, 3), stored(2, 5)])
    check(refs.select(of(5, 1, 2, 6)), [5, 1, 2, 6])


def test_stored_rows_of_other_trajectories_than_the_references_say_are_refused():
    refs = RowRefs.whole(InlineStored(column(1, 2)), of(1, 3), np.array([1, 3]))
    with pytest.raises(ResultError) as refused:
        refs.read()
    assert str(refused.value) == (
        "the stored rows are of other trajectories than their references say: asked for 1.0#0, 3.0#0, found 1.0#0, "
        "2.0#0."
    )


def test_a_step_frees_what_it_held_and_a_later_read_says_why():
    refs = stored(1, 2, 3)
    with ObjectScope("step 7") as step:
        assert step.hold(refs) is refs
        check(refs, [1, 2, 3])
    with pytest.raises(StoreError, match="step 7"):
        refs.read()


def test_a_step_that_fails_frees_what_it_held_too():
    refs = stored(1)

    def fail():
        with ObjectScope("step 0") as step:
            step.hold(refs)
            raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        fail()
    with pytest.raises(StoreError):
        refs.read()


def test_a_step_leaves_alone_what_it_was_not_given():
    held, other = stored(1), stored(2)
    with ObjectScope("step 0") as step:
        step.hold(held)
    check(other, [2])


def test_holding_rows_twice_frees_them_once_and_by_all_names():
    refs = stored(1, 2)
    with ObjectScope("step 0") as step:
        step.hold(refs)
        step.hold(refs.select(of(2)))
    with pytest.raises(StoreError):
        refs.select(of(2)).read()
