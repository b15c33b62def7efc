# SPDX-License-Identifier: Apache-2.0
"""Spans of one worker in lanes: in each, a span is inside the one before it or comes after it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from podium.observe.timeline import TimelineSpan
from podium.runs.tracing import in_lanes


def span(name: str, begin_s: float, end_s: float) -> TimelineSpan:
    return TimelineSpan("grade[0]", name, begin_s, end_s)


def test_calls_at_the_same_time_have_lanes_of_their_own_and_keep_what_is_inside() -> None:
    first, second, third = span("grade", 0, 10), span("grade", 2, 6), span("grade", 6, 12)
    inside = span("grade > decoding", 3, 5)
    assert list(in_lanes([inside, second, first, third])) == [(0, first), (1, second), (1, inside), (1, third)]


def test_a_span_as_long_as_the_one_around_it_is_inside_it() -> None:
    """The inner one is written first."""
    inner, outer = span("compute > checkpoint", 1, 2), span("compute", 1, 2)
    assert list(in_lanes([inner, outer])) == [(0, outer), (0, inner)]


def test_a_span_whose_outer_one_is_unknown_is_shown_all_the_same() -> None:
    """The outer one ends later, and may be in no file yet."""
    alone, beside = span("stream > waiting", 1, 2), span("stream > waiting", 1.5, 3)
    assert list(in_lanes([alone, beside])) == [(0, alone), (1, beside)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from(("a", "b", "a > b", "a > b > c")))))
def test_no_lane_has_spans_that_cross(drawn: list[tuple[int, int, str]]) -> None:
    spans = [span(name, begin, begin + length) for begin, length, name in drawn]
    placed = list(in_lanes(spans))
    assert Counter(each for _, each in placed) == Counter(spans)
    for at, (lane, outer) in enumerate(placed):
        for other, later in placed[at + 1 :]:
            if other == lane and later.begin_s < outer.end_s:
                assert later.end_s <= outer.end_s
