# SPDX-License-Identifier: Apache-2.0
"""Batches on their way through a step: in ascending order of id, and each number with its own episode."""

# N episodes

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made_batches import (
    advantages_of,
    make_answer,
    make_batch,
    make_graded,
    make_result,
    make_rollouts,
    make_task,
)
from podium.cluster.results import Metric
from podium.errors import ResultError
from podium.roles.stages import GradedRollouts, Rollouts
from podium.rollout.requests import Completion, Finish

IDS = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=20).map(sorted)


def _length(draw: int, sample: int) -> int:
    return 1 + (draw + sample) % 4


def _answers(ids: list[tuple[int, int]]) -> list[Completion]:
    return [make_answer(draw, sample, tokens=[draw] * _length(draw, sample)) for draw, sample in ids]


@settings(max_examples=40)
@given(IDS, st.randoms(use_true_random=False))
def test_blocks_that_come_in_any_order_are_one_batch_in_order(ids: list[tuple[int, int]], random: Any) -> None:
    shuffled = list(ids)
    random.shuffle(shuffled)
    blocks = [make_result(_answers(shuffled[first : first + 3])) for first in range(0, len(shuffled), 3)]
    tasks = {draw: make_task(draw) for draw, _ in ids}

    rollouts = Rollouts.of([*blocks, make_result([])], tasks, step=1, version=0, metrics={})

    assert [tuple(id)[:2] for id in rollouts.rows.ids] == ids
    assert rollouts.note.sampled_N.tolist() == [_length(*id) for id in ids]
    block = rollouts.rows.read()
    assert (block.lengths_N - 2).tolist() == [_length(*id) for id in ids]
    assert rollouts.group_N.tolist() == [draw for draw, _ in ids]


def test_an_episode_that_comes_twice_is_an_error() -> None:
    blocks = [make_result([make_answer(0)]), make_result([make_answer(0)])]

    with pytest.raises(ResultError, match=r"0\.0#0"):
        Rollouts.of(blocks, {0: make_task(0)}, step=1, version=0, metrics={})


def test_taking_rows_takes_their_tasks_along() -> None:
    rollouts = make_rollouts([make_answer(draw) for draw in (1, 4, 6)]).take(np.array([0, 2]))

    assert sorted(rollouts.tasks) == [1, 6]
    assert rollouts.group_N.tolist() == [1, 6]


def test_joined_batches_are_in_order_and_their_metrics_add_up() -> None:
    used = [Metric(name="cache_used", value=value, reduction="max") for value in (0.7, 0.4)]
    sampled = [Metric(name="generated_tokens", value=value, reduction="sum") for value in (3.0, 5.0)]
    first = make_rollouts([make_answer(1), make_answer(9)], metrics=(used[0], sampled[0]))
    second = make_rollouts([make_answer(4, tokens=[1, 2, 3])], metrics=(used[1], sampled[1]))

    joined = Rollouts.join([first, second])

    assert joined.group_N.tolist() == [1, 4, 9]
    assert joined.note.sampled_N.tolist() == [1, 3, 1]
    assert joined.metrics == {"cache_used": 0.7, "generated_tokens": 8.0}
    assert sorted(joined.tasks) == [1, 4, 9]


@settings(max_examples=40)
@given(IDS, st.data())
def test_what_was_split_is_joined_to_the_same(ids: list[tuple[int, int]], data: st.DataObject) -> None:
    rewards = [10.0 * draw + sample for draw, sample in ids]
    whole = make_graded(rewards, [draw for draw, _ in ids], answers=_answers(ids))
    first_N = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))

    parts = [whole.take(np.flatnonzero(first_N)), whole.take(np.flatnonzero(~first_N))]
    joined = GradedRollouts.join(parts)

    assert joined.rollouts.rows.ids.same_as(whole.rollouts.rows.ids)
    assert joined.rewards_N.tolist() == rewards
    assert joined.values_NR[:, 0].tolist() == rewards
    assert joined.rollouts.note.sampled_N.tolist() == whole.rollouts.note.sampled_N.tolist()


def test_counts_and_extras_of_joined_batches_add_up() -> None:
    first = make_graded([1.0], [0], num_failed=1, num_dropped=2, extras={"f/a": (2.0, 1.0)})
    second = make_graded([1.0], [1], num_failed=3, num_dropped=4, extras={"f/a": (5.0, 2.0)}, first_error="late")

    joined = GradedRollouts.join([first, second])

    assert (joined.num_failed, joined.num_dropped, joined.first_error) == (4, 6, "late")
    assert joined.extras == {"f/a": (7.0, 3.0)}


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), max_size=20))
def test_a_uniform_group_has_one_reward_throughout(rows: list[tuple[int, float]]) -> None:
    rows = sorted(rows)
    if not rows:
        return
    graded = make_graded([reward for _, reward in rows], [group for group, _ in rows])

    alike = {group: len({reward for other, reward in rows if other == group}) == 1 for group, _ in rows}
    assert graded.uniform_N.tolist() == [alike[group] for group, _ in rows]


def test_a_group_without_advantages_is_uniform() -> None:
    graded = make_graded([0.1 + 0.2, 0.3], [0, 0])

    assert graded.uniform_N.all()


def test_nothing_left_has_no_uniform_group() -> None:
    assert len(make_graded([1.0], [0]).take(np.empty(0, np.int64)).uniform_N) == 0


def test_rewards_of_turns_leave_the_rest_for_the_last_token() -> None:
    graded = make_graded([3.0, 1.0, 0.0], [0, 0, 1], turns=[(0, 1, 0.5), (0, 2, 1.0), (2, 1, 2.0)])

    assert graded.last_token_rewards_N.tolist() == [1.5, 1.0, -2.0]
    assert graded.take(np.array([0, 2])).last_token_rewards_N.tolist() == [1.5, -2.0]


def test_advantages_stay_with_their_episodes_when_some_are_taken() -> None:
    graded = make_graded([1.0, 2.0, 3.0], [0, 0, 1])

    taken = make_batch(graded, [7.0, 8.0, 9.0]).take(np.array([0, 2]))

    assert advantages_of(taken).tolist() == [7.0, 9.0]
    assert taken.graded.rewards_N.tolist() == [1.0, 3.0]
    assert taken.rollouts.group_N.tolist() == [0, 1]


def test_truncated_is_what_did_not_end_by_itself() -> None:
    finishes: tuple[Finish, ...] = ("stop", "length", "cancelled", "error")
    rollouts = make_rollouts([make_answer(draw, finish=finish) for draw, finish in enumerate(finishes)])

    assert rollouts.truncated_N.tolist() == [False, True, True, False]
    # Of several turns: done by the environment, out of turns, out of tokens.
    turns = replace(rollouts.note, finish_N=np.array([4, 5, 6, 0], np.int8))
    assert replace(rollouts, note=turns).truncated_N.tolist() == [False, True, True, False]
