# SPDX-License-Identifier: Apache-2.0
"""How episodes are dealt to mini-batches, ranks and micro-steps: each once an epoch, groups whole where they can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made_batches import WORKER, make_answer, make_rollouts
from podium.cluster.results import ShardResult
from podium.data.splitting import split_rows
from podium.data.trajectories import TokenColumn, TrajectoryIds
from podium.roles.carriers import DistanceNote
from podium.roles.mini_batches import deal_mini_batches, even_parts, joined_distance, mini_batch_order, rank_batches

GROUPS = st.lists(st.integers(0, 7), min_size=1, max_size=40).map(lambda groups: np.array(sorted(groups)))


def _order(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- mini-batches ---


@given(GROUPS, st.integers(1, 6), st.integers(0, 3))
def test_groups_are_whole_where_there_are_enough_of_them(group_N: np.ndarray, count: int, seed: int) -> None:
    dealt = deal_mini_batches(group_N, count, _order(seed))

    assert dealt.shape == group_N.shape
    assert ((dealt >= 0) & (dealt < count)).all()
    draws = np.unique(group_N)
    if len(draws) >= count:
        assert all(len(np.unique(dealt[group_N == draw])) == 1 for draw in draws)
        sizes = [len(np.unique(group_N[dealt == number])) for number in range(count)]
        assert max(sizes) - min(sizes) <= 1


@given(GROUPS, st.integers(1, 6), st.integers(0, 3))
def test_episodes_are_dealt_evenly_where_groups_are_too_few(group_N: np.ndarray, count: int, seed: int) -> None:
    dealt = deal_mini_batches(group_N, count, _order(seed))

    if len(np.unique(group_N)) < count <= len(group_N):
        sizes = np.bincount(dealt, minlength=count)
        assert sizes.max() - sizes.min() <= 1


def test_the_same_seed_deals_the_same_and_another_deals_another() -> None:
    group_N = np.repeat(np.arange(16), 4)

    first, again, other = (deal_mini_batches(group_N, 4, _order(seed)).tolist() for seed in (5, 5, 6))

    assert first == again != other


def test_one_mini_batch_has_everything() -> None:
    assert deal_mini_batches(np.array([3, 3, 9]), 1, _order()).tolist() == [0, 0, 0]


def test_the_first_epoch_is_in_order_and_later_ones_are_shuffled() -> None:
    sequence = mini_batch_order(8, 3, _order())

    assert sequence[:8] == list(range(8))
    assert sorted(sequence[8:16]) == sorted(sequence[16:]) == list(range(8))
    assert sequence[8:16] != list(range(8))
    assert mini_batch_order(3, 1, _order()) == [0, 1, 2]


# --- ranks and micro-steps ---


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    mini_batches=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2),
)
def test_every_episode_is_computed_once_an_epoch(
    lengths: list[int], ranks: int, mini_batches: int, epochs: int, seed: int
) -> None:
    lengths_N, group_N, order = np.array(lengths), np.arange(len(lengths)) // 3, _order(seed)
    mini_batch_N = deal_mini_batches(group_N, mini_batches, order)
    split = split_rows(lengths_N, lengths_N.astype(float), num_ranks=ranks, max_tokens=40, mini_batch_N=mini_batch_N)
    sequence = mini_batch_order(len(split.micro_steps_B), epochs, order)

    dealt = [rank_batches(split, rank, sequence) for rank in range(ranks)]

    assert sorted(np.concatenate([mine for mine, _ in dealt]).tolist()) == list(range(len(lengths)))
    for number, mini_batch in enumerate(sequence):
        # Ranks meet in collectives: as many micro-steps on all of them.
        assert len({len(batches[number]) for _, batches in dealt}) == 1
        rows = [mine[part] for mine, batches in dealt for part in batches[number]]
        assert sorted(np.concatenate(rows).tolist()) == np.flatnonzero(mini_batch_N == mini_batch).tolist()
        assert all(lengths_N[part].sum() <= 40 for part in rows)
    seen = np.concatenate([mine[part] for mine, batches in dealt for steps in batches for part in steps])
    assert (np.bincount(seen, minlength=len(lengths)) == epochs).all()


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5))
def test_parts_for_ranks_have_each_row_once_in_ascending_order(lengths: list[int], count: int) -> None:
    parts = even_parts(np.array(lengths, np.int64), count)

    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_parts_for_ranks_have_about_as_many_tokens() -> None:
    parts = even_parts(np.array([60, 10, 20, 30]), 2)

    assert sorted(sorted(part.tolist()) for part in parts) == [[0], [1, 2, 3]]


# --- what ranks say of distances ---


def _said(ids: TrajectoryIds, values: list[float]) -> ShardResult[TokenColumn]:
    numbers = np.array(values)
    note = DistanceNote(k1_N=numbers, k2_N=numbers * 2, k3_N=numbers * 3, tokens_N=numbers.astype(np.int64))
    return ShardResult(
        worker=WORKER, rank=0, ids=ids, lengths_N=np.ones(len(ids), np.int64),
        stored=None, metrics=(), note=note,
    )  # fmt: skip


def test_distances_of_several_ranks_are_in_the_order_of_the_rows() -> None:
    rows = make_rollouts([make_answer(draw) for draw in range(4)]).rows
    results = [
        _said(rows.ids.take(np.array([1, 3])), [1.0, 3.0]),
        _said(rows.ids.take(np.empty(0, np.int64)), []),
        _said(rows.ids.take(np.array([0, 2])), [0.0, 2.0]),
    ]

    joined = joined_distance(results, rows)

    assert joined.k1_N.tolist() == [0, 1, 2, 3]
    assert joined.k2_N.tolist() == [0, 2, 4, 6]
    assert joined.k3_N.tolist() == [0, 3, 6, 9]
    assert joined.tokens_N.tolist() == [0, 1, 2, 3]
