# SPDX-License-Identifier: Apache-2.0
"""Ids and jagged blocks of trajectories, against plain Python lists, sets and dicts."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.trajectories import RowColumn, TokenColumn, TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.errors import DataError

SMALL = st.integers(0, 2)  # so that equal ids are common
ONE_ID = st.builds(TrajectoryId, SMALL, SMALL, SMALL, SMALL)
SOME_IDS = st.lists(ONE_ID, max_size=12)
# The same with any sign and size, to catch a comparison that packs four numbers into one.
WIDE = st.sampled_from([-(2**62), -1, 0, 1, 2**31, 2**62])
WIDE_IDS = st.lists(st.builds(TrajectoryId, WIDE, WIDE, WIDE, WIDE), max_size=12)


def of(*pairs):
    return TrajectoryIds.of(TrajectoryId(*pair) for pair in pairs)


def make(rows):
    """A block whose trajectories are given as (id, tokens); every column is made from the tokens."""
    lengths = [len(tokens) for _, tokens in rows]
    flat = np.array([token for _, tokens in rows for token in tokens], np.int32)
    return TrajectoryBlock(
        ids=TrajectoryIds.of(each for each, _ in rows),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens_T=flat,
        loss_mask_T=flat % 2 == 1,
        behavior_logprobs_T=(flat / -4).astype(np.float32),
        versions_T=flat - 1,
    )


def rows_of(block):
    """The block as a list of rows, each with all its columns: what `take` and `concatenate` are measured against."""
    found = []
    for row, each in enumerate(block.ids):
        part = slice(block.offsets[row], block.offsets[row + 1])
        columns = (block.tokens_T, block.loss_mask_T, block.behavior_logprobs_T, block.versions_T)
        found.append((each, *(column[part].tolist() for column in columns)))
    return found


@st.composite
def blocks(draw, min_rows=0):
    num = draw(st.integers(min_rows, 6))
    tokens = st.lists(st.integers(0, 99), max_size=4)
    return make([(draw(ONE_ID), draw(tokens)) for _ in range(num)])


def test_an_id_prints_its_prompt_index_sample_and_attempt_and_its_branch_only_where_it_has_one():
    assert str(TrajectoryId(7, 3)) == "7.3#0"
    assert str(TrajectoryId(7, 3, attempt=2)) == "7.3#2"
    assert str(TrajectoryId(7, 3, 1, 2)) == "7.3.1#2"


def test_many_ids_print_the_first_eight_and_how_many_more_there_are():
    assert str(of((0, 0), (0, 1))) == "0.0#0, 0.1#0"
    assert str(TrajectoryIds.of([])) == ""
    eight = of(*((draw, 0) for draw in range(8)))
    assert str(eight) == "0.0#0, 1.0#0, 2.0#0, 3.0#0, 4.0#0, 5.0#0, 6.0#0, 7.0#0"
    assert str(of(*((draw, 0) for draw in range(11)))) == f"{eight} and 3 more"


def test_ids_order_by_prompt_index_then_sample_then_branch_then_attempt():
    ids = of((1, 0), (0, 2), (0, 1, 1), (0, 1, 0, 5), (0, 1, 0, 4))
    assert ids.order.tolist() == [4, 3, 2, 1, 0]
    assert list(ids.take(ids.order)) == [(0, 1, 0, 4), (0, 1, 0, 5), (0, 1, 1, 0), (0, 2, 0, 0), (1, 0, 0, 0)]


@settings(deadline=None)
@given(SOME_IDS | WIDE_IDS)
def test_the_order_of_ids_is_pythons_stable_order_of_tuples(ids):
    assert TrajectoryIds.of(ids).order.tolist() == sorted(range(len(ids)), key=ids.__getitem__)


@settings(deadline=None)
@given(SOME_IDS | WIDE_IDS)
def test_repeated_ids_are_named_once_and_in_order(ids):
    assert list(TrajectoryIds.of(ids).repeated()) == sorted(each for each, count in Counter(ids).items() if count > 1)


@settings(deadline=None)
@given(SOME_IDS | WIDE_IDS, SOME_IDS | WIDE_IDS)
def test_positions_of_wanted_ids_are_what_a_dict_says(here, wanted):
    here = list(dict.fromkeys(here))  # ids here must not repeat; wanted ones may
    position = {each: at for at, each in enumerate(here)}
    found = TrajectoryIds.of(here).positions_of(TrajectoryIds.of(wanted))
    assert found.tolist() == [position.get(each, -1) for each in wanted]


@settings(deadline=None)
@given(SOME_IDS | WIDE_IDS, SOME_IDS | WIDE_IDS)
def test_ids_without_others_keep_their_order_and_are_what_a_set_leaves(ids, others):
    left = TrajectoryIds.of(ids).without(TrajectoryIds.of(others))
    assert list(left) == [each for each in ids if each not in set(others)]


@settings(deadline=None)
@given(SOME_IDS, st.data())
def test_ids_are_taken_joined_counted_and_indexed_as_a_list_is(ids, data):
    array = TrajectoryIds.of(ids)
    assert list(array) == ids
    assert len(array) == len(ids)
    assert [array[at] for at in range(len(ids))] == ids
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    parts = [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert list(TrajectoryIds.concatenate([TrajectoryIds.of(part) for part in parts])) == ids
    positions = data.draw(st.lists(st.sampled_from(range(len(ids))), max_size=5)) if ids else []
    assert list(array.take(np.array(positions, np.int64))) == [ids[at] for at in positions]


def test_no_ids_at_all_can_be_joined():
    assert len(TrajectoryIds.concatenate([])) == 0


def test_ids_are_the_same_only_in_the_same_order():
    assert of((0, 0), (0, 1)).same_as(of((0, 0), (0, 1)))
    assert not of((0, 0), (0, 1)).same_as(of((0, 1), (0, 0)))
    assert not of((0, 0), (0, 1)).same_as(of((0, 0)))


def test_ids_travel_as_one_array_and_leave_what_they_remember_behind():
    ids = of((2, 0), (1, 0))
    assert ids.order.tolist() == [1, 0]
    travelled = pickle.loads(pickle.dumps(ids))
    assert travelled.same_as(ids)
    assert "order" not in vars(travelled)


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.zeros((2, 3), np.int64), "int64 of shape (2, 3)"),
        (np.zeros(4, np.int64), "int64 of shape (4,)"),
        (np.zeros((2, 4), np.int32), "int32 of shape (2, 4)"),
    ],
)
def test_ids_of_another_shape_or_kind_are_refused(array, shown):
    with pytest.raises(DataError) as refused:
        TrajectoryIds(array)
    assert "(prompt_index, sample, branch, attempt)" in str(refused.value)
    assert str(refused.value).endswith(f" {shown}.")


def test_a_block_knows_its_lengths_and_bytes():
    block = make([((0, 0, 0, 0), [5, 6, 7]), ((0, 1, 0, 0), []), ((1, 0, 0, 0), [8])])
    assert block.lengths_N.tolist() == [3, 0, 1]
    # 3 ids of 32 bytes, 4 offsets of 8, and 4 tokens of 4 + 1 + 4 + 4 bytes.
    assert block.nbytes == 3 * 32 + 4 * 8 + 4 * 13


def test_rows_are_taken_in_the_order_requested():
    block = make([((0, 0, 0, 0), [5, 6]), ((0, 1, 0, 0), [7]), ((1, 0, 0, 0), [8, 9])])
    taken = block.take(np.array([2, 0]))
    assert list(taken.ids) == [(1, 0, 0, 0), (0, 0, 0, 0)]
    assert taken.offsets.tolist() == [0, 2, 4]
    assert taken.tokens_T.tolist() == [8, 9, 5, 6]
    assert taken.versions_T.tolist() == [7, 8, 4, 5]


@settings(deadline=None)
@given(blocks(), st.data())
def test_taken_rows_are_what_a_list_of_rows_gives(block, data):
    positions = data.draw(st.lists(st.sampled_from(range(len(block.ids))), max_size=8)) if len(block.ids) else []
    rows = rows_of(block)
    taken = block.take(np.array(positions, np.int64))
    assert rows_of(taken) == [rows[at] for at in positions]
    assert taken.tokens_T.dtype == np.int32
    assert taken.loss_mask_T.dtype == np.bool_


@settings(deadline=None)
@given(st.lists(blocks(), min_size=1, max_size=4))
def test_joined_blocks_are_what_a_list_of_rows_gives(parts):
    joined = TrajectoryBlock.concatenate(parts)
    assert rows_of(joined) == [row for part in parts for row in rows_of(part)]
    assert joined.versions_T.dtype == np.int32


@settings(deadline=None)
@given(blocks(min_rows=1), st.data())
def test_a_column_is_cut_and_joined_as_its_block_is(block, data):
    positions = np.array(data.draw(st.lists(st.sampled_from(range(len(block.ids))), max_size=5)), np.int64)
    column = TokenColumn.like(block, block.tokens_T * 2.0)
    taken = column.take(positions)
    assert taken.ids.same_as(block.take(positions).ids)
    assert taken.values_T.tolist() == (block.take(positions).tokens_T * 2.0).tolist()
    both = TokenColumn.concatenate([column, taken])
    assert both.lengths_N.tolist() == [*block.lengths_N.tolist(), *taken.lengths_N.tolist()]


@settings(deadline=None)
@given(SOME_IDS, st.data())
def test_one_value_for_each_trajectory_follows_its_row(ids, data):
    column = RowColumn(ids=TrajectoryIds.of(ids), values_N=np.arange(len(ids)) * 1.5)
    positions = data.draw(st.lists(st.sampled_from(range(len(ids))), max_size=5)) if ids else []
    taken = column.take(np.array(positions, np.int64))
    assert list(taken.ids) == [ids[at] for at in positions]
    assert taken.values_N.tolist() == [at * 1.5 for at in positions]
    both = RowColumn.concatenate([column, taken])
    assert list(both.ids) == [*ids, *taken.ids]
    assert both.values_N.tolist() == [*column.values_N.tolist(), *taken.values_N.tolist()]
    assert both.lengths_N.tolist() == [1] * len(both.ids)
    assert both.nbytes == 40 * len(both.ids)


def test_taking_a_stretch_of_rows_copies_nothing():
    block = make([((draw, 0, 0, 0), [draw] * 3) for draw in range(5)])
    assert np.shares_memory(block.take(np.array([1, 2, 3])).tokens_T, block.tokens_T)
    assert not np.shares_memory(block.take(np.array([1, 3])).tokens_T, block.tokens_T)


@pytest.mark.parametrize(
    ("offsets", "found"),
    [
        ([0, 2], 2),  # one row for two ids
        ([1, 2, 4], 3),  # does not begin at 0
        ([0, 5, 4], 3),  # descends
        ([], 0),
    ],
)
def test_offsets_that_are_not_one_more_than_the_ids_or_do_not_ascend_from_0_are_refused(offsets, found):
    with pytest.raises(DataError, match=rf"TokenColumn: 2 trajectories .* 3 .*offsets.* {found}\."):
        TokenColumn(ids=of((0, 0), (0, 1)), offsets=np.array(offsets, np.int64), values_T=np.zeros(4))


def test_a_column_that_has_not_one_value_per_token_is_refused():
    block = make([((0, 0, 0, 0), [1, 2, 3])])
    with pytest.raises(DataError, match=r"TokenColumn\.values_T .* 2 values.*offsets.* 3\b"):
        TokenColumn.like(block, np.zeros(2))


def test_a_value_too_many_for_the_trajectories_is_refused():
    with pytest.raises(DataError, match=r"RowColumn .* 3 values .* 2 trajectories"):
        RowColumn(ids=of((0, 0), (0, 1)), values_N=np.zeros(3))
