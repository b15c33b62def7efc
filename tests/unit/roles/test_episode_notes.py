# SPDX-License-Identifier: Apache-2.0
"""Notes and rewards of turns stay with their rows, however rows are taken and blocks are joined."""

# N episodes · K rewards of turns

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers.made_batches import make_task
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryId
from podium.roles.carriers import EpisodeNote, PromptShard, TurnRewards

TURNS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(-3, 3)), max_size=10)
ROWS = st.permutations(range(6)).flatmap(lambda rows: st.integers(0, 6).map(lambda count: rows[:count]))


def _turns(given: list[tuple[int, int, int]]) -> TurnRewards:
    array = np.array(given, np.int64).reshape(-1, 3)
    return TurnRewards(row_K=array[:, 0], token_K=array[:, 1], reward_K=array[:, 2].astype(np.float64))


def _listed(turns: TurnRewards) -> list[tuple[int, int, float]]:
    return list(zip(turns.row_K.tolist(), turns.token_K.tolist(), turns.reward_K.tolist(), strict=True))


def _note(first: int, count: int, turns: list[tuple[int, int, int]], errors: set[int]) -> EpisodeNote:
    """Rows that are told apart by their numbers, from `first` on."""
    rows = np.arange(first, first + count)
    return EpisodeNote(
        finish_N=(rows % 7).astype(np.int8), sampled_N=rows * 10, trained_N=rows * 20, turns_N=rows * 30,
        version_N=rows * 40, newest_version_N=rows * 41, environment_N=rows / 8,
        turn_rewards=_turns([each for each in turns if each[0] < count]),
        errors={row: f"row {first + row}" for row in sorted(errors) if row < count}, counts={"calls": rows * 50.0},
    )  # fmt: skip


def test_rewards_of_turns_are_counted_anew_for_the_rows_that_are_taken() -> None:
    turns = _turns([(0, 3, 1), (2, 4, 2), (2, 9, 3), (3, 1, 4)])

    assert _listed(turns.take(np.array([2, 0]))) == [(1, 3, 1.0), (0, 4, 2.0), (0, 9, 3.0)]
    assert _listed(turns.take(np.array([1]))) == []
    assert _listed(turns.take(np.array([5, 3]))) == [(1, 1, 4.0)]
    assert _listed(TurnRewards.none().take(np.array([0, 1]))) == []


@given(TURNS, ROWS)
def test_every_reward_of_a_taken_row_stays_with_it(given: list[tuple[int, int, int]], rows: list[int]) -> None:
    taken = _turns(given).take(np.array(rows, np.int64))

    by_row = [sorted((token, float(reward)) for row, token, reward in given if row == wanted) for wanted in rows]
    found = [sorted(each[1:] for each in _listed(taken) if each[0] == place) for place in range(len(rows))]
    assert found == by_row
    assert len(_listed(taken)) == sum(map(len, by_row))


@given(TURNS, TURNS, st.integers(6, 9))
def test_joined_rewards_are_taken_apart_again(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], rows: int
) -> None:
    one, two = _turns(first), _turns(second)

    joined = TurnRewards.concatenate([(one, rows), (two, 6)])

    assert _listed(joined.take(np.arange(rows))) == _listed(one)
    assert _listed(joined.take(np.arange(rows, rows + 6))) == _listed(two)


@given(TURNS, st.sets(st.integers(0, 5)), ROWS)
def test_a_note_is_taken_row_by_row(turns: list[tuple[int, int, int]], errors: set[int], rows: list[int]) -> None:
    taken = _note(0, 6, turns, errors).take(np.array(rows, np.int64))

    assert taken.sampled_N.tolist() == [row * 10 for row in rows]
    assert taken.trained_N.tolist() == [row * 20 for row in rows]
    assert taken.turns_N.tolist() == [row * 30 for row in rows]
    assert taken.version_N.tolist() == [row * 40 for row in rows]
    assert taken.environment_N.tolist() == [row / 8 for row in rows]
    assert taken.finish_N.tolist() == rows
    assert taken.errors == {place: f"row {row}" for place, row in enumerate(rows) if row in errors}
    assert len(_listed(taken.turn_rewards)) == sum(each[0] in rows for each in turns)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), TURNS, st.sets(st.integers(0, 3)))
def test_joined_notes_are_taken_apart_again(
    counts: list[int], turns: list[tuple[int, int, int]], errors: set[int]
) -> None:
    firsts = np.cumsum([0, *counts]).tolist()
    parts = [_note(first, count, turns, errors) for first, count in zip(firsts, counts, strict=False)]

    joined = EpisodeNote.concatenate(parts)

    assert joined.sampled_N.tolist() == [row * 10 for row in range(sum(counts))]
    assert joined.counts["calls"].tolist() == [row * 50.0 for row in range(sum(counts))]
    for first, part in zip(firsts, parts, strict=False):
        again = joined.take(np.arange(first, first + len(part.finish_N)))
        assert again.errors == part.errors
        assert _listed(again.turn_rewards) == _listed(part.turn_rewards)
        assert again.version_N.tolist() == part.version_N.tolist()


def test_rewards_of_turns_do_not_tell_in_which_order_their_blocks_came() -> None:
    turns = _turns([(1, 4, 7), (1, 9, 8), (0, 2, 5)])

    assert _listed(turns.by_row()) == [(0, 2, 5), (1, 4, 7), (1, 9, 8)]


def test_counts_that_only_some_blocks_have_are_joined_too() -> None:
    one, two = _note(0, 1, [], set()), _note(1, 1, [], set())
    odd = EpisodeNote(**{**vars(two), "counts": {"refused": np.array([2.0])}})

    joined = EpisodeNote.concatenate([one, odd]).counts

    assert {name: counts_N.tolist() for name, counts_N in joined.items()} == {
        "calls": [0.0, 0.0],
        "refused": [0.0, 2.0],
    }


def test_a_shard_of_prompts_knows_the_ids_of_its_episodes() -> None:
    shard = PromptShard(
        prompts=tuple(IndexedTask(prompt_index=draw, epoch=0, task=make_task(draw)) for draw in (4, 9)),
        samples=(0, 1),
        attempt=1,
    )

    assert list(shard.ids) == [
        TrajectoryId(4, 0, 0, 1), TrajectoryId(4, 1, 0, 1), TrajectoryId(9, 0, 0, 1), TrajectoryId(9, 1, 0, 1)
    ]  # fmt: skip
