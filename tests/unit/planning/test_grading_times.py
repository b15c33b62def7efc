# SPDX-License-Identifier: Apache-2.0
"""Whether graders work on one batch at a time, from the times of their batches: by hand, and of made-up queues."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from podium.observe.timeline import TimelineSpan
from podium.planning.grading_times import grades_one_by_one, own_lengths_s, working_s


def spans(*times: tuple[float, float]) -> list[TimelineSpan]:
    return [TimelineSpan("graders[0]@node/cpu#0", "grader.grade", begin, end) for begin, end in times]


def queued(lengths: list[float], most_open: int, *, one_by_one: bool) -> list[TimelineSpan]:
    """A grader that gets another batch as soon as fewer than `most_open` are open."""
    found: list[tuple[float, float]] = []
    for number, length in enumerate(lengths):
        ends = sorted((end for _, end in found), reverse=True)
        begin = ends[most_open - 1] if number >= most_open else 0.0
        free = ends[0] if ends and one_by_one else begin
        found.append((begin, max(begin, free) + length))
    return spans(*found)


def test_batches_that_queue_tell_that_a_grader_takes_one_at_a_time() -> None:
    assert grades_one_by_one({"a": spans((0, 1), (0.1, 2), (0.2, 3), (0.3, 4))})
    assert not grades_one_by_one({"a": spans((0, 1), (0.1, 1.1), (0.2, 1.2), (0.3, 1.3))})
    assert grades_one_by_one({"a": spans((0, 1), (2, 3))})
    # Two at a time: the first of a step is alone, and each of the others waits for one.
    assert grades_one_by_one({"a": spans((0, 1), (0.1, 2), (1, 3), (2, 4), (9, 10), (9.1, 11), (10, 12))})
    assert not grades_one_by_one({"a": spans((0, 1), (0.5, 1.5), (1, 2), (1.5, 2.5), (9, 10), (9.5, 10.5))})


def test_a_grader_that_is_never_free_is_told_apart_by_what_it_is_given() -> None:
    """All batches wait as long: 1 s for each of those before. Two open ones are of a grader that takes one at a time,
    four of one that takes all of them, and 4 s are the length of a batch."""
    assert grades_one_by_one({"a": queued([1.0] * 20, 2, one_by_one=True)})
    assert not grades_one_by_one({"a": queued([4.0] * 20, 4, one_by_one=False)})


@pytest.mark.parametrize("sigma", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("cut", [0, 25], ids=["from the start", "the middle of a run"])
def test_graders_that_are_never_free_with_gradings_of_any_spread(sigma: float, cut: int) -> None:
    for seed in range(20):
        rng = Random(seed)
        lengths = [rng.lognormvariate(0.0, sigma) for _ in range(80)]
        assert grades_one_by_one({"a": queued(lengths, 2, one_by_one=True)[cut:]})
        if sigma > 0.1:  # else only the number of open batches tells, and it is that of the other kind
            assert grades_one_by_one({"a": queued(lengths, 4, one_by_one=True)[cut:]})
        assert not grades_one_by_one({"a": queued(lengths, 4, one_by_one=False)[cut:]})


def test_what_a_batch_took_is_without_its_wait() -> None:
    assert own_lengths_s(spans((0, 2), (1, 3), (1.5, 6), (8, 9))) == [2.0, 1.0, 3.0, 1.0]
    lengths = [0.5, 2.0, 1.0, 4.0, 0.25]
    assert own_lengths_s(queued(lengths, 2, one_by_one=True)) == lengths
    batch = TimelineSpan("graders[0]@node/cpu#0", "grader.grade", 1.0, 3.0, {"episodes": 4})
    assert own_lengths_s([batch]) == [0.5]


def test_a_grader_works_while_it_has_a_batch() -> None:
    """From 1 to 4, and from 5 to 7; of the window from 2 to 6 that is 2 s and 1 s."""
    batches = spans((1, 3), (2, 4), (5, 7))
    assert working_s(batches) == 5.0
    assert working_s(batches, (2.0, 6.0)) == 3.0
    for low, high in itertools.pairwise((0.0, 1.5, 3.5, 4.5, 5.5, 8.0)):
        assert 0.0 <= working_s(batches, (low, high)) <= high - low
    assert sum(working_s(batches, pair) for pair in itertools.pairwise((0.0, 1.5, 3.5, 4.5, 5.5, 8.0))) == 5.0
